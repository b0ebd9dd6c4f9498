"""The clock was set back: what was to happen soon happens soon, and what was asked for by its moment keeps it."""

from __future__ import annotations

from tests.storage.builders import claimed, ending, enqueued, joined, one, success
from tests.storage.test_limits import rated

from genba.domain.duration import DAY, HOUR, SECOND


def test_a_retry_waits_as_long_as_it_should_have(store, clock):
    joined(store)
    one(store)
    (job,) = claimed(store)
    asked_for = one(store, due_at=clock.now() + HOUR)
    assert store.end(1, [ending(job, "scheduled", due_at=clock.now() + 10 * SECOND)]) == {job.id}
    clock.set(clock.now() - DAY)

    assert store.setback.mend_retries() == 1
    assert store.setback.mend_retries() == 0  # another node has seen it, too
    assert store.job(job.id).due_at == clock.now() + 10 * SECOND
    assert store.job(asked_for).due_at == clock.now() + DAY + HOUR


def test_a_rate_goes_on_by_the_new_time(store, clock):
    joined(store)
    ids = enqueued(store, 5, **rated(2, SECOND))
    first = claimed(store, 64)
    store.finish(1, [success(job) for job in first])
    clock.set(clock.now() - DAY)
    assert store.limits.ripen() is not None
    assert claimed(store, 64) == []

    assert store.setback.mend() == 1
    assert store.setback.mend() == 0
    clock.advance("1s")
    store.limits.ripen()
    assert {job.id for job in claimed(store, 64)} <= set(ids[2:])
    assert len([id for id in ids if store.job(id).attempt]) in (3, 4)  # no more than it may be in a second
