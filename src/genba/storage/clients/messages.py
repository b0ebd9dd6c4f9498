"""Messages: to a job, kept until it takes them; to a topic, for those who listen at that moment."""

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
    """One who hears a topic: what came after `passed` is new to it."""

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
        self._doubts: dict[
            Fence, tuple[int, bytes]
        ] = {}  # what may have been received: there was no answer yet

    # to a job

    def send(self, id: JobId, data: bytes) -> None:
        """Durable when it returns; IllegalMove if the job is final."""
        with self._db.transaction() as tx:
            row = tx.one("state_of_job", id=id, namespace=self._namespace)
            if row is None:
                raise JobNotFound(f"there is no job {id}")
            if row[0] in FINAL:
                raise IllegalMove(f"job {id} is {row[0]}, and receives no more messages")
            tx.run("insert_message", job_id=id, namespace=self._namespace, topic=None, data=data)
            bells = [bell for (bell,) in tx.all("listeners_of_job", job_id=id)]
        self._ring(bells)

    def receive(self, fence: Fence, within: OpenTransaction | None = None) -> bytes | None:
        """The oldest message to this job, which is gone from here; LeaseLost if the attempt is over.

        `within` the job's own transaction it is gone with its commit.
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
                mail = look.one("oldest_message", job_id=fence[0])
            if mail is None:
                return None
            if self._receive_this(fence, int(mail[0]), mail[1]):
                return bytes(mail[1])

    def _receive_this(self, fence: Fence, seq: int, data: bytes) -> bool:
        """False if another process of this job was quicker.  Without an answer it is ours, when it is gone."""
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
        """From now on whoever sends to the job rings this bell; gives what `stop` takes."""
        with self._db.single_write() as tx:
            row = tx.one("insert_job_listener", namespace=self._namespace, job_id=id, bell=bell)
            assert row is not None
            return int(row[0])

    def stop(self, listener: int) -> None:
        with self._db.single_write() as tx:
            tx.run("delete_listener", id=listener)

    # to a topic

    def publish(self, topic: str, data: bytes) -> int:
        """How many listen; without any it is gone."""
        with self._db.statement() as look:
            if not look.all("listeners_of_topic", namespace=self._namespace, topic=topic):
                return 0
        with self._db.transaction() as tx:
            self._alone(tx, topic)  # so that numbers are in the order of the commits
            bells = [
                bell
                for (bell,) in tx.all("listeners_of_topic", namespace=self._namespace, topic=topic)
            ]
            if bells:
                tx.run(
                    "insert_message", job_id=None, namespace=self._namespace, topic=topic, data=data
                )
        self._ring(bells)
        return len(bells)

    def subscribe(self, topic: str, session: int, bell: int) -> TopicSubscription:
        """Hears what is published from now on."""
        with self._db.transaction() as tx:
            self._alone(tx, topic)
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

    def hear(self, listening: TopicSubscription) -> tuple[TopicSubscription, list[bytes]]:
        """What is new, oldest first; CursorExpired if others have ended this subscription."""
        with self._db.statement() as tx:
            if tx.one("listener_exists", id=listening.id) is None:
                raise _cut_off(listening)
            rows = tx.all(
                "messages_of_topic_after",
                namespace=self._namespace,
                topic=listening.topic,
                passed=listening.passed,
            )
        if not rows:
            return listening, []
        after = listening._replace(passed=rows[-1][0])
        with (
            suppress(StoreError),
            self._db.transaction() as tx,
        ):  # we have them; what is old is swept later
            if tx.one("set_passed", id=after.id, passed=after.passed) is None:
                raise _cut_off(listening)
            tx.run("delete_read_messages", namespace=self._namespace, topic=after.topic)
        return after, [row[1] for row in rows]

    def unsubscribe(self, listening: TopicSubscription) -> None:
        with self._db.transaction() as tx:
            tx.run("delete_listener", id=listening.id)
            tx.run("delete_read_messages", namespace=self._namespace, topic=listening.topic)

    # kept in order

    def sweep(self, before: Micros) -> None:
        """Forget what nobody listens to, and what was published before `before`, with those who have not heard it."""
        with self._db.statement() as tx:
            unheard = [
                topic for (topic,) in tx.all("topics_without_listeners", namespace=self._namespace)
            ]
        with self._db.transaction() as tx:
            for topic in unheard:
                tx.run("delete_read_messages", namespace=self._namespace, topic=topic)
            last: dict[str, int] = {}
            for topic, seq in tx.all(
                "delete_old_messages", namespace=self._namespace, before=before
            ):
                last[topic] = max(seq, last.get(topic, 0))
            for topic, seq in last.items():
                tx.run("delete_late_listeners", namespace=self._namespace, topic=topic, seq=seq)
            tx.run("delete_dead_listeners", namespace=self._namespace)

    def _alone(self, tx: Transaction, topic: str) -> None:
        tx.run(
            "lock_one_name", namespace=self._namespace, name=f"topic {topic}\n"
        )  # no lock can be called so

    def _ring(self, bells: Sequence[int]) -> None:
        if bells:
            with suppress(StoreError):  # they look by themselves
                self._wakeups.wake_clients(bells)


def _cut_off(listening: TopicSubscription) -> CursorExpired:
    return CursorExpired(
        f"the subscription to {listening.topic!r} has ended: this process was not heard of for too long, or did not "
        "take its messages; subscribe again"
    )
