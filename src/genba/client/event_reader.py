"""Reading what happens: once, for ever, or by handlers in a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from genba.client.event import Event, kinds_of, unfold
from genba.client.job import Job
from genba.errors import BadOption, CursorExpired, GenbaError
from genba.options.parse import parse_job_id

if TYPE_CHECKING:
    from genba.client.client import Client
    from genba.storage.events import EventPosition

log = logging.getLogger("genba.events")

EventNames = str | Iterable[str] | None
Callback = Callable[[Event], Any]
EventHandler = tuple[frozenset[str] | None, Callback]  # of these kinds; None: of all

_PAUSES = (0.005, 0.2)  # seconds between two looks: from, to


class EventReader:
    """One reader of the stream: what it has given, it does not give again."""

    def __init__(
        self,
        app: Client,
        at: EventPosition,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
        node: int | None = None,
    ) -> None:
        self._app = app
        self._at = at
        self._kinds = kinds_of(kinds)
        self._job = _job_id(job)
        self._tasks = None if task is None else {_task_name(one) for one in _several(task)}
        self._node = node
        self._known: dict[int, str] = {}
        self._mark: object = None
        self.caught_up = False

    def skip(self) -> None:
        """Go on from now, and miss what is between."""
        self._at, self.caught_up = self._app.store.events.end(), False

    def read(self) -> list[Event]:
        """What has come since the last call, or some of it; `caught_up` tells whether there is more."""
        store = self._app.store
        mark = store.write_marker()
        if self.caught_up and mark == self._mark:
            return []
        page = store.events.page(self._at, self._job)
        found: list[Event] = []
        for row in page.rows:
            if self._node is not None and row.node != self._node:
                continue
            for index, told in enumerate(unfold(row.kind, row.at, row.job_id, row.data)):
                if row.seq == self._at.seq and index <= self._at.index:
                    continue  # given before
                wanted = self._kinds is None or told.kind in self._kinds
                if wanted and (self._job is None or told.job_id == self._job):
                    place = page.during.behind(row.seq, index)
                    found.append(
                        Event(
                            told.kind,
                            told.job_id,
                            told.moment,
                            told.data,
                            row.node,
                            place,
                            self._handle,
                        )
                    )
        self._at, self._mark, self.caught_up = page.after, mark, not page.more
        return found if self._tasks is None else self._of_tasks(found, self._tasks)

    def _of_tasks(self, found: list[Event], wanted: set[str]) -> list[Event]:
        unknown = {event.job_id for event in found if event.job_id is not None} - self._known.keys()
        if unknown:
            if len(self._known) > 100_000:
                self._known.clear()
            self._known.update(self._app.store.events.tasks_of(sorted(unknown)))
        return [
            event
            for event in found
            if event.job_id is not None and self._known.get(event.job_id) in wanted
        ]

    def _handle(self, id: int) -> Job[Any]:
        return Job(self._app, id)

    def follow(self, block: bool, over: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Event by event; with `block` for ever, or until `over` says so."""
        pause, longest = _PAUSES
        rest = threading.Event()
        while not over():
            found = self.read()
            yield from found
            if found or not self.caught_up:
                pause = _PAUSES[0]
            elif block:
                rest.wait(pause)
                pause = min(longest, pause * 1.5)
            else:
                return

    async def afollow(self, block: bool) -> AsyncIterator[Event]:
        pause, longest = _PAUSES
        while True:
            found = await self._app.threads(self.read)
            for event in found:
                yield event
            if found or not self.caught_up:
                pause = _PAUSES[0]
            elif block:
                await asyncio.sleep(pause)
                pause = min(longest, pause * 1.5)
            else:
                return


class EventHandlers:
    """The callbacks of `app.on`: one thread for all of them, in the process that has called it.

    Those of the app's module are for the listeners of the nodes, and true says that there are such.
    """

    def __init__(self, app: Client) -> None:
        self._app = app
        self._ours: list[EventHandler] = []
        self._of_nodes: list[EventHandler] = []
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._over = threading.Event()

    def __bool__(self) -> bool:
        return bool(self._of_nodes)

    def add(self, name: EventNames, callback: Callback, *, importing: bool) -> None:
        """What a module of the app registers while it is imported is for the nodes, not for who imports it."""
        if not callable(callback):
            raise BadOption(f"a handler of events is a function, not {callback!r}")
        (self._of_nodes if importing else self._ours).append((kinds_of(name), callback))
        if not importing:
            self.listen()

    @property
    def listening(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._pid == os.getpid()

    def listen(self) -> None:
        """From now on, in a thread."""
        if self.listening:
            return
        self._app.store.install()
        reader = EventReader(self._app, self._app.store.events.end())
        self._over, self._pid = threading.Event(), os.getpid()
        self._thread = threading.Thread(
            target=_serve, args=(reader, self._ours, self._over), name="genba-events", daemon=True
        )
        self._thread.start()

    def serve(self, node: int, ready: Callable[[], None]) -> None:
        """For ever, in this thread: what this node does after `ready` was called."""
        self._app.store.install()
        reader = EventReader(self._app, self._app.store.events.end(), node=node)
        ready()
        _serve(reader, self._of_nodes, threading.Event())

    def close(self) -> None:
        self._over.set()
        self._thread = None


def _serve(reader: EventReader, handlers: list[EventHandler], over: threading.Event) -> None:
    while not over.is_set():
        try:
            for event in reader.follow(True, over.is_set):
                _give(event, handlers)
        except CursorExpired as error:
            log.warning("handlers were too slow: %s", error)
            reader.skip()
        except GenbaError as error:
            log.warning("cannot read events: %s; trying again", error)
            over.wait(1.0)


def _give(event: Event, handlers: list[EventHandler]) -> None:
    for kinds, callback in list(handlers):
        if kinds is None or event.kind in kinds:
            try:
                callback(event)
            except Exception:  # a handler that raises harms nobody
                log.exception("a handler of %r raised", event.kind)


def importing(depth: int = 2) -> bool:
    """Whether the caller's caller is a module that is just being imported; a script is none."""
    frame = sys._getframe(depth)
    if frame.f_globals.get("__name__") == "__main__":
        return False
    spec = frame.f_globals.get("__spec__")
    return frame.f_code.co_name == "<module>" or bool(getattr(spec, "_initializing", False))


def call_until_true(events: Iterator[Event], callback: Callback) -> None:
    for event in events:
        if callback(event):
            return


async def acall_until_true(events: AsyncIterator[Event], callback: Callback) -> None:
    async for event in events:
        answer = callback(event)
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return


def _several(value: Any) -> Iterable[Any]:
    return [value] if isinstance(value, str) or hasattr(value, "enqueue") else value


def _task_name(value: Any) -> str:
    return str(getattr(value, "name", value))


def _job_id(job: Any) -> int | None:
    return None if job is None else parse_job_id("job", job)
