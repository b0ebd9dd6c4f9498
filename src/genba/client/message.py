"""Messages for user code: the inbox of a running job, and subscriptions to topics."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec

from genba.client.connection import ClientConnection
from genba.client.current_job import RunningJob
from genba.domain.duration import Duration, duration
from genba.domain.untrusted_json import read_json
from genba.enqueue.arguments import encode_plain
from genba.errors import GenbaError, StoreError
from genba.storage.clients.messages import TopicSubscription
from genba.storage.store import Store

POLL_SECONDS = 1.0  # between two looks at the database without a wake-up
STOP_CHECK_SECONDS = 0.2  # between two checks whether the wait should end


def encode(message: Any) -> bytes:
    """Encode plain JSON values, 1 MiB at most."""
    return encode_plain((), {"message": message})


def decode(data: bytes) -> Any:
    return msgspec.json.decode(data)["message"]


def _is_message(data: bytes) -> bool:
    """Whether the row has a message; one that was written by hand may not, and is skipped."""
    return "message" in read_json(data, dict[str, Any], {})


class MessageWait:
    """One wait for a message: call `step` until it returns None.

    Its steps may run in different threads.
    """

    def __init__(
        self,
        connection: ClientConnection,
        box: JobInbox | Subscription,
        timeout: Duration | None,
        given_up: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._box = box
        self._deadline = (
            None if timeout is None else time.monotonic() + duration(timeout) / 1_000_000
        )
        self._given_up = given_up
        self._last_look = -POLL_SECONDS
        self._mark = -1  # of the listener, at the last look
        self._over = False
        self.taken: list[bytes] = []

    def step(self) -> float | None:
        """Look once; return the seconds to wait for a wake-up, or None when the wait is over."""
        with self._box.lock:
            if self._over:
                return None
            listener, now = self._connection.store.listener, time.monotonic()
            due = self._mark != listener.mark() or now - self._last_look >= POLL_SECONDS
            if not self._box.buffer and due:
                self._mark, self._last_look = listener.mark(), now
                self._box.fill()
            while self._box.buffer and not self.taken:
                data = self._box.buffer.popleft()
                if _is_message(data):
                    self.taken.append(data)
            if self.taken or self._given_up():
                return None
            left = POLL_SECONDS if self._deadline is None else self._deadline - time.monotonic()
            return None if left <= 0 else min(STOP_CHECK_SECONDS, left)

    def abandon(self) -> None:
        """End the wait, and put a message that was taken back for the next wait."""
        with self._box.lock:
            self._over = True
            self._box.buffer.extendleft(self.taken)

    def run(self) -> Any:
        try:
            while (pause := self.step()) is not None:
                self._connection.store.listener.wait(self._mark, pause)
        except BaseException:  # Ctrl-C and a stop too must give the message back; raised again
            self.abandon()
            raise
        return decode(self.taken[0]) if self.taken else None

    async def arun(self) -> Any:
        threads = self._connection.threads
        try:
            while (pause := await threads(self.step)) is not None:
                await self._connection.store.listener.await_(self._mark, pause)
        except BaseException:  # Ctrl-C and a stop too must give the message back; raised again
            await asyncio.shield(threads(self.abandon))
            raise
        return decode(self.taken[0]) if self.taken else None


class JobInbox:
    """The messages to a running job."""

    def __init__(self, connection: ClientConnection, job: RunningJob) -> None:
        self._connection = connection
        self._job = job
        self._listener: int | None = None
        self.lock = threading.Lock()
        self.buffer: deque[bytes] = deque()

    def get(self, timeout: Duration | None) -> Any:
        return self._wait(timeout).run()

    async def aget(self, timeout: Duration | None) -> Any:
        return await self._wait(timeout).arun()

    def _wait(self, timeout: Duration | None) -> MessageWait:
        if self._job.in_transaction:
            timeout = 0  # all other writers wait for this transaction
        return MessageWait(self._connection, self, timeout, lambda: self._job.should_stop)

    def fill(self) -> None:
        """Take one message; if there is none, listen for the next."""
        if not self._take() and self._listener is None and not self._job.in_transaction:
            store = self._connection.store
            store.listener.enter()
            self._listener = store.messages.await_mail(self._job.id, store.listener.id)
            self._take()

    def _take(self) -> bool:
        messages = self._connection.store.messages
        data = messages.receive(self._job.fence, self._job.own_transaction)
        if data is not None:
            self.buffer.append(data)
        return data is not None

    def close(self) -> None:
        """Stop listening: the job is over."""
        if self._listener is not None:
            store = self._connection.store
            with suppress(StoreError):  # the row goes with the job
                store.messages.stop(self._listener)
            store.listener.leave()


class Subscription:
    """What is published to a topic from now on: `for message in …`, `async for`, or `get(timeout)`.

    It ends with its `with` block, with `close()`, or with its process.
    """

    def __init__(self, connection: ClientConnection, topic: str) -> None:
        self._connection = connection
        self.topic = topic
        self.lock = threading.Lock()
        self.buffer: deque[bytes] = deque()
        self._pid = os.getpid()
        self._subscription: TopicSubscription | None = None
        store = connection.store
        store.install()
        store.listener.enter()
        try:
            self._subscription = self._subscribe(store)
        finally:
            if self._subscription is None:
                store.listener.leave()

    def __repr__(self) -> str:
        return f"<Subscription to {self.topic!r}{'' if self._subscription else ', closed'}>"

    def _subscribe(self, store: Store) -> TopicSubscription:
        return store.messages.subscribe(self.topic, store.listener.session(), store.listener.id)

    def get(self, timeout: Duration | None = None) -> Any:
        """Return the next message; None when the time is over."""
        return self._wait(timeout).run()

    async def aget(self, timeout: Duration | None = None) -> Any:
        return await self._wait(timeout).arun()

    def _wait(self, timeout: Duration | None) -> MessageWait:
        return MessageWait(self._connection, self, timeout, lambda: self._subscription is None)

    def fill(self) -> None:
        if self._subscription is None:
            return
        if self._pid != os.getpid():
            raise GenbaError(
                f"the subscription to {self.topic!r} was made before the fork, "
                "and stays with the parent"
            )
        messages = self._connection.store.messages
        self._subscription, published = messages.hear(self._subscription)
        self.buffer.extend(published)

    def close(self) -> None:
        with self.lock:
            subscription, self._subscription = self._subscription, None
        if subscription is not None and self._pid == os.getpid():
            store = self._connection.store
            try:
                store.messages.unsubscribe(subscription)
            finally:
                store.listener.leave()

    async def aclose(self) -> None:
        await self._connection.threads(self.close)

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
        wait = self._wait(None)
        message = wait.run()
        if not wait.taken:
            raise StopIteration
        return message

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Any:
        wait = self._wait(None)
        message = await wait.arun()
        if not wait.taken:
            raise StopAsyncIteration
        return message
