"""One thread per client process that receives its wake-ups and renews its session.

It runs while the process waits, holds a lock outside of a job, or has subscribed to a topic, and
for a little longer. A forked child starts without it: locks, waiting and topics stay with the
parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator

from genba.domain.clock import SystemClock
from genba.errors import StoreError
from genba.signal_safe import defer_stop
from genba.storage.clients.sessions import Sessions
from genba.storage.records import Micros
from genba.storage.wakeups import ClientWakeups, WakeupReceiver

log = logging.getLogger("genba")

IDLE_SECONDS = 5.0  # the thread ends after that long without users
REPAIR_SECONDS = 1.0  # between two tries to open a broken receiver again


class ClientListener:
    def __init__(self, wakeups: ClientWakeups, sessions: Sessions) -> None:
        self._wakeups = wakeups
        self._sessions = sessions
        self._clock = SystemClock()
        self._left_to_parent: list[ClientListener | WakeupReceiver | None] = []
        self._start_anew()

    def _start_anew(self) -> None:
        self._pid = os.getpid()
        self._cond = threading.Condition()
        self._received = 0
        self._users = 0
        self._thread: threading.Thread | None = None
        self._receiver: WakeupReceiver | None = None
        self._awaiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._wake: tuple[int, int] | None = None
        self._closing = False
        self._retries: list[Callable[[], object]] = []
        self._session: int | None = None
        self._good_until: Micros = 0
        self.id = secrets.randbits(62) + 1

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._left_to_parent.append(self._receiver)  # must not be closed here
            self._start_anew()

    # waiting

    @contextlib.contextmanager
    def listening(self) -> Iterator[ClientListener]:
        """Receive wake-ups as long as the block lasts."""
        self.enter()
        try:
            yield self
        finally:
            self.leave()

    @defer_stop
    def enter(self) -> None:
        self._own()
        with self._cond:
            self._users += 1
            if self._thread is None:
                self._closing = False
                self._open_receiver()
                self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._thread = threading.Thread(
                    target=self._run, name="genba-listener", daemon=True
                )
                self._thread.start()

    @defer_stop
    def leave(self) -> None:
        if self._pid == os.getpid():
            with self._cond:
                self._users -= 1

    def mark(self) -> int:
        """Count the wake-ups so far."""
        return self._received

    def wait(self, mark: int, within: float) -> None:
        """Wait for a wake-up since `mark`."""
        with self._cond:
            self._cond.wait_for(lambda: self._received != mark or self._closing, max(0.0, within))

    async def await_(self, mark: int, within: float) -> None:
        waiting = (asyncio.get_running_loop(), asyncio.Event())
        self._awaiting.add(waiting)
        try:
            if self._received == mark:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(waiting[1].wait(), max(0.0, within))
        finally:
            self._awaiting.discard(waiting)

    # the session

    @defer_stop
    def session(self) -> int:
        """Return the session of this process; open or renew it if necessary."""
        self._own()
        with self._cond:
            if self._session is None or self._clock.boot() >= self._good_until:
                sent = self._clock.boot()
                if self._session is None or not self._sessions.renew(self._session):
                    self._sessions.open(self.id)
                    self._session = self.id
                self._good_until = sent + self._sessions.lease
            return self._session

    def lost(self, session: int) -> bool:
        """Test whether others may have declared the session dead."""
        return session != self._session or self._clock.boot() >= self._good_until

    @defer_stop
    def forget(self, session: int) -> None:
        """Note that others have ended the session."""
        with self._cond:
            if self._session == session:
                self._session = None

    @defer_stop
    def later(self, action: Callable[[], object]) -> None:
        """Repeat the action until the database answers again."""
        with self._cond:
            self._retries.append(action)

    # the thread

    def _open_receiver(self) -> None:
        try:
            self._receiver = self._wakeups.open_receiver(self.id)
        except (StoreError, OSError) as error:
            log.warning("genba receives no wake-ups here, and looks once a second: %s", error)
            self._receiver = None

    def _run(self) -> None:
        assert self._wake is not None
        idle_since: float | None = None
        renew_at = time.monotonic()
        while True:
            with self._cond:
                if self._users:
                    idle_since = None
                elif idle_since is None:
                    idle_since = time.monotonic()
                if self._closing or (
                    idle_since is not None and time.monotonic() - idle_since >= IDLE_SECONDS
                ):
                    self._end()
                    return
            self._receive()
            if self._session is not None and time.monotonic() >= renew_at:
                renew_at = time.monotonic() + self._sessions.renewal_interval / 1_000_000
                self._renew(self._session)
                self._run_retries()

    def _receive(self) -> None:
        assert self._wake is not None
        within = min(REPAIR_SECONDS, self._sessions.renewal_interval / 1_000_000)
        receiver = self._receiver.fileno() if self._receiver else -1
        ready, _, _ = select.select(
            [fd for fd in (receiver, self._wake[0]) if fd >= 0], [], [], within
        )
        if self._receiver is None:
            with contextlib.suppress(StoreError, OSError):  # was logged before
                self._receiver = self._wakeups.open_receiver(self.id)
        elif receiver in ready or receiver < 0:
            with contextlib.suppress(StoreError):  # until it is repaired, waiting code polls
                self._receiver.clear()
        if receiver in ready:
            self._notify()
        if self._wake[0] in ready:
            os.read(self._wake[0], 4096)

    def _notify(self) -> None:
        with self._cond:
            self._received += 1
            self._cond.notify_all()
        for loop, received in list(self._awaiting):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(received.set)

    def _renew(self, session: int) -> None:
        sent = self._clock.boot()
        try:
            alive = self._sessions.renew(session)
        except StoreError as error:
            log.warning("genba cannot renew the session that its locks belong to: %s", error)
            return
        with self._cond:
            if self._session != session:
                return
            if alive:
                self._good_until = sent + self._sessions.lease
            else:
                self._session = None
                self._notify_locked()

    def _run_retries(self) -> None:
        with contextlib.suppress(StoreError):
            while self._retries:
                self._retries[0]()
                self._retries.pop(0)

    def _notify_locked(self) -> None:
        self._received += 1
        self._cond.notify_all()

    def _end(self) -> None:
        """End the thread, with the condition held; the next user starts a new one."""
        session, self._session, self._thread = self._session, None, None
        receiver, self._receiver = self._receiver, None
        assert self._wake is not None
        for fd in self._wake:
            os.close(fd)
        self._wake = None
        self.id = secrets.randbits(62) + 1
        self._cond.notify_all()
        with contextlib.suppress(StoreError):  # others find out by its lease
            if session is not None:
                self._sessions.close(session)
        if receiver is not None:
            receiver.close()

    def close(self) -> None:
        if self._pid != os.getpid():
            return
        with self._cond:
            self._closing = True
            thread = self._thread
            if self._wake is not None:
                os.write(self._wake[1], b"\0")
        if thread is not None and thread is not threading.current_thread():
            thread.join(10)
