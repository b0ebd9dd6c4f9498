"""`db verify`: a history that is sound is called sound, and each kind of corruption is found, and named."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from tests.storage import builders
from tests.storage.builders import (
    HOUR,
    LONG_ARGS,
    a_job,
    after,
    claimed,
    connection,
    ending,
    finish,
    joined,
    one,
    running,
    spoken,
    success,
)

from genba.domain.history_check import FaultKind
from genba.domain.limits import LIMIT, LimitRule, SlotNeed
from genba.storage.store import Store, open_store

GPU = SlotNeed("gpu", "gpu", LIMIT)


def plant(url: str, *statements: str) -> None:
    """Write a row by hand."""
    with connection(url) as conn:
        for statement in statements:
            conn.execute(spoken(url, statement))


def found(store: Store) -> list[tuple[str, str]]:
    return [(fault.kind, fault.which) for fault in store.verify().faults]


def limited(store: Store, clock: Any, count: int = 2) -> list[int]:
    """Jobs of a bucket for one, run one after the other, for a second each."""
    ids = [
        made.id
        for made in store.enqueue(
            [a_job(needs=(GPU,), rules=(LimitRule("gpu", 1),)) for _ in range(count)]
        )
    ]
    for _ in range(count):
        (job,) = claimed(store, count)
        clock.advance(1)
        now = clock.now()
        assert store.finish(1, [success(job, started=job.claimed_at, ended=now)]) == {job.id}
    return ids


@pytest.fixture
def shop(store, clock) -> Store:
    """A day of everything that can happen to a job."""
    joined(store)
    done = one(store, args=LONG_ARGS)
    finish(store, done)
    failed = one(store)
    child, grandchild = one(store, after=after(failed)), 0
    grandchild = one(store, after=after(child))
    finish(store, failed, "failed")
    builders.settle(store)
    assert builders.state(store, grandchild) == "cancelled"
    assert store.requeue(failed)
    for id in (failed, child, grandchild):
        finish(store, id)
        builders.settle(store)
    retried = running(store)
    store.end(1, [ending(retried, "scheduled", due_at=clock.now() + HOUR, retries=1)])
    clock.advance("1h")
    assert store.promote() == 1
    finish(store, retried.id)
    held = one(store, delay=HOUR)
    assert store.hold(held, "why")
    assert store.resume(held)
    gone = one(store)
    assert store.bulk.delete([gone]) == 1
    late = one(store, delay=HOUR)
    assert store.bulk.change(late, {"due_at": clock.now()}, lambda old: old)
    asked = running(store)
    assert store.cancel(asked.id, "no more")
    store.end(1, [ending(asked, "cancelled", "cancelled")])
    started = running(store)
    store.mark_started([(started.id, started.attempt, 77, clock.now())])
    lost = running(store)
    store.nodes.declare_dead(1, builders.loss)
    joined(store, 2)
    limited_to = store.enqueue(
        [a_job(needs=(GPU,), rules=(LimitRule("gpu", 1),)) for _ in range(2)]
    )
    assert {started.id, lost.id, limited_to[0].id} <= {
        job.id for job in claimed(store, 16, node=2, claim=78)
    }
    return store


def test_a_history_of_everything_is_sound(shop):
    certificate = shop.verify()

    assert certificate.faults == []
    assert certificate.sound
    assert certificate.complete
    assert certificate.jobs == shop.search.count(_everything())
    assert certificate.attempts >= 7
    assert certificate.events > certificate.jobs
    assert certificate.notes == []


def _everything() -> Any:
    from genba.domain.states import State
    from genba.storage.jobs.search import Filter

    return Filter(states=frozenset(State))


def test_pruned_jobs_and_events_are_not_lost_ones(shop, clock):
    assert shop.prune(clock.now() + 1) > 0
    assert shop.verify().faults == []

    while shop.events.prune(clock.now() + 1, 0):
        pass
    certificate = shop.verify()
    assert certificate.faults == []
    assert not certificate.complete


def test_one_namespace_is_not_blamed_for_another(shop, url, clock):
    with closing(open_store(url, namespace="other", clock=clock)) as other:
        other.install()
        lost = one(other)
        plant(url, f"DELETE FROM genba.job WHERE id = {lost}")

        assert found(other) == [(FaultKind.LOST, f"job {lost}")]
        assert found(shop) == []


CORRUPTION = {
    "a job that waited is gone": (
        "DELETE FROM genba.job WHERE id = {waiting}",
        FaultKind.LOST,
        "job {waiting}",
    ),
    "a job that ended is gone and its history is not": (
        "DELETE FROM genba.job WHERE id = {retried}",
        FaultKind.LOST,
        "job {retried}",
    ),
    "the last attempt is gone": (
        "UPDATE genba.job SET ran_until = NULL WHERE id = {done}",
        FaultKind.LOST,
        "job {done}",
    ),
    "an attempt is gone": (
        "DELETE FROM genba.attempt WHERE job_id = {retried}",
        FaultKind.LOST,
        "job {retried}",
    ),
    "a job that waits has returned": (
        "UPDATE genba.job SET ran_until = 5 WHERE id = {waiting}",
        FaultKind.DAMAGED,
        "job {waiting}",
    ),
    "an end has two events": (
        "INSERT INTO genba.event (at, namespace, kind, job_id) VALUES (0, 'default', 'failed', {done})",
        FaultKind.TWICE,
        "job {done}",
    ),
    "a final job has a later running event": (
        "INSERT INTO genba.event (at, namespace, kind, job_id) VALUES (0, 'default', 'running', {done})",
        FaultKind.MOVE,
        "job {done}",
    ),
    "a job without an enqueue is resumed": (
        "INSERT INTO genba.event (at, namespace, kind, job_id) VALUES (0, 'default', 'resumed', 4711)",
        FaultKind.MOVE,
        "job 4711",
    ),
    "a failure is made a success": (
        "UPDATE genba.job SET state = 'failed' WHERE id = {done}",
        FaultKind.MOVE,
        "job {done}",
    ),
    "a job is ended by hand": (
        "UPDATE genba.job SET state = 'succeeded', finished_at = 1 WHERE id = {waiting}",
        FaultKind.MOVE,
        "job {waiting}",
    ),
    "a job runs without a node": (
        "UPDATE genba.job SET state = 'running' WHERE id = {waiting}",
        FaultKind.DAMAGED,
        "job {waiting}",
    ),
    "a job is in no state at all": (
        "UPDATE genba.job SET state = 'dreaming' WHERE id = {waiting}",
        FaultKind.DAMAGED,
        "job {waiting}",
    ),
    "an end has no moment": (
        "UPDATE genba.job SET finished_at = NULL WHERE id = {done}",
        FaultKind.DAMAGED,
        "job {done}",
    ),
    "a job waits for no parent": (
        "UPDATE genba.job SET open_deps = 2 WHERE id = {waiting}",
        FaultKind.DAMAGED,
        "job {waiting}",
    ),
    "an attempt is invented": (
        (
            "UPDATE genba.job SET ran_until = NULL WHERE id = {done}; "
            "INSERT INTO genba.attempt (job_id, attempt, ended_at, cause) VALUES ({done}, 9, 1, 'returned')"
        ),
        FaultKind.DAMAGED,
        "job {done}",
    ),
    "a success has a cause": (
        (
            "UPDATE genba.job SET ran_until = NULL WHERE id = {done}; "
            "INSERT INTO genba.attempt (job_id, attempt, ended_at, cause) VALUES ({done}, 1, 1, 'exception')"
        ),
        FaultKind.DAMAGED,
        "job {done}",
    ),
    "a slot is counted without a holder": (
        "UPDATE genba.bucket SET taken = taken + 1",
        FaultKind.LIMIT,
        "bucket gpu",
    ),
    "two had the one slot at a time": (
        (
            "UPDATE genba.job SET ran_until = ran_until + 5000000, finished_at = finished_at + 5000000 "
            "WHERE id = {limited}"
        ),
        FaultKind.LIMIT,
        "bucket gpu",
    ),
    "two attempts ran at once": (
        "UPDATE genba.attempt SET ended_at = ended_at + 5000000 WHERE job_id = {retried} AND attempt = 1",
        FaultKind.TOGETHER,
        "job {retried}",
    ),
    "a tick was run twice": (
        (
            "INSERT INTO genba.schedule (namespace, name, task, definition, args) "
            "VALUES ('default', 'nightly', 't', '', NO_ARGS); UPDATE genba.job SET moment = 5, "
            "schedule_id = (SELECT id FROM genba.schedule) WHERE id IN ({done}, {limited})"
        ),
        FaultKind.TWICE,
        "schedule nightly",
    ),
}


@pytest.mark.parametrize("what", CORRUPTION)
def test_planted_corruption_is_found_and_named(store, url, clock, what):
    joined(store)
    done = one(store)
    finish(store, done)
    retried = running(store)
    clock.advance(1)
    store.end(1, [ending(retried, "waiting", retries=1, ended=clock.now())])
    finish(store, retried.id)
    ids = {"done": done, "retried": retried.id, "limited": limited(store, clock)[0]}
    store.enqueue([a_job(needs=(GPU,), rules=(LimitRule("gpu", 1),))])
    ids["waiting"] = one(store, priority=-1)
    assert found(store) == []

    statements, kind, which = CORRUPTION[what]
    plant(url, *statements.format(**ids).split("; "))

    assert (kind, which.format(**ids)) in found(store)
    assert {where for _, where in found(store)} == {which.format(**ids)}, "others are blamed too"


def test_a_damaged_file_is_found(store, url, engine):
    if engine != "sqlite":
        pytest.skip("PostgreSQL has its own means: pg_amcheck")
    one(store)
    plant(
        url, "PRAGMA writable_schema = ON", "DELETE FROM sqlite_schema WHERE name = 'genba_tag_job'"
    )
    store.close()

    assert (FaultKind.DAMAGED, "the file") in found(store)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)  # PostgreSQL keeps them by itself
@pytest.mark.parametrize("table", ["argument WHERE job_id", "job WHERE id"])
def test_a_job_without_its_long_arguments_and_such_without_their_job_are_found(store, url, table):
    joined(store)
    id = one(store, args=LONG_ARGS)
    finish(store, id)

    plant(url, f"DELETE FROM genba.{table} = {id}")

    assert (FaultKind.LOST, f"job {id}") in found(store)


def test_a_limit_that_was_lowered_has_not_been_exceeded_before(store, clock):
    joined(store)
    store.enqueue([a_job(needs=(GPU,), rules=(LimitRule("gpu", 2),)) for _ in range(2)])
    both = claimed(store, 2)
    clock.advance(1)
    assert (
        len(
            store.finish(
                1, [success(job, started=job.claimed_at, ended=clock.now()) for job in both]
            )
        )
        == 2
    )

    store.operators.set_limit("gpu", 1, "a test")

    assert found(store) == []


def test_a_clock_that_was_set_back_is_no_fault(store, clock):
    joined(store)
    limited(store, clock)
    clock.set(clock.now() - HOUR)
    limited(store, clock)

    certificate = store.verify()

    assert certificate.faults == []
    assert any("clock" in note for note in certificate.notes)
