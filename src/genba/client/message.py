"""Messages, as user code sees them: the inbox of a running job, and subscriptions to topics."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from genba.domain.duration import Duration, duration
from genba.domain.untrusted_json import read_json
from genba.enqueue.arguments import encode_plain
from genba.errors import GenbaError, StoreError
from genba.storage.clients.messages import TopicSubscription

if TYPE_CHECKING:
    from genba.client.client import Client
    from genba.client.current_job import RunningJob
    from genba.storage.store import Store

POLL_SECONDS = 1.0  # seconds between two looks that nobody has rung for
STOP_CHECK_SECONDS = 0.2  # between two looks whether the job should stop


def encode(message: Any) -> bytes:
    """Plain JSON values, 1 MiB at most."""
    return encode_plain((), {"message": message})


def decode(data: bytes) -> Any:
    return msgspec.json.decode(data)["message"]


def _is_whole(data: bytes) -> bool:
    """What somebody has written by hand, and is no message, is as if it had not been sent."""
    return "message" in read_json(data, dict[str, Any], {})


class MessageWait:
    """One who waits for a message: `step` until it is decided.  Its steps may run in different threads."""

    def __init__(
        self,
        app: Client,
        box: JobInbox | Subscription,
        timeout: Duration | None,
        given_up: Callable[[], bool],
    ) -> None:
        self._app = app
        self._box = box
        self._deadline = (
            None if timeout is None else time.monotonic() + duration(timeout) / 1_000_000
        )
        self._given_up = given_up
        self._looked = -POLL_SECONDS
        self._mark = -1
        self._over = False
        self.found: list[bytes] = []

    def step(self) -> float | None:
        """Look once; how many seconds to wait for the bell, or None: it is decided."""
        with self._box.turn:
            if self._over:
                return None
            ear, now = self._app.store.listener, time.monotonic()
            if not self._box.buffer and (
                self._mark != ear.mark() or now - self._looked >= POLL_SECONDS
            ):
                self._mark, self._looked = ear.mark(), now
                self._box.fill()
            while self._box.buffer and not self.found:
                one = self._box.buffer.popleft()
                if _is_whole(one):
                    self.found.append(one)
            if self.found or self._given_up():
                return None
            left = POLL_SECONDS if self._deadline is None else self._deadline - time.monotonic()
            return None if left <= 0 else min(STOP_CHECK_SECONDS, left)

    def abandon(self) -> None:
        """Nobody takes it any more: it stays for the next one."""
        with self._box.turn:
            self._over = True
            self._box.buffer.extendleft(self.found)

    def run(self) -> Any:
        try:
            while (pause := self.step()) is not None:
                self._app.store.listener.wait(self._mark, pause)
        except BaseException:  # also Ctrl-C and a stop must leave the line; raised again
            self.abandon()
            raise
        return decode(self.found[0]) if self.found else None

    async def arun(self) -> Any:
        try:
            while (pause := await self._app.threads(self.step)) is not None:
                await self._app.store.listener.await_(self._mark, pause)
        except BaseException:  # also Ctrl-C and a stop must leave the line; raised again
            await asyncio.shield(self._app.threads(self.abandon))
            raise
        return decode(self.found[0]) if self.found else None


class JobInbox:
    """The messages to a running job."""

    def __init__(self, app: Client, job: RunningJob) -> None:
        self._app = app
        self._job = job
        self._listener: int | None = None
        self.turn = threading.Lock()
        self.buffer: deque[bytes] = deque()

    def get(self, timeout: Duration | None) -> Any:
        return self._reading(timeout).run()

    async def aget(self, timeout: Duration | None) -> Any:
        return await self._reading(timeout).arun()

    def _reading(self, timeout: Duration | None) -> MessageWait:
        if self._job.in_transaction:
            timeout = 0  # everybody else waits for this transaction
        return MessageWait(self._app, self, timeout, lambda: self._job.should_stop)

    def fill(self) -> None:
        """One message, if there is one; who finds none hears of the next."""
        if not self._take() and self._listener is None and not self._job.in_transaction:
            store = self._app.store
            store.listener.enter()
            self._listener = store.messages.await_mail(self._job.id, store.listener.id)
            self._take()

    def _take(self) -> bool:
        data = self._app.store.messages.receive(self._job.fence, self._job.own_transaction)
        if data is not None:
            self.buffer.append(data)
        return data is not None

    def close(self) -> None:
        """The job is over."""
        if self._listener is not None:
            store = self._app.store
            with suppress(StoreError):  # it is forgotten with the job
                store.messages.stop(self._listener)
            store.listener.leave()


class Subscription:
    """What is published to a topic from now on: `for message in …`, `async for`, or `get(timeout)`.

    It ends with its `with` block, with `close()`, or with its process.
    """

    def __init__(self, app: Client, topic: str) -> None:
        self._app = app
        self.topic = topic
        self.turn = threading.Lock()
        self.buffer: deque[bytes] = deque()
        self._pid = os.getpid()
        self._listening: TopicSubscription | None = None
        store = app.store
        store.install()
        store.listener.enter()
        try:
            self._listening = self._subscribe(store)
        finally:
            if self._listening is None:
                store.listener.leave()

    def __repr__(self) -> str:
        return f"<Subscription to {self.topic!r}{'' if self._listening else ', closed'}>"

    def _subscribe(self, store: Store) -> TopicSubscription:
        return store.messages.subscribe(self.topic, store.listener.session(), store.listener.id)

    def get(self, timeout: Duration | None = None) -> Any:
        """The next message; None when the time is over."""
        return self._reading(timeout).run()

    async def aget(self, timeout: Duration | None = None) -> Any:
        return await self._reading(timeout).arun()

    def _reading(self, timeout: Duration | None) -> MessageWait:
        return MessageWait(self._app, self, timeout, lambda: self._listening is None)

    def fill(self) -> None:
        if self._listening is None:
            return
        if self._pid != os.getpid():
            raise GenbaError(
                f"the subscription to {self.topic!r} was made before the fork, and stays with the parent"
            )
        self._listening, new = self._app.store.messages.hear(self._listening)
        self.buffer.extend(new)

    def close(self) -> None:
        with self.turn:
            listening, self._listening = self._listening, None
        if listening is not None and self._pid == os.getpid():
            store = self._app.store
            try:
                store.messages.unsubscribe(listening)
            finally:
                store.listener.leave()

    async def aclose(self) -> None:
        await self._app.threads(self.close)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Subscription:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.shield(self.aclose())

    def __iter__(self) -> Subscription:
        return self

    def __next__(self) -> Any:
        reading = self._reading(None)
        found = reading.run()
        if not reading.found:
            raise StopIteration
        return found

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Any:
        reading = self._reading(None)
        found = await reading.arun()
        if not reading.found:
            raise StopAsyncIteration
        return found
