"""Messages: to a job, kept until it reads them; to a topic, for its current subscribers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple, Protocol

from genba.domain.outcome import Fence
from genba.domain.states import FINAL
from genba.errors import CursorExpired, IllegalMove, JobNotFound, LeaseLost, StoreError
from genba.storage.engines.database import Database, Transaction
from genba.storage.records import JobId, Micros
from genba.storage.wakeups import ClientWakeups


class TopicSubscription(NamedTuple):
    """One subscriber of a topic; messages after `passed` are new to it."""

    id: int
    topic: str
    passed: int


class OpenTransaction(Protocol):
    def own_statements(self) -> AbstractContextManager[Transaction]: ...


class Messages:
    def __init__(self, database: Database, wakeups: ClientWakeups, namespace: str) -> None:
        self._db = database
        self._wakeups = wakeups
        self._namespace = namespace
        # Messages that may have been received: there was no answer yet.
        self._doubts: dict[Fence, tuple[int, bytes]] = {}

    # to a job

    def send(self, id: JobId, data: bytes) -> None:
        """Send a message, durable when it returns; IllegalMove if the job is final."""
        with self._db.transaction() as tx:
            row = tx.one("state_of_job", id=id, namespace=self._namespace)
            if row is None:
                raise JobNotFound(f"there is no job {id}")
            if row[0] in FINAL:
                raise IllegalMove(f"job {id} is {row[0]}, and receives no more messages")
            tx.run("insert_message", job_id=id, namespace=self._namespace, topic=None, data=data)
            clients = [client for (client,) in tx.all("listeners_of_job", job_id=id)]
        self._wake(clients)

    def receive(self, fence: Fence, within: OpenTransaction | None = None) -> bytes | None:
        """Take the oldest message to this job; LeaseLost if the attempt is over.

        `within` the job's own transaction, it is deleted with the commit.
        """
        if within is not None:
            with within.own_statements() as tx:
                self._check(tx, fence)
                row = tx.one("receive_oldest", job_id=fence[0])
                return row[0] if row else None
        while True:
            with self._db.statement() as look:
                doubt = self._doubts.get(fence)
                if doubt is not None and look.one("message_exists", seq=doubt[0]) is None:
                    return self._doubts.pop(fence)[1]
                message = look.one("oldest_message", job_id=fence[0])
            if message is None:
                return None
            if self._receive_this(fence, int(message[0]), message[1]):
                return bytes(message[1])

    def _receive_this(self, fence: Fence, seq: int, data: bytes) -> bool:
        """Delete the message; return False if another process of this job was quicker.

        After a lost answer, the message is ours if it is gone.
        """
        try:
            with self._db.transaction() as tx:
                self._check(tx, fence)
                gone = tx.one("delete_message", seq=seq)
        except StoreError:
            self._doubts[fence] = (seq, data)
            raise
        doubt = self._doubts.pop(fence, None)
        return gone is not None or (doubt is not None and doubt[0] == seq)

    def _check(self, tx: Transaction, fence: Fence) -> None:
        if tx.one("own_attempt", job_id=fence[0], attempt=fence[1], claim_id=fence[2]) is None:
            self._doubts.pop(fence, None)
            raise LeaseLost(f"job {fence[0]}: attempt {fence[1]} is over, and receives nothing")

    def await_mail(self, id: JobId, bell: int) -> int:
        """Wake this client for each message to the job; return the id that `stop` takes."""
        with self._db.single_write() as tx:
            row = tx.one("insert_job_listener", namespace=self._namespace, job_id=id, bell=bell)
            assert row is not None
            return int(row[0])

    def stop(self, listener: int) -> None:
        with self._db.single_write() as tx:
            tx.run("delete_listener", id=listener)

    # to a topic

    def publish(self, topic: str, data: bytes) -> int:
        """Send to all subscribers; return how many. Without any, the message is dropped."""
        with self._db.statement() as look:
            if not look.all("listeners_of_topic", namespace=self._namespace, topic=topic):
                return 0
        with self._db.transaction() as tx:
            self._lock_topic(tx, topic)  # so that numbers are in the order of the commits
            clients = [
                client
                for (client,) in tx.all(
                    "listeners_of_topic", namespace=self._namespace, topic=topic
                )
            ]
            if clients:
                tx.run(
                    "insert_message", job_id=None, namespace=self._namespace, topic=topic, data=data
                )
        self._wake(clients)
        return len(clients)

    def subscribe(self, topic: str, session: int, bell: int) -> TopicSubscription:
        """Subscribe to messages that are published from now on."""
        with self._db.transaction() as tx:
            self._lock_topic(tx, topic)
            last = tx.one("last_message_of_topic", namespace=self._namespace, topic=topic)
            passed = int(last[0]) if last else 0
            row = tx.one(
                "insert_topic_listener",
                namespace=self._namespace,
                topic=topic,
                session_id=session,
                bell=bell,
                passed=passed,
            )
            assert row is not None
            return TopicSubscription(int(row[0]), topic, passed)

    def hear(self, subscription: TopicSubscription) -> tuple[TopicSubscription, list[bytes]]:
        """Return new messages, oldest first; CursorExpired if the subscription was ended."""
        with self._db.statement() as tx:
            if tx.one("listener_exists", id=subscription.id) is None:
                raise _subscription_lost(subscription)
            rows = tx.all(
                "messages_of_topic_after",
                namespace=self._namespace,
                topic=subscription.topic,
                passed=subscription.passed,
            )
        if not rows:
            return subscription, []
        after = subscription._replace(passed=rows[-1][0])
        # We have the messages; if this fails, the sweep deletes them later.
        with suppress(StoreError), self._db.transaction() as tx:
            if tx.one("set_passed", id=after.id, passed=after.passed) is None:
                raise _subscription_lost(subscription)
            tx.run("delete_read_messages", namespace=self._namespace, topic=after.topic)
        return after, [row[1] for row in rows]

    def unsubscribe(self, subscription: TopicSubscription) -> None:
        with self._db.transaction() as tx:
            tx.run("delete_listener", id=subscription.id)
            tx.run("delete_read_messages", namespace=self._namespace, topic=subscription.topic)

    # cleaning up

    def sweep(self, before: Micros) -> None:
        """Delete messages without subscribers, and those published before `before`.

        Subscribers that have not read the latter lose their subscription.
        """
        with self._db.statement() as tx:
            without_listeners = [
                topic for (topic,) in tx.all("topics_without_listeners", namespace=self._namespace)
            ]
        with self._db.transaction() as tx:
            for topic in without_listeners:
                tx.run("delete_read_messages", namespace=self._namespace, topic=topic)
            last: dict[str, int] = {}
            for topic, seq in tx.all(
                "delete_old_messages", namespace=self._namespace, before=before
            ):
                last[topic] = max(seq, last.get(topic, 0))
            for topic, seq in last.items():
                tx.run("delete_late_listeners", namespace=self._namespace, topic=topic, seq=seq)
            tx.run("delete_dead_listeners", namespace=self._namespace)

    def _lock_topic(self, tx: Transaction, topic: str) -> None:
        # No lock can have this name.
        tx.run("lock_one_name", namespace=self._namespace, name=f"topic {topic}\n")

    def _wake(self, clients: Sequence[int]) -> None:
        if clients:
            with suppress(StoreError):  # they poll anyway
                self._wakeups.wake_clients(clients)


def _subscription_lost(subscription: TopicSubscription) -> CursorExpired:
    return CursorExpired(
        f"the subscription to {subscription.topic!r} has ended: this process was silent for "
        "too long, or did not take its messages; subscribe again"
    )
