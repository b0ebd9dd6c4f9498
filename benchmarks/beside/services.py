"""The databases and brokers, each our own where that is possible, with durable settings."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from urllib.parse import urlsplit

from measure.databases import postgres_databases, sqlite_databases

from beside.installing import Unavailable

Fresh = Callable[[], AbstractContextManager[str]]

TITLES = {"sqlite": "SQLite", "postgres": "PostgreSQL", "redis": "Redis", "rabbitmq": "RabbitMQ"}
SETTINGS = {
    "sqlite": "WAL, synchronous FULL (genba syncs the log itself, before a call returns)",
    "postgres": "from the wheel, fsync and synchronous_commit on, over a socket",
    "redis": "a server of our own, appendonly yes, appendfsync everysec",
    "rabbitmq": "the machine's own, durable queues, persistent messages",
}


class Services:
    """Started when first asked for, ended with the run."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._fresh: dict[str, Fresh | Unavailable] = {}

    def fresh(self, name: str) -> Fresh:
        """Makes an empty place to work in; Unavailable if this machine has none."""
        if name not in self._fresh:
            try:
                self._fresh[name] = self._stack.enter_context(_SERVICES[name]())
            except Unavailable as reason:
                self._fresh[name] = reason
        found = self._fresh[name]
        if isinstance(found, Unavailable):
            raise found
        return found


@contextmanager
def _redis() -> Iterator[Fresh]:
    program = shutil.which("redis-server")
    if program is None:
        raise Unavailable("there is no redis-server on this machine")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="genba-redis-") as folder:
        durable = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, *durable]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _until_it_answers("127.0.0.1", port, "redis-server")

            @contextmanager
            def fresh() -> Iterator[str]:
                with socket.create_connection(("127.0.0.1", port)) as conn:
                    conn.sendall(b"FLUSHALL\r\n")
                    conn.recv(100)
                yield f"redis://127.0.0.1:{port}/0"

            yield fresh
        finally:
            server.terminate()
            server.wait()


@contextmanager
def _rabbitmq() -> Iterator[Fresh]:
    """One that runs already: AMQP_URL, or the usual address.  Queues have names of their own, and are deleted."""
    url = os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/")
    parts = urlsplit(url)
    _until_it_answers(parts.hostname or "127.0.0.1", parts.port or 5672, "RabbitMQ", within=1.0)

    @contextmanager
    def fresh() -> Iterator[str]:
        os.environ["BENCH_QUEUE"] = f"genba-bench-{uuid.uuid4().hex[:12]}"
        yield url

    yield fresh


def _until_it_answers(host: str, port: int, name: str, within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{name} does not answer on port {port}: {error.strerror or error}"
                ) from error
            time.sleep(0.05)
        else:
            return


_SERVICES: dict[str, Callable[[], AbstractContextManager[Fresh]]] = {
    "sqlite": sqlite_databases,
    "postgres": postgres_databases,
    "redis": _redis,
    "rabbitmq": _rabbitmq,
}
