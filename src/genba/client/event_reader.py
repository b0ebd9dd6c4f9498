"""Read events in order: once, for ever, or for handlers in a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from genba.client.connection import ClientConnection
from genba.client.event import Event
from genba.client.job import Job
from genba.domain.events import JobEvent, kinds_of, unfold
from genba.errors import BadOption, CursorExpired, GenbaError
from genba.options.parse import parse_job_id
from genba.storage.events import EventPosition, EventRow

log = logging.getLogger("genba.events")

EventNames = str | Iterable[str] | None
Callback = Callable[[Event], Any]
EventHandler = tuple[frozenset[str] | None, Callback]  # for these kinds; None: for all

_PAUSES_SECONDS = (0.005, 0.2)  # between two looks: the first, the longest
_RETRY_SECONDS = 1.0  # after an error of the database
_MOST_KNOWN = 100_000  # jobs whose task is remembered


class EventReader:
    """Reads each event once, from a position on."""

    def __init__(
        self,
        connection: ClientConnection,
        position: EventPosition,
        kinds: EventNames = None,
        job: Any = None,
        task: EventNames = None,
        node: int | None = None,
    ) -> None:
        self._connection = connection
        self._position = position
        self._kinds = kinds_of(kinds)
        self._job = None if job is None else parse_job_id("job", job)
        self._tasks = None if task is None else {_task_name(one) for one in _as_list(task)}
        self._node = node
        self._task_of: dict[int, str] = {}
        self._marker: object = None
        self.caught_up = False

    def skip(self) -> None:
        """Go on from now, and leave out what is between."""
        self._position, self.caught_up = self._connection.store.events.end(), False

    def read(self) -> list[Event]:
        """Return new events, not always all of them: `caught_up` says whether there are more."""
        store = self._connection.store
        marker = store.write_marker()
        if self.caught_up and marker == self._marker:
            return []
        page = store.events.page(self._position, self._job)
        events: list[Event] = []
        for row in page.rows:
            if self._node is not None and row.node != self._node:
                continue
            for index, event in enumerate(unfold(row.kind, row.at, row.job_id, row.data)):
                if row.seq == self._position.seq and index <= self._position.index:
                    continue  # given before
                if self._fits(event):
                    place = page.during.after_row(row.seq, index)
                    events.append(self._event(event, row, place))
        self._position, self._marker, self.caught_up = page.after, marker, not page.more
        return events if self._tasks is None else self._of_tasks(events, self._tasks)

    def _fits(self, event: JobEvent) -> bool:
        of_kind = self._kinds is None or event.kind in self._kinds
        return of_kind and (self._job is None or event.job_id == self._job)

    def _event(self, event: JobEvent, row: EventRow, place: EventPosition) -> Event:
        return Event(
            event.kind, event.job_id, event.moment, event.data, row.node, place, self._handle
        )

    def _of_tasks(self, events: list[Event], tasks: set[str]) -> list[Event]:
        ids = {event.job_id for event in events if event.job_id is not None}
        unknown = ids - self._task_of.keys()
        if unknown:
            if len(self._task_of) > _MOST_KNOWN:
                self._task_of.clear()
            self._task_of.update(self._connection.store.events.tasks_of(sorted(unknown)))
        return [
            event
            for event in events
            if event.job_id is not None and self._task_of.get(event.job_id) in tasks
        ]

    def _handle(self, id: int) -> Job[Any]:
        return Job(self._connection, id)

    def follow(self, block: bool, over: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Yield event by event; with `block` for ever, or until `over` returns true."""
        pause, longest = _PAUSES_SECONDS
        sleeper = threading.Event()
        while not over():
            events = self.read()
            yield from events
            if events or not self.caught_up:
                pause = _PAUSES_SECONDS[0]
            elif block:
                sleeper.wait(pause)
                pause = min(longest, pause * 1.5)
            else:
                return

    async def afollow(self, block: bool) -> AsyncIterator[Event]:
        pause, longest = _PAUSES_SECONDS
        while True:
            events = await self._connection.threads(self.read)
            for event in events:
                yield event
            if events or not self.caught_up:
                pause = _PAUSES_SECONDS[0]
            elif block:
                await asyncio.sleep(pause)
                pause = min(longest, pause * 1.5)
            else:
                return


class EventHandlers:
    """The callbacks of `app.on`: one thread for all of them, in the process that registered them.

    Callbacks that the app's module registers run in the listeners of the nodes instead; it is true
    if there are such.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._of_process: list[EventHandler] = []
        self._of_nodes: list[EventHandler] = []
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._over = threading.Event()

    def __bool__(self) -> bool:
        return bool(self._of_nodes)

    def add(self, name: EventNames, callback: Callback, *, importing: bool) -> None:
        """Register a callback: for the nodes while the app is imported, else for this process."""
        if not callable(callback):
            raise BadOption(f"a handler of events is a function, not {callback!r}")
        (self._of_nodes if importing else self._of_process).append((kinds_of(name), callback))
        if not importing:
            self.listen()

    @property
    def listening(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._pid == os.getpid()

    def listen(self) -> None:
        """Start the thread, for events from now on."""
        if self.listening:
            return
        reader = self._reader_from_now()
        self._over, self._pid = threading.Event(), os.getpid()
        self._thread = threading.Thread(
            target=_serve,
            args=(reader, self._of_process, self._over),
            name="genba-events",
            daemon=True,
        )
        self._thread.start()

    def serve(self, node: int, ready: Callable[[], None]) -> None:
        """Call back for ever, in this thread, for events of this node; call `ready` first."""
        reader = self._reader_from_now(node)
        ready()
        _serve(reader, self._of_nodes, threading.Event())

    def _reader_from_now(self, node: int | None = None) -> EventReader:
        store = self._connection.store
        store.install()
        return EventReader(self._connection, store.events.end(), node=node)

    def close(self) -> None:
        self._over.set()
        self._thread = None


def _serve(reader: EventReader, handlers: list[EventHandler], over: threading.Event) -> None:
    while not over.is_set():
        try:
            for event in reader.follow(True, over.is_set):
                _call_handlers(event, handlers)
        except CursorExpired as error:
            log.warning("handlers were too slow: %s", error)
            reader.skip()
        except GenbaError as error:
            log.warning("cannot read events: %s; trying again", error)
            over.wait(_RETRY_SECONDS)


def _call_handlers(event: Event, handlers: list[EventHandler]) -> None:
    for kinds, callback in list(handlers):
        if kinds is None or event.kind in kinds:
            try:
                callback(event)
            except Exception:  # the other handlers, and later events, must still be served
                log.exception("a handler of %r raised", event.kind)


def importing(depth: int = 2) -> bool:
    """Whether the caller's caller is a module that is being imported; a script does not count."""
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


def _as_list(task: Any) -> Iterable[Any]:
    return [task] if isinstance(task, str) or hasattr(task, "enqueue") else task


def _task_name(task: Any) -> str:
    return str(getattr(task, "name", task))
