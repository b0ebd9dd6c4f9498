"""Jobs with several limits: a bucket that was pruned while they wait never keeps them from starting."""

from __future__ import annotations

import pytest
from tests.storage.builders import claimed, enqueued, joined, rows, success

from genba.domain.limits import LimitRule, needs_of

GPU = LimitRule("gpu", 1)
TENANT = LimitRule("tenant:{tenant}", 1)


def a_job_of(store, tenant, *rules):
    """Enqueue a job that needs the gpu and its tenant's bucket."""
    rules = rules or (GPU, TENANT)
    (id,) = enqueued(store, 1, needs=needs_of(rules, {"tenant": tenant}), rules=rules)
    return id


def buckets(url):
    return {name for (name,) in rows(url, "SELECT name FROM genba.bucket")}


def prune_as_a_sweep_does(store, clock):
    clock.advance(61)
    store.limits.prune()


def test_a_bucket_that_a_parked_job_needs_is_not_pruned(store, url, clock):
    joined(store)
    a_job_of(store, "a")
    claimed(store)
    a_job_of(store, "b")

    prune_as_a_sweep_does(store, clock)

    assert "tenant:b" in buckets(url)


def test_a_bucket_that_no_open_job_needs_is_pruned(store, url, clock):
    joined(store)
    a_job_of(store, "a")
    (first,) = claimed(store)
    store.finish(1, [success(first)])

    prune_as_a_sweep_does(store, clock)

    assert buckets(url) == set()


@pytest.mark.parametrize("first", ["gpu", "tenant"])
def test_a_job_starts_although_its_second_bucket_is_gone(store, url, clock, first):
    joined(store)
    blocker = (GPU,) if first == "gpu" else (TENANT,)
    a_job_of(store, "b", *blocker)
    (running,) = claimed(store)
    waits = a_job_of(store, "b")
    store_without_bucket(url, "tenant:b" if first == "gpu" else "gpu")

    store.finish(1, [success(running)])
    for _ in range(2):  # one makes the missing bucket, one serves its line
        store.limits.sweep()
        store.limits.recheck()

    assert [job.id for job in claimed(store, 8)] == [waits]


def store_without_bucket(url, name):
    from tests.storage.builders import connection, spoken

    with connection(url) as conn:
        conn.execute(spoken(url, f"DELETE FROM genba.bucket WHERE name = '{name}'"))
