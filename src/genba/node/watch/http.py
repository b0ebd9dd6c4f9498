"""The optional port of a node: /metrics for Prometheus, /livez and /readyz for whoever keeps it running.

Its threads only read what loop and keeper have noted; /metrics also asks the database, at most once a second.
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
from genba.node.watch.counters import Counters
from genba.node.watch.metrics import NodeStatus, text
from genba.storage.jobs.counts import OpenJobCounts
from genba.storage.records import Micros
from genba.storage.store import Store

PATIENCE = 5.0  # seconds that a client may take for its question
STALE, STALE_LEAST = 60.0, 5.0  # while the app is imported, and at least
FRESH = 1.0  # seconds for which a look at the database is good


class MetricsServer:
    """What is told there is noted by the loop: in `vitals` how the node is, in `meter` what it did."""

    def __init__(self, where: tuple[str, int], name: str, slots: int) -> None:
        self.vitals = NodeStatus(name, version=version(), slots=slots, turned=time.monotonic())
        self.meter = Counters()
        self.stale = STALE  # seconds without a sign of life
        self._look: Callable[[], OpenJobCounts] | None = None
        self._over = False
        self._lock = threading.Lock()
        self._looked: tuple[float, OpenJobCounts | None] | None = None
        host, port = where
        try:
            self._server = _Server((host, port), _handler(self))
        except OSError as error:
            raise GenbaError(
                f"metrics: {host}:{port} cannot be had: {error.strerror or error}"
            ) from error
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._serve, name="genba-port", daemon=True)
        self._thread.start()

    def joined(self, store: Store, lease: Micros, settings: NodeSettings) -> None:
        """The node is there: from now on the database can be asked.

        What has not come round for so long as the guard waits for its beat is as good as dead.
        """
        self.vitals.namespace = store.namespace
        self.vitals.needs_workers = settings.pool != "ondemand" and settings.min > 0
        self.stale = max(STALE_LEAST, lease / 1_000_000 * 0.8)
        self._look = store.counts.read

    def turned(self) -> None:
        """The loop has come round."""
        self.vitals.turned = time.monotonic()

    def note(self, brain: Brain, keeper: Maintenance, gate: str | None) -> None:
        vitals = self.vitals
        vitals.workers, vitals.busy = brain.staff
        vitals.draining, vitals.gate = brain.draining, gate
        vitals.seen, vitals.trouble = keeper.seen, keeper.trouble

    def close(self) -> None:
        self._over, self._look = True, None
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes who waits for a client
        self._thread.join(PATIENCE)
        self._server.server_close()

    def _serve(self) -> None:
        while not self._over:
            self._server.handle_request()

    def answer(self, path: str) -> tuple[HTTPStatus, str]:
        match path.partition("?")[0]:
            case "/livez":
                return _verdict(dead(self.vitals, self.stale, time.monotonic()))
            case "/readyz":
                return _verdict(unready(self.vitals, self.stale, time.monotonic()))
            case "/metrics":
                return HTTPStatus.OK, text(self.vitals, self.meter, self._levels())
            case _:
                return HTTPStatus.NOT_FOUND, "there are /metrics, /livez and /readyz\n"

    def _levels(self) -> OpenJobCounts | None:
        with self._lock:
            now = time.monotonic()
            if self._looked is None or now - self._looked[0] > FRESH:
                self._looked = (now, self._ask())
            return self._looked[1]

    def _ask(self) -> OpenJobCounts | None:
        try:
            return self._look() if self._look is not None else None
        except StoreError:
            return None


def dead(vitals: NodeStatus, stale: float, now: float) -> str | None:
    """Why a new process would be better; None: it lives."""
    idle = now - vitals.turned
    return f"the loop has not come round for {idle:.0f} s" if idle > stale else None


def unready(vitals: NodeStatus, stale: float, now: float) -> str | None:
    """Why it cannot run jobs now; None: it can."""
    if vitals.draining:
        return "it drains"
    if vitals.seen is None:
        return "it has not joined yet"
    if vitals.trouble is not None:
        return f"the database does not answer: {vitals.trouble}"
    if now - vitals.seen > stale:
        return f"the database has not answered for {now - vitals.seen:.0f} s"
    if vitals.needs_workers and not vitals.workers:
        return "no worker is up"
    return dead(vitals, stale, now)


def _verdict(fault: str | None) -> tuple[HTTPStatus, str]:
    return (
        (HTTPStatus.OK, "ok\n") if fault is None else (HTTPStatus.SERVICE_UNAVAILABLE, f"{fault}\n")
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is no news."""


def _handler(port: MetricsServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE
        server_version = "genba"
        sys_version = ""

        def do_GET(self) -> None:  # a name that http.server calls
            status, body = port.answer(self.path)
            told = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(told)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Probes come every few seconds."""

    return Handler
