"""Opened: the settings of an app, the store that opens on first use, and the threads of the a-twins."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import ParamSpec

from genba.client.current_job import find_job
from genba.client.settings import Settings
from genba.domain.clock import Clock, SystemClock
from genba.domain.duration import duration, moment
from genba.domain.url import mask_password
from genba.errors import (
    BadOption,
)
from genba.storage.engines.postgres.create import create_database
from genba.storage.engines.postgres.roles import grant
from genba.storage.events import current_operator
from genba.storage.store import Store, open_store
from genba.storage.verify import VerifyReport

if TYPE_CHECKING:
    from genba.testing import Testing

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class ClientConnection:
    """What all that an app does stands on."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._store: Store | None = None
        self._clock: Clock = SystemClock()
        self._threads: tuple[int, ThreadPoolExecutor] | None = None
        self._test: Testing | None = None

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def namespace(self) -> str:
        return self.settings.namespace

    @property
    def store(self) -> Store:
        if self._store is None:
            settings = self.settings
            self._store = open_store(
                settings.url,
                namespace=settings.namespace,
                lease=settings.lease,
                age_step=settings.age_step,
            )
            self._store.by = _who
            if os.environ.get("GENBA_WORKER") and os.environ.get("GENBA_INCARNATION"):
                self._store.events.node = int(
                    os.environ["GENBA_INCARNATION"]
                )  # what our jobs do, our node does
        return self._store

    @property
    def is_open(self) -> bool:
        """Whether a call since the last `close` has opened the store."""
        return self._store is not None

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._threads is not None and self._threads[0] == os.getpid():
            self._threads[1].shutdown(wait=False, cancel_futures=True)
        self._threads = None

    # the database

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return mask_password(self.url)

    def install(
        self, create: bool = False, tell: Callable[[int, int], None] = lambda done, of: None
    ) -> list[str]:
        """Make the schema current, with `create` the database itself too; gives the names of what was applied.

        `tell` hears before each step how many are done, and of how many.
        """
        if create:
            create_database(self.url)
        return self.store.upgrade(tell)

    def installed(self) -> list[str]:
        """Our tables and sequences in the database: what `uninstall` removes."""
        return self.store.objects()

    def grant(self, role: str, kind: str) -> None:
        """On PostgreSQL: make `role` a producer, worker, reader or admin of our tables, and nothing more."""
        grant(self.url, role, kind)

    def verify(self) -> VerifyReport:
        """Replay the history: is no job lost or finished twice, no limit exceeded, no move illegal?  What is wrong."""
        return self.store.verify()

    def uninstall(self) -> list[str]:
        """Remove our objects, with all jobs, and nothing else; gives their names."""
        removed = self.store.uninstall()
        self.close()
        return removed

    def moment(self, value: Any) -> int:
        """A moment by this machine's clock, in micros."""
        return moment(value, self._clock.now(), self.settings.zone)

    def later(self, value: Any) -> int:
        """A moment, or the time from now until then, by the store's clock."""
        try:
            return self.store.now() + duration(value)
        except BadOption:
            return moment(value, self.store.now(), self.settings.zone)

    def another_store(self, url: str, clock: Clock) -> Store:
        """For a test: of the same namespace."""
        settings = self.settings
        store = open_store(
            url, namespace=settings.namespace, clock=clock, age_step=settings.age_step
        )
        store.by = _who
        return store

    def swap(
        self, store: Store | None, clock: Clock, test: Testing | None
    ) -> tuple[Store | None, Clock]:
        """For a test: another store and another clock; gives those that were here."""
        before = self._store, self._clock
        self._store, self._clock, self._test = store, clock, test
        return before

    async def threads(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The a-twins: the call, in one of a few threads of our own."""
        if self._threads is None or self._threads[0] != os.getpid():
            self._threads = (os.getpid(), ThreadPoolExecutor(8, thread_name_prefix="genba"))
        return await asyncio.get_running_loop().run_in_executor(
            self._threads[1], partial(call, *args, **kwargs)
        )


def _who() -> str:
    """For the history: the job that runs here, or whoever this is."""
    job = find_job()
    return current_operator() if job is None else f"job {job.id}"
