"""Jobs are found by what they are, in pages that neither repeat nor miss one; many are changed at once."""

from __future__ import annotations

import re
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
    spoken,
    state,
    states,
    success,
)

from genba.storage.jobs.bulk import merge_options
from genba.storage.jobs.search import Filter
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
    store.parked.park_unknown("default", ["shop.pay"])
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
        enqueued(store, 3)  # newer ones do not disturb
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
    assert steps == [499, 999, 1202]  # the first is running
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
    child, hardy = (
        one(store, after=after(parent)),
        one(store, after=after(parent, wants="finished")),
    )
    (job,) = claimed(store)
    assert store.bulk.delete([parent]) == 0  # it runs
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
    return store.bulk.change(id, columns, lambda old: merge_options(old, {"timeout": 5}))


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
    if (
        store.parallel_writers == 1
    ):  # SQLite has one writer: a change comes before or after the claim
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


DAY = 24 * 3600 * SECOND
TIMES = 7 * DAY  # over which the jobs of `fill` were enqueued, the last one at START + TIMES
START = 1_767_225_600_000_000


def fill(url: str, many: int) -> None:
    """So many jobs of seven days, nearly all of them succeeded, a few of them special; and the planner knows."""
    lite = url.startswith("sqlite")
    source = (
        f"(WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {many}) SELECT n FROM s)"
        if lite
        else f"generate_series(1, {many}) AS s (n)"
    )
    at = f"{START} + CAST(n AS bigint) * {TIMES // many}"
    text = f"""
        INSERT INTO genba.job (id, rank, due_at, created_at, finished_at, attempt, priority, namespace, queue, task,
                               state, key, parent_id, schedule_id, error, args)
        SELECT n, n, {at}, {at}, CASE WHEN n % 10000 <> 7 THEN {at} + 5000000 END, 1, 0, 'default',
               CASE WHEN n % {many // 10} = 3 THEN 'slow' ELSE 'default' END,
               CASE WHEN n % {many // 10} = 4 THEN 'shop.report' WHEN n % 3 = 0 THEN 'shop.mail' ELSE 'shop.pay' END,
               CASE n % 10000 WHEN 5 THEN 'failed' WHEN 6 THEN 'cancelled' WHEN 7 THEN 'scheduled' ELSE 'succeeded' END,
               CASE WHEN n % 100 = 0 THEN 'key ' || n END, CASE WHEN n % 20 = 1 THEN n - n % 1000 END,
               CASE WHEN n % 100 = 2 THEN 1 END, CASE n % 10000 WHEN 5 THEN '{{"message":"50% off"}}' END, NO_ARGS
          FROM {source};
        INSERT INTO genba.tag (namespace, name, job_id)
        SELECT 'default', CASE WHEN n % {many // 10} = 8 THEN 'rare' ELSE 'often' END, n FROM {source} WHERE n % 4 = 0
        UNION ALL SELECT 'default', 'early', n FROM {source} WHERE n % 2 = 0 AND n <= {many // 10};
        INSERT INTO genba.schedule (id, namespace, name, task, args, definition)
        VALUES (1, 'default', 'nightly', 'shop.pay', NO_ARGS, '{{}}')
    """
    with connection(url) as conn:
        for statement in text.split(";"):
            conn.execute(spoken(url, statement))
        conn.execute("ANALYZE")


