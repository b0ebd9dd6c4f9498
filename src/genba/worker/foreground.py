"""Runs one job in the calling process, with its terminal and without a node."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from typing import Any

from genba import wire
from genba.domain.clock import Clock
from genba.worker.job_runner import WorkerApp
from genba.worker.worker import Worker


class _Outbox(socket.socket):
    """Collects what a worker would send to its node."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._frames = wire.Frames()
        self.results: list[list[Any]] = []

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        for message in self._frames.feed(bytes(data)):
            if message[0] == wire.RESULTS:
                self.results += message[1]


def run_in_foreground(
    app: WorkerApp,
    serial: int,
    job: wire.JobMessage,
    memory: wire.SharedMemory,
    clock: Clock | None = None,
) -> list[list[Any]]:
    """Run the job inside the app's lifespans; return its result as a worker sends it."""
    tokens, token_in = os.pipe()
    with _Outbox() as outbox:
        try:
            worker = Worker(app, outbox, tokens, memory, clock)
            with closing(worker), worker.lifespans():
                worker.run_one(serial, job)
            return [*memory.take(), *outbox.results]
        finally:
            os.close(tokens)
            os.close(token_in)
