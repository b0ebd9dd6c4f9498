"""Before the first fork: a job that does nothing, run a few times.

Python learns from the code that it runs, and writes what it has learnt into it.  What the zygote knows, no worker and
no process of a job learns again, on pages that it would have to copy first.
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

TIMES = 20  # Python has learnt after eight


def nothing() -> None:
    """What is played."""


class Stage:
    """An app with that task only."""

    lifespans: tuple[Any, ...] = ()
    middlewares: tuple[Any, ...] = ()

    def __init__(self) -> None:
        front: Any = self
        self.task: Task[[], None, None] = Task(front, nothing, "nothing", Options(), Policy())

    def task_table(self) -> dict[str, Any]:
        return {self.task.name: self.task}


def rehearse() -> None:
    """Leaves nothing behind but what Python has learnt."""
    app: Any = Stage()
    node, sock = socket.socketpair()
    tokens, token_in = os.pipe()
    shared = wire.SharedMemory.create()
    memory, box = wire.SharedMemory(shared), ResultFile()
    with node, sock:
        worker = Worker(app, sock, tokens, memory)
        job = wire.JobMessage(1, 1, 1, app.task.name, app.task.call().args, None)
        for serial in range(TIMES):
            worker.run_one(serial, job)
            for result in memory.take():
                box.leave(tuple(result))
            box.take()
    box.close()
    memory.close()
    for fd in (tokens, token_in, shared):
        os.close(fd)
