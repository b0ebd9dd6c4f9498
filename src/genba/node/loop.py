"""The node's loop: it waits for everything at once, in one thread, and never for the database.

Workers, guard and zygote, wake-ups, signals and the database threads all end in one selector.
Until the zygote has imported the app there is only a `Node`; then it joins, and a `JoinedNode`
takes the events.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import secrets
import selectors
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from genba.domain.clock import SystemClock
from genba.domain.duration import SECOND
from genba.errors import BadOption, GenbaError, StoreError
from genba.node.database.join import join, queues_of, set_title
from genba.node.joined_node import (
    EXIT_OK,
    JoinedNode,
    NodeExit,
    NodeParts,
    changed_settings,
)
from genba.node.log import log_environ, set_up_log
from genba.node.processes.channel import Channel, Channels
from genba.node.processes.linux import keep_memory
from genba.node.processes.pool import (
    AppChanged,
    AppImported,
    GuardDied,
    ImportFailed,
    Pool,
    WorkerStarted,
    ZygoteDied,
)
from genba.node.processes.wakeup import WakeupSocket
from genba.node.settings import NodeSettings
from genba.node.watch.monitor import Monitor
from genba.storage.nodes.leftover_processes import INCARNATION
from genba.storage.store import Store, open_store

if TYPE_CHECKING:
    from genba.node.watch.http import MetricsServer

log = logging.getLogger("genba.node")

MAX_ZYGOTE_STARTS = 10  # of a zygote that dies while it imports the app
READ_BYTES = 1 << 16


class CannotImport(BadOption):
    """There is no app whose jobs could run.

    `frames` are the lines of the user's code that led there.
    """

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


def run(settings: NodeSettings, reread: Callable[[], NodeSettings] | None = None) -> int:
    """Run a node until it ends; gives the exit code.

    On SIGHUP `reread` gives the settings anew.  CannotImport, if there is no app.
    """
    set_up_log(settings)
    if sys.platform != "linux":
        raise GenbaError(f"a node needs Linux, and this is {sys.platform}; clients run everywhere")
    gc.freeze()
    # Thousands of jobs come and go here, and none refers to itself.
    gc.set_threshold(200_000, 20, 20)
    keep_memory()
    while True:
        node = Node(settings, reread)
        try:
            code = node.run()
        finally:
            node.close()
        settings = node.settings
        if code is not None:
            return code
        log.warning("starting again as a new incarnation")


class Node:
    def __init__(
        self, settings: NodeSettings, reread: Callable[[], NodeSettings] | None = None
    ) -> None:
        self._settings = settings
        self._reread = reread
        self._clock = SystemClock()
        self._inbox: collections.deque[Any] = collections.deque()
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ, "wake")
        id = secrets.randbits(62) + 1
        env = {**os.environ, INCARNATION: str(id), **log_environ(settings)}
        title = f"/node[{os.getpid()}]"
        self._pool = Pool(settings.target, env=env, node_title=title, reload=settings.reload)
        self._selector.register(self._pool.sockets[0], selectors.EVENT_READ, "pool")
        self._channels = Channels(self._selector)
        self._metrics = _start_metrics(settings)
        self._exit = NodeExit()
        self._parts = NodeParts(
            id=id,
            clock=self._clock,
            pool=self._pool,
            channels=self._channels,
            wakeup=WakeupSocket(self._selector),
            monitor=Monitor(),
            metrics=self._metrics,
            exit=self._exit,
            inbox=self._inbox,
            post=self._post,
        )
        self._store: Store | None = None
        self._joined: JoinedNode | None = None
        self._signals: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._zygote_starts = 0

    @property
    def settings(self) -> NodeSettings:
        return self._joined.settings if self._joined else self._settings

    def run(self) -> int | None:
        """Give the exit code; None to start again under a new identity."""
        self._listen_to_signals()
        self._pool.start()
        if self._metrics:
            log.info("metrics are at http://%s/metrics", self._metrics.address)
        while not self._exit.over:
            if self._metrics:
                self._metrics.on_loop()
            for key, _ in self._selector.select(self._patience()):
                self._read(key)
            self._read_signals()
            self._read_inbox()
            if self._joined:
                self._joined.tick()
        return None if self._exit.lost_lease and self._exit.code is None else self._exit.code

    def close(self) -> None:
        """Give everything back, and end what still runs."""
        if self._metrics:
            self._metrics.close()
        left = self._pool.end()
        if left:
            log.error("%d processes could not be ended", left)
        if self._store and self._joined:
            self._joined.close()
            try:
                if not self._exit.lost_lease:
                    self._store.nodes.leave(self._parts.id)
            except StoreError as error:
                log.warning("could not remove this node from the database: %s", error)
        if self._store:
            self._store.node_wakeups.unregister()
            self._store.close()
        self._channels.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._wake_out)
        os.close(self._wake_in)
        if self._joined:
            self._joined.cancel_deadline()

    # events

    def _patience(self) -> float:
        """Give how many seconds to wait for events."""
        if self._inbox:
            return 0
        return self._joined.patience() if self._joined else 1.0

    def _listen_to_signals(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, note)
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)

    def _post(self, event: Any) -> None:
        """Pass an event of another thread to the loop."""
        self._inbox.append(event)
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups
            os.write(self._wake_in, b"\0")

    def _read(self, key: selectors.SelectorKey) -> None:
        match key.data:
            case "wake":
                os.read(self._wake_out, READ_BYTES)
            case "pool":
                for event in self._pool.ready():
                    self._on_pool_event(event)
            case "wakeup" if self._joined:
                self._joined.on_wakeup()
            # It may have been dropped by an event just before.
            case Channel() as channel if self._channels.get(channel.slot) is channel:
                if self._joined:
                    self._joined.read_channel(channel)

    def _read_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGHUP:
                self._read_settings_again()
                continue
            if self._joined is None:
                self._exit.code, self._exit.over = EXIT_OK, True
                return
            hurry = self._joined.draining
            log.info("%s: %s", signal.Signals(number).name, "hurrying" if hurry else "draining")
            self._joined.drain(hurry)

    def _read_inbox(self) -> None:
        while self._inbox and self._joined:
            self._joined.on_database_event(self._inbox.popleft())

    def _read_settings_again(self) -> None:
        if self._reread is None:
            return
        try:
            changes = self._reread().pool_settings
        except GenbaError as error:
            log.error("the settings stay as they are: %s", error)
            return
        if self._joined:
            self._joined.change_settings(changes)
        else:
            self._settings = changed_settings(self._settings, changes) or self._settings

    # processes

    def _on_pool_event(self, event: Any) -> None:
        match event:
            case AppImported(contents):
                self._on_app_imported(contents)
            case ImportFailed(message, frames):
                if not self.settings.reload:
                    raise CannotImport(message, frames)
                sys.stderr.write(f"{frames}genba: {message}\n")
                log.warning("waiting for a change of its files")
            case AppChanged(path):
                log.info("%s has changed: importing the app again", path)
                if self._joined:
                    self._joined.on_app_changed()
                self._pool.restart_zygote()
            case ZygoteDied(status, restarting):
                self._on_zygote_died(status, restarting)
            case WorkerStarted(slot, _pid, _):
                channel = self._channels.get(slot)
                if channel is not None:
                    channel.close_worker_end()
            case GuardDied(status, _slots, _left):
                self._on_guard_died(status)
            case _ if self._joined:
                self._joined.on_pool_event(event)

    def _on_zygote_died(self, status: int, restarting: bool) -> None:
        if self._exit.over:
            return
        if self._joined:
            self._joined.on_zygote_gone()
        self._zygote_starts += not restarting
        if self._zygote_starts > MAX_ZYGOTE_STARTS and self._joined is None:
            raise CannotImport(
                f"{self.settings.target} kills the process that imports it ({status})"
            )
        if not restarting:
            log.warning("the zygote died (status %s); starting another", status)
            self._pool.restart_zygote()

    def _on_guard_died(self, status: int) -> None:
        if self._joined:
            self._joined.on_guard_died()
        if not self._exit.over:
            log.warning(
                "the guard died (status %s), and all workers with it; starting again", status
            )
            self._pool.start()

    # the app

    def _on_app_imported(self, app: dict[str, Any]) -> None:
        self._choose_spawn(app.get("threads", ()))
        if self._joined:
            self._joined.set_app(app)
            return
        self._settings = self._settings.serving(queues_of(app))
        self._store = open_store(
            app["url"], namespace=app["namespace"], age_step=int(app["age_step"])
        )
        self._join(self._store, app)
        self._joined = JoinedNode(self._parts, self._store, self._settings, app)
        self._joined.start()

    def _join(self, store: Store, app: dict[str, Any]) -> None:
        store.install()
        if store.pooler_found:
            log.warning(
                "behind a pooler no process can wake a node: looking for work every %g s",
                self._settings.poll / SECOND,
            )
        store.events.node = self._parts.id
        set_title(f"genba-{app['namespace']}: /node[{os.getpid()}] {self._settings.name}")
        store.node_wakeups.register(self._parts.id)
        self._parts.wakeup.follow(store.node_wakeups)
        join(store, self._parts.id, self._settings, int(app["lease"]), app["tasks"])

    def _choose_spawn(self, threads: Sequence[str]) -> None:
        """Choose between fork and exec: a fork copies one thread only, and the locks of all."""
        spawn = self.settings.spawn or ("exec" if threads else "fork")
        self._pool.forks = spawn == "fork"
        if threads:
            names = ", ".join(threads)
            if self.settings.spawn is None:
                log.warning(
                    "the app starts threads at import (%s): workers import it anew (spawn=exec)",
                    names,
                )
            elif self._pool.forks:
                log.warning(
                    "the app starts threads at import (%s): "
                    "a lock they hold stays locked in workers",
                    names,
                )


def _start_metrics(settings: NodeSettings) -> MetricsServer | None:
    if settings.metrics is None:
        return None
    # Most nodes have none, and need not load http.server.
    from genba.node.watch.http import MetricsServer

    return MetricsServer(settings.metrics, settings.name, settings.slots)
