"""Messages in the store: those to jobs are kept until received, those to topics go to the listeners."""

from __future__ import annotations

import pytest
from tests.storage.builders import (
    CLAIM,
    claimed,
    ending,
    finish,
    joined,
    one,
    rows,
    running,
    success,
    together,
)

from genba.domain.clock import ManualClock
from genba.domain.outcome import AttemptReport, Fence, OutcomeRequest
from genba.errors import CursorExpired, IllegalMove, JobNotFound, LeaseLost
from genba.storage.records import Claimed
from genba.storage.store import Store

HOUR = 3_600_000_000


def fence(job: Claimed) -> Fence:
    return job.id, job.attempt, CLAIM


def test_a_job_receives_what_was_sent_in_order_also_before_it_ran(store: Store) -> None:
    joined(store)
    id = one(store)
    store.messages.send(id, b"1")
    store.messages.send(id, b"2")
    (job,) = claimed(store)
    store.messages.send(id, b"3")

    assert [store.messages.receive(fence(job)) for _ in range(4)] == [b"1", b"2", b"3", None]


def test_what_an_attempt_has_not_received_waits_for_the_next(store: Store) -> None:
    joined(store)
    job = running(store)
    store.messages.send(job.id, b"1")
    store.messages.send(job.id, b"2")
    assert store.messages.receive(fence(job)) == b"1"
    store.end(1, [ending(job, "waiting", "signal 9")])
    (again,) = claimed(store)

    with pytest.raises(LeaseLost):
        store.messages.receive(fence(job))
    assert store.messages.receive(fence(again)) == b"2"


def test_in_the_jobs_own_transaction_it_is_received_with_the_commit(store: Store) -> None:
    joined(store)
    job = running(store)
    store.messages.send(job.id, b"1")
    own = store.own_writes.transaction(
        fence(job), lambda: (OutcomeRequest(wants="succeed", result=b"1"), AttemptReport(), 0.0)
    )

    own.__enter__()
    assert store.messages.receive(fence(job), own) == b"1"
    own.__exit__(ValueError, ValueError("undo"), None)
    assert store.messages.receive(fence(job)) == b"1"


@pytest.mark.parametrize("end", ["succeeded", "failed"])
def test_a_final_job_and_one_that_is_not_there_are_refused(store: Store, end: str) -> None:
    joined(store)
    id = one(store)
    finish(store, id, end)

    with pytest.raises(IllegalMove, match=f"job {id} is {end}"):
        store.messages.send(id, b"1")
    with pytest.raises(JobNotFound):
        store.messages.send(id + 1000, b"1")


def test_messages_go_with_their_job(store: Store, clock: ManualClock, url: str) -> None:
    joined(store)
    job = running(store)
    store.messages.send(job.id, b"1")
    store.finish(1, [success(job)])
    clock.advance("1h")
    store.prune(store.now())

    assert rows(url, "SELECT * FROM genba.message") == []


def test_listeners_get_all_messages_in_order_and_no_other_client_does(
    store: Store, url: str
) -> None:
    store.sessions.open(1)
    assert store.messages.publish("t", b"gone") == 0
    early = store.messages.subscribe("t", 1, 5)
    assert store.messages.publish("t", b"1") == 1
    late = store.messages.subscribe("t", 1, 6)
    assert store.messages.publish("t", b"2") == 2
    assert store.messages.publish("other", b"3") == 0

    early, heard = store.messages.hear(early)
    assert heard == [b"1", b"2"]
    assert store.messages.hear(early)[1] == []
    assert store.messages.hear(late)[1] == [b"2"]
    assert rows(url, "SELECT * FROM genba.message") == []


def test_concurrent_publishers_are_heard_in_one_order_and_completely(store: Store) -> None:
    store.sessions.open(1)
    first, second = (store.messages.subscribe("t", 1, bell) for bell in (5, 6))
    heard: list[bytes] = []

    def publish(i: int) -> None:
        nonlocal first
        for n in range(10):
            if i == 0:
                first, new = store.messages.hear(first)
                heard.extend(new)
            else:
                store.messages.publish("t", f"{i} {n}".encode())

    together(4, publish)
    heard += store.messages.hear(first)[1]
    assert heard == store.messages.hear(second)[1]
    for i in (1, 2, 3):
        assert [text for text in heard if text.startswith(b"%d" % i)] == [
            b"%d %d" % (i, n) for n in range(10)
        ]


def test_one_that_does_not_listen_any_more_keeps_nothing_back(
    store: Store, clock: ManualClock, url: str
) -> None:
    store.sessions.open(1)
    store.sessions.open(2)
    dead, slow = store.messages.subscribe("t", 1, 5), store.messages.subscribe("t", 2, 6)
    store.messages.publish("t", b"1")
    store.sessions.close(1)
    with pytest.raises(CursorExpired, match="'t' has ended"):
        store.messages.hear(dead)
    clock.advance("2h")
    store.messages.sweep(store.now() - HOUR)

    with pytest.raises(CursorExpired, match="subscribe again"):
        store.messages.hear(slow)
    assert rows(url, "SELECT * FROM genba.message") == []
    assert rows(url, "SELECT * FROM genba.listener") == []


def test_messages_without_listeners_are_swept(store: Store, url: str) -> None:
    joined(store)
    store.sessions.open(1)
    store.messages.subscribe("t", 1, 5)
    store.messages.publish("t", b"1")
    job = running(store)
    store.messages.await_mail(job.id, 7)
    store.messages.sweep(0)
    assert len(rows(url, "SELECT * FROM genba.listener")) == 2
    store.sessions.close(1)
    store.finish(1, [success(job)])
    store.messages.sweep(0)

    assert rows(url, "SELECT * FROM genba.message") == []
    assert rows(url, "SELECT * FROM genba.listener") == []
