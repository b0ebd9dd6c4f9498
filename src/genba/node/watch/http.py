"""The optional HTTP server of a node.

/metrics for Prometheus, /livez and /readyz for a service manager.

Its threads read what the loop and maintenance have noted; /metrics also asks the database, at most
once a second.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from genba.errors import GenbaError, StoreError
from genba.node.database.join import version
from genba.node.database.maintenance import Maintenance
from genba.node.decide.brain import Brain
from genba.node.settings import NodeSettings
from genba.node.timing import (
    GUARD_PART,
    METRICS_CLIENT_SECONDS,
    SHORTEST_STALE_SECONDS,
    STALE_IMPORT_SECONDS,
)
from genba.node.watch.counters import Counters
from genba.node.watch.metrics import NodeStatus, text
from genba.storage.jobs.counts import OpenJobCounts
from genba.storage.records import Micros
from genba.storage.store import Store

CACHE_SECONDS = 1.0  # how long one look at the database is good for


class MetricsServer:
    """It answers from `status`, how the node is, and `counters`, what it has done."""

    def __init__(self, where: tuple[str, int], name: str, slots: int) -> None:
        self.status = NodeStatus(name, version=version(), slots=slots, loop_at=time.monotonic())
        self.counters = Counters()
        self.stale_seconds = STALE_IMPORT_SECONDS  # without a sign of life
        self._look: Callable[[], OpenJobCounts] | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._cached: tuple[float, OpenJobCounts | None] | None = None
        host, port = where
        try:
            self._server = _Server((host, port), _handler(self))
        except OSError as error:
            reason = error.strerror or error
            raise GenbaError(f"metrics: cannot listen on {host}:{port}: {reason}") from error
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._serve, name="genba-http", daemon=True)
        self._thread.start()

    def on_joined(self, store: Store, lease: Micros, settings: NodeSettings) -> None:
        """Use the database from now on, and expect signs of life as often as the guard does."""
        self.status.namespace = store.namespace
        self.status.needs_workers = settings.pool != "ondemand" and settings.min > 0
        self.stale_seconds = max(SHORTEST_STALE_SECONDS, lease / 1_000_000 * GUARD_PART)
        self._look = store.counts.read

    def on_loop(self) -> None:
        """Note that the loop has come round."""
        self.status.loop_at = time.monotonic()

    def note(self, brain: Brain, maintenance: Maintenance, gate: str | None) -> None:
        status = self.status
        status.workers, status.busy = brain.worker_counts
        status.draining, status.gate = brain.draining, gate
        status.database_at, status.trouble = maintenance.last_round_at, maintenance.trouble

    def close(self) -> None:
        self._ended, self._look = True, None
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._thread.join(METRICS_CLIENT_SECONDS)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._ended:
            self._server.handle_request()

    def answer(self, path: str) -> tuple[HTTPStatus, str]:
        match path.partition("?")[0]:
            case "/livez":
                return _verdict(dead(self.status, self.stale_seconds, time.monotonic()))
            case "/readyz":
                return _verdict(unready(self.status, self.stale_seconds, time.monotonic()))
            case "/metrics":
                return HTTPStatus.OK, text(self.status, self.counters, self._levels())
            case _:
                return HTTPStatus.NOT_FOUND, "there are /metrics, /livez and /readyz\n"

    def _levels(self) -> OpenJobCounts | None:
        with self._lock:
            now = time.monotonic()
            if self._cached is None or now - self._cached[0] > CACHE_SECONDS:
                self._cached = (now, self._look_at_database())
            return self._cached[1]

    def _look_at_database(self) -> OpenJobCounts | None:
        try:
            return self._look() if self._look is not None else None
        except StoreError:
            return None


def dead(status: NodeStatus, stale_seconds: float, now: float) -> str | None:
    """Give why the node should be started again; None if it lives."""
    idle = now - status.loop_at
    return f"the loop has not come round for {idle:.0f} s" if idle > stale_seconds else None


def unready(status: NodeStatus, stale_seconds: float, now: float) -> str | None:
    """Give why the node cannot run jobs now; None if it can."""
    if status.draining:
        return "the node drains"
    if status.database_at is None:
        return "the node has not joined yet"
    if status.trouble is not None:
        return f"the database does not answer: {status.trouble}"
    if now - status.database_at > stale_seconds:
        return f"the database has not answered for {now - status.database_at:.0f} s"
    if status.needs_workers and not status.workers:
        return "no worker is ready"
    return dead(status, stale_seconds, now)


def _verdict(fault: str | None) -> tuple[HTTPStatus, str]:
    if fault is None:
        return HTTPStatus.OK, "ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, f"{fault}\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def handle_error(self, request: object, client_address: object) -> None:
        """Do not log clients that disconnect in the middle."""


def _handler(server: MetricsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = METRICS_CLIENT_SECONDS
        server_version = "genba"
        sys_version = ""

        def do_GET(self) -> None:  # http.server calls it by this name
            status, body = server.answer(self.path)
            content = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Do not log requests: probes come every few seconds."""

    return Handler
