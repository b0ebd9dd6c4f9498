"""Runs a job that does nothing a few times in the zygote, before the first fork.

Python specializes the code that it runs, and writes that into the code's own memory.  After this,
no worker and no process of a job does it again, on pages that the kernel would have to copy first.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from genba import wire
from genba.client.task import Task
from genba.options.table import Options, Policy
from genba.worker.fork_per_job import ResultFile
from genba.worker.worker import Worker

_RUNS = 20  # Python has specialized the code after eight


def do_nothing() -> None:
    """The job."""


class WarmUpApp:
    """An app with this one task."""

    lifespans: tuple[Any, ...] = ()
    middlewares: tuple[Any, ...] = ()

    def __init__(self) -> None:
        app: Any = self
        self.task: Task[[], None, None] = Task(app, do_nothing, "nothing", Options(), Policy())

    def task_table(self) -> dict[str, Any]:
        return {self.task.name: self.task}


def warm_up() -> None:
    """Run the job; nothing is left but what Python has specialized."""
    app: Any = WarmUpApp()
    node, sock = socket.socketpair()
    tokens, token_in = os.pipe()
    memory_fd = wire.SharedMemory.create()
    memory, result_file = wire.SharedMemory(memory_fd), ResultFile()
    with node, sock:
        worker = Worker(app, sock, tokens, memory)
        job = wire.JobMessage(1, 1, 1, app.task.name, app.task.call().args, None)
        for serial in range(_RUNS):
            worker.run_one(serial, job)
            for result in memory.take():
                result_file.put(tuple(result))
            result_file.take()
    result_file.close()
    memory.close()
    for fd in (tokens, token_in, memory_fd):
        os.close(fd)
