"""The connection of a client: settings, the store that opens on first use, clock, threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

from genba.client.current_job import find_job
from genba.client.settings import Settings
from genba.client.waiting import WaitThread
from genba.domain.clock import Clock, SystemClock
from genba.domain.duration import Micros, duration, moment
from genba.domain.untrusted_json import DECODE_ERRORS, UNREADABLE
from genba.enqueue.arguments import POSITIONAL_KEY, Arguments, arguments_by_name
from genba.enqueue.call import JobHandle
from genba.errors import BadOption
from genba.storage.events import current_operator
from genba.storage.store import Store, open_store

T = TypeVar("T")

_THREADS = 8  # for async methods


class RunningTest(Protocol):
    """The `app.testing()` block that is open: it runs the jobs itself."""

    @property
    def task_names(self) -> Collection[str]: ...

    def wait(self, jobs: Iterable[JobHandle], until: str) -> None: ...


class ClientConnection:
    """What a client and all its handles share.

    `arguments_of` returns the arguments of a task whose code is here.
    """

    def __init__(self, settings: Settings, arguments_of: Callable[[str], Arguments | None]) -> None:
        self.settings = settings
        self.arguments_of = arguments_of
        self.test: RunningTest | None = None
        self.wait_thread = WaitThread(lambda: self.store)
        self._stores: dict[str, Store] = {}  # one, or none; see `_open_store`
        self._clock: Clock = SystemClock()
        self._threads: tuple[int, ThreadPoolExecutor] | None = None  # with the process they are of

    # the store

    @property
    def store(self) -> Store:
        return self._stores.get("store") or self._open_store()

    def _open_store(self) -> Store:
        """Make the store; it opens nothing before its first call.

        Two threads may come here at once.  `setdefault` is one step, so both use the same store; a
        lock could be left locked in the child of a fork.
        """
        settings = self.settings
        store = open_store(
            settings.url,
            namespace=settings.namespace,
            lease=settings.lease,
            age_step=settings.age_step,
        )
        store.changed_by = _current_actor
        if os.environ.get("GENBA_WORKER") and os.environ.get("GENBA_INCARNATION"):
            # In a worker: what our jobs do counts as done by our node.
            store.events.node = int(os.environ["GENBA_INCARNATION"])
        return self._stores.setdefault("store", store)

    @property
    def is_open(self) -> bool:
        return bool(self._stores)

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        with self.wait_thread.paused():
            store = self._stores.pop("store", None)
            if store is not None:
                store.close()
            if self._threads is not None and self._threads[0] == os.getpid():
                self._threads[1].shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def wake(self) -> None:
        """Wake idle nodes, so that they look for jobs."""
        self.store.node_wakeups.wake_nodes(self.settings.namespace, None)

    # for tests

    def another_store(self, url: str, clock: Clock) -> Store:
        """Open another store with the same namespace."""
        settings = self.settings
        store = open_store(
            url, namespace=settings.namespace, clock=clock, age_step=settings.age_step
        )
        store.changed_by = _current_actor
        return store

    def swap(
        self, store: Store | None, clock: Clock, test: RunningTest | None
    ) -> tuple[Store | None, Clock]:
        """Use another store and another clock; gives the ones before."""
        before = self._stores.pop("store", None), self._clock
        if store is not None:
            self._stores["store"] = store
        self._clock, self.test = clock, test
        return before

    # time

    def now(self) -> Micros:
        """The time by this machine's clock."""
        return self._clock.now()

    def moment(self, value: Any) -> Micros:
        """Read a moment; what is relative counts from this machine's clock."""
        return moment(value, self._clock.now(), self.settings.zone)

    def moment_or_delay(self, value: Any) -> Micros:
        """Read a moment, or a duration from now; what is relative counts from the store's clock."""
        try:
            return self.store.now() + duration(value)
        except BadOption:
            return moment(value, self.store.now(), self.settings.zone)

    # arguments

    def by_name(self, task: str, payload: bytes) -> dict[str, Any]:
        """Decode stored arguments by name, with the code or the definition of the task."""
        try:
            return self._by_name(task, payload)
        except (*DECODE_ERRORS, LookupError):  # the row or the definition was written by hand
            return {UNREADABLE: None}

    def _by_name(self, task: str, payload: bytes) -> dict[str, Any]:
        arguments = self.arguments_of(task)
        if arguments is not None:
            return arguments.by_name(payload)
        plain = arguments_by_name(payload, ())
        definitions = self.store.operators.definitions([task]) if POSITIONAL_KEY in plain else {}
        parameters = definitions[task].get("parameters", ()) if task in definitions else ()
        if not parameters:
            return plain
        return arguments_by_name(payload, ((one["name"], one["kind"]) for one in parameters))

    # threads

    async def threads(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run a blocking call in one of a few threads of our own."""
        if self._threads is None or self._threads[0] != os.getpid():
            self._threads = (os.getpid(), ThreadPoolExecutor(_THREADS, thread_name_prefix="genba"))
        return await asyncio.get_running_loop().run_in_executor(
            self._threads[1], partial(call, *args, **kwargs)
        )


def _current_actor() -> str:
    """For the history: the job that runs here, else the account."""
    job = find_job()
    return current_operator() if job is None else f"job {job.id}"