PAGES: dict[str, dict[str, Any]] = {
    "any state": {},
    "open": {"states": OPEN},
    "failed": {"states": frozenset({"failed"})},
    "succeeded": {"states": frozenset({"succeeded"})},
    "text in the error": {"states": frozenset({"failed"}), "tasks": ["shop.pay"], "error": "50%"},
    "a text in no error": {"error": "never"},
    "a frequent task": {"tasks": ["shop.pay"]},
    "a rare task": {"tasks": ["shop.report"]},
    "a task that never ran": {"tasks": ["shop.never"]},
    "a rare queue": {"queues": ["slow"]},
    "queue and task": {"queues": ["default"], "tasks": ["shop.mail", "shop.report"]},
    "a frequent tag": {"tags": ["often"]},
    "a tag of old jobs only": {"tags": ["early"]},
    "two tags, some have both": {"tags": ["early", "often"]},
    "a rare tag": {"tags": ["rare"]},
    "a frequent tag of those that failed": {"tags": ["often"], "states": frozenset({"failed"})},
    "a frequent tag of a frequent task": {"tags": ["often"], "tasks": ["shop.mail"]},
    "a frequent tag of a rare task": {"tags": ["often"], "tasks": ["shop.report"]},
    "a frequent tag of the last hour": {"tags": ["often"], "since": START + TIMES - DAY // 24},
    "a key": {"keys": ["key 4200"]},
    "a schedule": {"schedules": ["nightly"]},
    "a parent": {"parents": [10_000]},
    "a node": {"nodes": ["here"]},
    "the last hour": {"since": START + TIMES - DAY // 24},
    "the last three days": {"since": START + 4 * DAY},
    "longer ago than a day": {"until": START + 6 * DAY},
    "longer ago than six days": {"until": START + DAY},
    "one hour, three days ago": {"since": START + 4 * DAY, "until": START + 4 * DAY + DAY // 24},
    "a rare task of the last day": {"since": START + 6 * DAY, "tasks": ["shop.report"]},
}


def plan_of(store: Store, filter: Filter) -> str:
    text, values = store.search._page_of_ids(filter, 50)
    with store._db.statement() as tx:
        return str(
            tx.select(
                f"EXPLAIN {'QUERY PLAN ' if store.parallel_writers == 1 else ''}{text}", **values
            )
        )


def test_a_page_walks_no_table_whatever_is_asked(store, url):
    """Each question by an index that has little else than what it asks for, or along the key."""
    fill(url, 20_000)
    wanted = {
        "open": ("job_claim", "job_parked", "job_due", "job_running"),
        "failed": ("job_rare",),
        "text in the error": ("job_rare",),
        "a rare task": ("job_done",),
        "a rare queue": ("job_done",),
        "a key": ("job_key",),
        "a parent": ("job_parent",),
        "a schedule": ("job_made",),
    }
    for name, given in PAGES.items():
        for oldest_first in (False, True):
            plan = plan_of(store, Filter(**given, oldest_first=oldest_first))
            for index in wanted.get(name, ()):
                assert index in plan, (name, plan)
            if name.startswith(
                ("a frequent tag", "two tags")
            ):  # of a small table: to read it whole is right
                continue
            assert "Seq Scan on job" not in plan, (name, plan)
            # Along the key is right; all of them in another order, to be sorted, is not.
            sorts = re.search(
                r"(SCAN genba_job|genba_job_done \(namespace=\?\))'\), \([^']*'USE TEMP B-TREE",
                plan,
            )
            assert sorts is None, (name, plan)


@pytest.mark.parametrize("few", [5_000, 10])
def test_the_pages_of_a_large_table_are_right(store, url, few, monkeypatch):
    """What the indexes, the kinds, the tags and the ranges of ids give is what a walk over all would give."""
    monkeypatch.setattr("genba.storage.jobs.search.FEW", few)
    fill(url, 2_000)
    every = {job.id: job for job in store.search.jobs(Filter(), 5_000)}
    tags = set(rows(url, "SELECT job_id, name FROM genba.tag"))
    fits = {
        "states": lambda job, some: job.state in some,
        "tasks": lambda job, some: job.task in some,
        "queues": lambda job, some: job.queue in some,
        "tags": lambda job, some: any((job.id, name) in tags for name in some),
        "keys": lambda job, some: job.key in some,
        "parents": lambda job, some: job.parent_id in some,
        "schedules": lambda job, some: job.schedule_id is not None,
        "nodes": lambda job, some: False,
        "since": lambda job, moment: job.created_at >= moment,
        "until": lambda job, moment: job.created_at < moment,
        "error": lambda job, text: job.error is not None and text in job.error,
    }
    assert len(every) == 2_000
    for name, given in PAGES.items():
        expected = [
            id for id in every if all(fits[key](every[id], value) for key, value in given.items())
        ]
        assert store.search.count(Filter(**given)) == len(expected), name
        assert store.search.ids(Filter(**given), 5_000) == expected, name
        assert (
            store.search.ids(Filter(**given, last_id=700), 20)
            == [id for id in expected if id < 700][:20]
        ), name
        oldest = store.search.ids(Filter(**given, last_id=700, oldest_first=True), 20)
        assert oldest == [id for id in reversed(expected) if id > 700][:20], name


def slowest_pages(store: Store, url: str, many: int) -> dict[str, float]:
    """The 95th percentile of the seconds that each question takes, for pages all over the table."""
    fill(url, many)
    took: dict[str, float] = {}
    for name, given in PAGES.items():
        times = []
        first = [None] * 5  # a page that is looked at most counts more
        pages = [
            (last, oldest)
            for oldest in (False, True)
            for last in (*first, *range(many, 0, -many // 40))
        ]
        for last, oldest in pages:
            before = time.perf_counter()
            store.search.jobs(Filter(**given, last_id=last, oldest_first=oldest), 50)
            times.append(time.perf_counter() - before)
        took[name] = sorted(times)[int(len(times) * 0.95)]
    return took


@pytest.mark.soak
def test_a_page_among_five_million_takes_less_than_a_fifth_of_a_second(store, url):
    took = slowest_pages(store, url, 5_000_000)
    print(*(f"{1000 * seconds:7.1f} ms  {name}" for name, seconds in took.items()), sep="\n")
    assert max(took.values()) < 0.2, took
