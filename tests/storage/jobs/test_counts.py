"""Counts of open jobs: exact while they are few, and cut off when they are many."""

from __future__ import annotations

from contextlib import closing

from tests.storage.builders import HOUR, SECOND, TASK, after, claimed, enqueued, joined, one

from genba.storage.jobs import counts
from genba.storage.store import open_store


def seen(store):
    look = store.counts.read()
    return {(row.state, row.queue, row.task): row.jobs for row in look.jobs}


def test_every_open_state_is_counted_by_queue_and_task(store):
    joined(store)
    enqueued(store, 2)
    claimed(store, 2)
    waiting = enqueued(store, 3)
    enqueued(store, 2, queue="slow", task="shop.mail")
    enqueued(store, 4, delay=HOUR)
    one(store, task="shop.nobody", queue="lost")
    store.parked.park_unknown("lost", [TASK])
    store.hold(one(store), "why not")
    one(store, after=after(waiting[0]))

    assert seen(store) == {
        ("running", "default", TASK): 2,
        ("waiting", "default", TASK): 3,
        ("waiting", "slow", "shop.mail"): 2,
        ("scheduled", "default", TASK): 4,
        ("parked", "lost", "shop.nobody"): 1,
        ("held", "default", TASK): 1,
        ("blocked", "default", TASK): 1,
    }


def test_the_oldest_is_the_one_that_was_due_first(store, clock):
    one(store)
    clock.advance(90)
    enqueued(store, 3)

    look = store.counts.read()

    assert {(row.jobs, look.now - row.oldest) for row in look.jobs} == {(4, 90 * SECOND)}


def test_only_the_first_of_many_are_counted_and_the_answer_says_so(store, monkeypatch):
    monkeypatch.setattr(counts, "MOST", 5)
    enqueued(store, 9)
    enqueued(store, 2, queue="slow")
    enqueued(store, 7, delay=HOUR)

    look = store.counts.read()

    assert seen(store) == {
        ("waiting", "default", TASK): 5,
        ("waiting", "slow", TASK): 2,
        ("scheduled", "default", TASK): 5,
    }
    assert look.more == {("waiting", "default"), ("scheduled", "")}


def test_another_namespace_is_not_counted(store, url, clock):
    joined(store)
    enqueued(store, 3)
    claimed(store, 1)
    with closing(open_store(url, namespace="other", clock=clock)) as other:
        other.install()
        assert other.counts.read().jobs == []
