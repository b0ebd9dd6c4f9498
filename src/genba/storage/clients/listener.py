"""The ear of a client process: one thread that hears its bell, for all who wait, and renews its session.

There is one while somebody waits, holds a lock outside of a job, or listens to a topic, and for a little longer.
After a fork the child has none of it: locks, lines and topics stay with the parent.
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

LINGER = 5.0  # seconds without anybody to hear for
MEND = 1.0  # between two tries to hang up a broken bell again


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
        self._heard = 0
        self._users = 0
        self._thread: threading.Thread | None = None
        self._bell: WakeupReceiver | None = None
        self._awaiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._wake: tuple[int, int] | None = None
        self._closing = False
        self._deeds: list[Callable[[], object]] = []
        self._session: int | None = None
        self._good_until: Micros = 0
        self.id = secrets.randbits(62) + 1

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._left_to_parent.append(self._bell)  # must not be closed here
            self._start_anew()

    # for those who wait

    @contextlib.contextmanager
    def listening(self) -> Iterator[ClientListener]:
        """It hears as long as the block lasts."""
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
                self._hang()
                self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._thread = threading.Thread(target=self._run, name="genba-ear", daemon=True)
                self._thread.start()

    @defer_stop
    def leave(self) -> None:
        if self._pid == os.getpid():
            with self._cond:
                self._users -= 1

    def mark(self) -> int:
        """How often it has rung so far."""
        return self._heard

    def wait(self, mark: int, within: float) -> None:
        """Until it has rung since `mark`."""
        with self._cond:
            self._cond.wait_for(lambda: self._heard != mark or self._closing, max(0.0, within))

    async def await_(self, mark: int, within: float) -> None:
        rung = (asyncio.get_running_loop(), asyncio.Event())
        self._awaiting.add(rung)
        try:
            if self._heard == mark:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(rung[1].wait(), max(0.0, within))
        finally:
            self._awaiting.discard(rung)

    # the session

    @defer_stop
    def session(self) -> int:
        """That of this process, alive; opened if it has none."""
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
        """Whether others may have taken it for dead, as far as it can be known here."""
        return session != self._session or self._clock.boot() >= self._good_until

    @defer_stop
    def forget(self, session: int) -> None:
        """Others have ended it."""
        with self._cond:
            if self._session == session:
                self._session = None

    @defer_stop
    def later(self, deed: Callable[[], object]) -> None:
        """Do it when the database answers again."""
        with self._cond:
            self._deeds.append(deed)

    # the thread

    def _hang(self) -> None:
        try:
            self._bell = self._wakeups.open_receiver(self.id)
        except (StoreError, OSError) as error:
            log.warning("genba hears no wake-ups here, and looks once a second: %s", error)
            self._bell = None

    def _run(self) -> None:
        assert self._wake is not None
        idle_since: float | None = None
        beat = time.monotonic()
        while True:
            with self._cond:
                if self._users:
                    idle_since = None
                elif idle_since is None:
                    idle_since = time.monotonic()
                if self._closing or (
                    idle_since is not None and time.monotonic() - idle_since >= LINGER
                ):
                    self._end()
                    return
            self._listen()
            if self._session is not None and time.monotonic() >= beat:
                beat = time.monotonic() + self._sessions.beat / 1_000_000
                self._renew(self._session)
                self._catch_up()

    def _listen(self) -> None:
        assert self._wake is not None
        within = min(MEND, self._sessions.beat / 1_000_000)
        bell = self._bell.fileno() if self._bell else -1
        ready, _, _ = select.select([fd for fd in (bell, self._wake[0]) if fd >= 0], [], [], within)
        if self._bell is None:
            with contextlib.suppress(StoreError, OSError):  # said before
                self._bell = self._wakeups.open_receiver(self.id)
        elif bell in ready or bell < 0:
            with contextlib.suppress(StoreError):  # until it is mended, who waits looks by itself
                self._bell.clear()
        if bell in ready:
            self._tell()
        if self._wake[0] in ready:
            os.read(self._wake[0], 4096)

    def _tell(self) -> None:
        with self._cond:
            self._heard += 1
            self._cond.notify_all()
        for loop, rung in list(self._awaiting):
            with contextlib.suppress(RuntimeError):  # its loop is closed
                loop.call_soon_threadsafe(rung.set)

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
                self._tell_soon()

    def _catch_up(self) -> None:
        with contextlib.suppress(StoreError):
            while self._deeds:
                self._deeds[0]()
                self._deeds.pop(0)

    def _tell_soon(self) -> None:
        self._heard += 1
        self._cond.notify_all()

    def _end(self) -> None:
        """With the condition held: whoever comes next starts anew."""
        session, self._session, self._thread = self._session, None, None
        bell, self._bell = self._bell, None
        assert self._wake is not None
        for fd in self._wake:
            os.close(fd)
        self._wake = None
        self.id = secrets.randbits(62) + 1
        self._cond.notify_all()
        with contextlib.suppress(StoreError):  # others find out
            if session is not None:
                self._sessions.close(session)
        if bell is not None:
            bell.close()

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
