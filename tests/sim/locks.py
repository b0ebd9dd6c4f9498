"""Holders of locks in a simulated world: a job in its worker, or a process outside of jobs.

What asks and gives back is the real code of `genba.locks`; played are the listener and the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from genba.client import lock
from genba.client.lock import Grant, HeldLocks, Lock, LockRequest
from genba.errors import LeaseLost, LockLost, StoreError
from genba.storage.store import Store
from tests.sim.world import BOOT, MS, SECOND, Gone, Process, World, a_store

NAME = "sim.mutex"


@dataclass
class Hold:
    """A holder believed to have the lock, from `began` on; for a session only up to `good_until`."""

    token: int
    began: int
    ended: int | None = None
    good_until: int | None = None

    def over(self, now: int) -> int:
        ended = now if self.ended is None else self.ended
        return ended if self.good_until is None else min(ended, self.good_until)


class Monotonic:
    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now / SECOND


@contextmanager
def played(world: World) -> Iterator[None]:
    """In here `genba.locks` lives in that world."""
    names = vars(lock)
    before = {name: names[name] for name in ("time", "boot_id")}
    names.update(time=Monotonic(world), boot_id=lambda: BOOT)
    try:
        yield
    finally:
        names.update(before)


class SimEar:
    """The event listener of a process without its thread: there are no wake-ups, so all poll."""

    def __init__(self, world: World, store: Store) -> None:
        self._world, self._sessions = world, store.sessions
        self._session: int | None = None
        self.id = world.rng.getrandbits(62) + 1
        self.opened = 0  # so many sessions, one after the other
        self.good_until = 0
        self.deeds: list[Callable[[], object]] = []

    def enter(self) -> None:
        pass

    leave = enter

    def mark(self) -> int:
        return 0

    def later(self, deed: Callable[[], object]) -> None:
        self.deeds.append(deed)

    def session(self) -> int:
        if self._session is None or self._world.now >= self.good_until:
            sent = self._world.now
            if self._session is None or not self._sessions.renew(self._session):
                self._sessions.open(self.id)
                self._session = self.id
                self.opened += 1
            self.good_until = sent + self._sessions.lease
        return self._session

    def forget(self, session: int) -> None:
        if self._session == session:
            self._session = None

    def beat(self) -> None:
        """As its thread does, every fifteenth of the lease."""
        if self._session is None:
            return
        sent = self._world.now
        with suppress(StoreError):
            if self._sessions.renew(self._session):
                self.good_until = sent + self._sessions.lease
            else:
                self._session = None
            while self.deeds:
                self.deeds[0]()
                self.deeds.pop(0)

    def close(self) -> bool:
        """Close it; False if the database did not get the call."""
        with suppress(StoreError):
            if self._session is not None and not self.deeds:
                self._sessions.close(self._session)
                self._session = None
        return self._session is None and not self.deeds


class App:
    """What locks need of an app."""

    def __init__(self, world: World, process: Any) -> None:
        store: Any = a_store(world, process)
        self.store = store
        self.held_locks = HeldLocks()
        self.listener = store.listener = SimEar(world, store)


class Wish:
    """One process wants the lock, until it has it, or must not have it any more."""

    def __init__(
        self,
        world: World,
        process: Process,
        job: Any,
        got: Callable[[Hold], None],
        over: Callable[[], None],
    ) -> None:
        self._world, self._process, self._job = world, process, job
        self._got, self._over = got, over
        self.app = App(world, process)
        self._lock = Lock(self.app, self.app.held_locks, NAME, 1, None)  # type: ignore[arg-type]
        self._asking = LockRequest(self._lock, job)
        self.grant: Grant | None = None
        self.hold: Hold | None = None
        self._dropped = False

    def drop(self) -> None:
        """Its job was stopped while it waited."""
        if self.hold is None:
            self._dropped = True
            with suppress(Gone):
                self._asking.abandon()

    def step(self) -> None:
        world = self._world
        if self._dropped:
            return
        try:
            with played(world):
                pause = self._asking.step()
        except LeaseLost:
            self._over()
            return
        except StoreError:  # as a user's code would that tries again
            with suppress(Gone):
                self._asking.abandon()
                self._asking = LockRequest(self._lock, self._job)
            world.at(world.rng.uniform(0.1, 1) * SECOND, self.step, self._process)
            return
        except Gone:
            return
        if pause is not None:
            world.hits.add("waits for a lock")
            world.at(max(MS, pause * SECOND), self.step, self._process)
            return
        self.grant = self._asking.end()
        assert self.grant is not None
        session = self._job is None
        self.hold = Hold(
            self.grant.token, world.now, None, self.app.listener.good_until if session else None
        )
        world.holds.append(self.hold)
        self._got(self.hold)

    def give_back(self) -> None:
        """Its belief ends with the call; that the lock was not there any more is harm, if it ought to have been."""
        assert self.grant is not None
        assert self.hold is not None
        self.hold.ended = self._world.now
        with suppress(StoreError, Gone):  # then it goes with its owner
            try:
                lock._release(self.app, self.app.held_locks, NAME, self.grant)  # type: ignore[arg-type]
                self._world.hits.add("gave a lock back")
            except LockLost:
                good = self.hold.good_until
                if good is None or self._world.now < good:
                    self._world.harm.append(
                        f"token {self.hold.token} was worth nothing, and its owner lived"
                    )


class Visitor(Process):
    """A process outside of jobs that takes the lock for a while, and may be paused or killed with it."""

    def __init__(self, world: World, span: int) -> None:
        super().__init__(world)
        self._span = span
        self._wish = Wish(world, self, None, self._got, lambda: None)
        self._opened = 0

    def start(self) -> None:
        self._world.visitors.append(self)
        self._wish.step()
        self._beat()

    def _beat(self) -> None:
        listener, hold = self._wish.app.listener, self._wish.hold
        with suppress(Gone):
            listener.beat()
            if hold is not None and hold.ended is not None and listener.close():
                return
        if hold is not None and hold.good_until is not None and listener.opened == self._opened:
            hold.good_until = listener.good_until
        self._world.at(self._wish.app.store.sessions.renewal_interval, self._beat, self)

    def _got(self, hold: Hold) -> None:
        self._world.hits.add("a session has a lock")
        self._opened = self._wish.app.listener.opened
        self._world.at(self._span, self._wish.give_back, self)

    def die(self) -> None:
        self.alive = False
        if (hold := self._wish.hold) is not None and hold.ended is None:
            self._world.hits.add("died with a lock")
            hold.ended = self._world.now


class SimJob:
    """What `find_job()` gives in a worker, as far as locks need it."""

    in_transaction = applied = False

    def __init__(self, worker: Any, fence: tuple[int, int, int]) -> None:
        self.id, self.fence, self._worker = fence[0], fence, worker

    def lock(self) -> None:
        self._worker.locked = True
