"""Jobs are found by what they are, in pages that neither repeat nor miss one; many are changed at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.storage.builders import (
    OTHERS_ERROR,
    SECOND,
    after,
    claimed,
    connection,
    ending,
    enqueued,
    joined,
    one,
    rows,
    settle,
    state,
    states,
    success,
)

from genba.storage.bulk import merged
from genba.storage.search import Filter
from genba.storage.store import Store

OPEN = frozenset({"blocked", "scheduled", "waiting", "running", "held"})


@pytest.fixture
def zoo(store: Store) -> dict[str, int]:
    """One job of each state, by its name."""
    joined(store, name="here")
    found: dict[str, int] = {}
    for end in ("succeeded", "failed", "timed_out"):
        found[end] = one(store)
        (job,) = claimed(store)
        if end == "succeeded":
            store.finish(1, [success(job)])
        else:
            store.end(1, [ending(job, end, error=OTHERS_ERROR)])
    found["cancelled"] = one(store)
    store.cancel(found["cancelled"], "no")
    found["running"] = one(store)
    claimed(store)
    found["held"] = one(store)
    store.hold(found["held"], "why")
    found["blocked"] = one(store, after=after(found["running"]))
    found["scheduled"] = one(store, delay=60 * SECOND)
    found["waiting"] = one(store, task="other", queue="slow", parent_id=found["running"])
    found["parked"] = one(store, task="nobody knows")
    store.park_unknown("default", ["shop.pay"])
    return found


def ids(store: Store, **given: Any) -> list[int]:
    found = store.search.ids(Filter(**given), 100)
    assert store.search.count(Filter(**given)) == len(found)
    assert [job.id for job in store.search.jobs(Filter(**given), 100)] == found
    return found


def test_each_state_is_found_alone_and_with_others(store, zoo):
    for name, id in zoo.items():
        wanted = "waiting" if name == "parked" else name
        assert id in ids(store, states=frozenset({wanted}))
    assert ids(store) == sorted(zoo.values(), reverse=True)
    assert ids(store, oldest_first=True) == sorted(zoo.values())
    assert set(ids(store, states=OPEN)) == {zoo[name] for name in (*OPEN, "parked")}
    assert ids(store, states=frozenset()) == []


def test_other_conditions_hold_in_every_state(store, zoo, clock):
    assert ids(store, tasks=["other"]) == ids(store, queues=["slow"]) == [zoo["waiting"]]
    assert ids(store, parents=[zoo["running"]]) == [zoo["waiting"]]
    assert ids(store, nodes=["here"]) == [zoo["running"]]
    assert ids(store, nodes=["there"]) == ids(store, schedules=["nightly"]) == []
    assert ids(store, error="50%_off!") == [zoo["timed_out"], zoo["failed"]]
    assert ids(store, error="50_") == []
    now = clock.now()
    assert ids(store, since=now) == ids(store, until=now + 1) == ids(store)
    assert ids(store, since=now + 1) == ids(store, until=now) == []


def test_pages_neither_repeat_nor_miss_a_job(store):
    jobs = enqueued(store, 25)
    seen: list[int] = []
    while page := store.search.ids(Filter(last_id=seen[-1] if seen else None), 10):
        seen += page
        enqueued(store, 3)   # newer ones do not disturb
    assert seen == jobs[::-1]


def test_few_of_one_hour_are_found_among_all_that_ended_before(store, clock):
    joined(store)
    for _ in range(3):
        one(store)
        store.finish(1, [success(claimed(store)[0])])
    clock.advance("1h")
    late = one(store)
    store.finish(1, [success(claimed(store)[0])])

    assert ids(store, states=frozenset({"succeeded"}), since=clock.now() - SECOND) == [late]


def test_many_are_moved_in_batches(store):
    joined(store)
    jobs = enqueued(store, 1203)
    (job,) = claimed(store)
    steps: list[int] = []
    bulk = store.bulk

    assert bulk.each(Filter(states=OPEN), lambda some: bulk.hold(some, "why"), steps.append) == 1202
    assert steps == [499, 999, 1202]   # the first is running
    assert bulk.each(Filter(states=frozenset({"held"})), bulk.resume) == 1202
    assert store.search.count(Filter(states=frozenset({"waiting"}))) == 1202
    assert bulk.each(Filter(states=OPEN), lambda some: store.cancel_all(some, "no")) == 1203
    assert store.search.count(Filter(states=frozenset({"cancelled"}))) == 1202
    assert bulk.each(Filter(states=frozenset({"cancelled"})), bulk.requeue) == 1202
    assert state(store, jobs[5]) == "waiting"
    assert bulk.each(Filter(states=OPEN), bulk.delete) == 1202
    assert store.search.ids(Filter(), 10) == [job.id]


def test_regression_09_a_deleted_job_never_reappears(store, url):
    joined(store)
    parent = one(store, tags=("x",), key="k")
    child, hardy = one(store, after=after(parent)), one(store, after=after(parent, wants="finished"))
    (job,) = claimed(store)
    assert store.bulk.delete([parent]) == 0   # it runs
    store.end(1, [ending(job, "scheduled", due_at=1)])

    assert store.bulk.delete([parent]) == 1
    settle(store)
    assert store.finish(1, [success(job)]) == set()
    assert store.end(1, [ending(job, "waiting")]) == set()
    store.promote()
    assert store.states([parent]) == {}
    assert states(store, [child, hardy]) == ["cancelled", "waiting"]
    for table in ("tag", "attempt"):
        assert rows(url, f"SELECT * FROM genba.{table} WHERE job_id = {parent}") == []
    assert not store.requeue(parent)
    assert not store.resume(parent)


def change(store: Store, id: int, **columns: Any) -> bool:
    return store.bulk.change(id, columns, lambda old: merged(old, {"timeout": 5}))


def test_a_job_that_has_not_started_can_be_changed(store, clock):
    joined(store)
    first, second = enqueued(store, 2)
    assert change(store, second, priority=1)
    assert [job.id for job in claimed(store, 2)] == [second, first]
    assert not change(store, first, priority=2)

    third = one(store)
    assert change(store, third, due_at=clock.now() + SECOND, queue="slow")
    assert state(store, third) == "scheduled"
    assert change(store, third, due_at=clock.now())
    record = store.job(third)
    assert (record.state, record.queue, record.options) == ("waiting", "slow", '{"timeout":5}')
    store.hold(third, "why")
    assert change(store, third, priority=4)
    assert state(store, third) == "held"


def test_a_claim_and_a_change_at_the_same_time_are_decided_by_the_database(store):
    joined(store)
    id = one(store)

    def meanwhile(old: str | None) -> str | None:
        store_claims.extend(claimed(store))
        return old

    store_claims: list[Any] = []
    if store.lanes == 1:   # SQLite has one writer: who changes comes before or after the claim
        assert change(store, id, priority=5)
        assert claimed(store)[0].priority == 5
        return
    assert not store.bulk.change(id, {"priority": 5}, meanwhile)
    assert store_claims[0].priority == 0


def test_regression_03_what_waits_long_is_not_failed(store, clock):
    joined(store)
    jobs = enqueued(store, 100)
    clock.advance("24h")
    store.promote()
    store.expire()
    settle(store)
    assert set(states(store, jobs)) == {"waiting"}


def test_plans_find_few_among_many(store, url):
    """A page of what is open or failed reads an index that has no succeeded job in it."""
    fill(url, 20_000)
    text, values = store.search._ids(Filter(states=OPEN | {"failed"}), 50)
    with store._db.statement() as tx:
        plan = str(tx.select(f"EXPLAIN {'QUERY PLAN ' if store.lanes == 1 else ''}{text}", **values))
    for index in ("job_rare", "job_claim", "job_parked", "job_due", "job_running"):
        assert index in plan, plan


PAGES: tuple[dict[str, Any], ...] = (
    {},
    {"states": OPEN},
    {"states": frozenset({"failed"})},
    {"states": frozenset({"succeeded"})},
    {"states": frozenset({"failed"}), "tasks": ["shop.pay"], "error": "50%"},
    {"tasks": ["shop.pay"]},
    {"since": 10},
)


def fill(url: str, many: int) -> None:
    """So many jobs, nearly all of them succeeded, and the planner knows."""
    lite = url.startswith("sqlite")
    source = (
        f"(WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {many}) SELECT n FROM s)"
        if lite
        else f"generate_series(1, {many}) AS s (n)"
    )
    text = f"""
        INSERT INTO genba.job (id, rank, due_at, created_at, finished_at, attempt, priority, namespace, queue, task,
                               state, args)
        SELECT n, n, n, n, CASE WHEN n % 10000 <> 7 THEN n END, 1, 0, 'default', 'default', 'shop.pay',
               CASE n % 10000 WHEN 5 THEN 'failed' WHEN 6 THEN 'cancelled' WHEN 7 THEN 'scheduled' ELSE 'succeeded' END,
               '{{}}'
          FROM {source}"""
    with connection(url) as conn:
        conn.execute(text.replace("genba.", "genba_") if lite else text)
        conn.execute("ANALYZE")


def slowest_pages(store: Store, url: str, many: int) -> dict[str, float]:
    """The 95th percentile of the seconds that each question takes, for pages all over the table."""
    fill(url, many)
    took: dict[str, float] = {}
    for given in PAGES:
        times = []
        for last in (None, *range(many, 0, -many // 40)):
            before = time.perf_counter()
            store.search.jobs(Filter(**given, last_id=last), 50)
            times.append(time.perf_counter() - before)
        took[str(given)] = sorted(times)[int(len(times) * 0.95)]
    return took


@pytest.mark.soak
def test_a_page_among_five_million_takes_less_than_a_fifth_of_a_second(store, url):
    took = slowest_pages(store, url, 5_000_000)
    print(took)
    assert max(took.values()) < 0.2, took


def test_a_page_among_many_is_quick(store, url):
    took = slowest_pages(store, url, 20_000)
    assert max(took.values()) < 0.2, took
