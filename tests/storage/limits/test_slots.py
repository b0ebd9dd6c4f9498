"""Slots of buckets: never more than n, handed on in order, and freed with the attempt."""

from __future__ import annotations

import pytest
from tests.storage.builders import (
    CLAIM,
    TASK,
    a_job,
    after,
    claimed,
    connection,
    ending,
    enqueued,
    joined,
    loss,
    one,
    rows,
    settle,
    state,
    success,
    together,
    transaction,
)

from genba.domain.limits import LimitRule, needs_of
from genba.errors import BadOption, TaskFull
from genba.reports.explain import explain
from genba.storage.limits.queueing import PARKED_ON_LIMIT

SECOND = 1_000_000


def limited(n=1, bucket="b", *more, ordered=False, **given):
    rules = (LimitRule(bucket, n, ordered), *more)
    return {"needs": needs_of(rules, {}), "rules": rules, **given}


def rated(n, per, burst=None, **given):
    rules = (LimitRule("rate r", n, False, per, burst),)
    return {"needs": needs_of(rules, {}), "rules": rules, **given}


def taken(url):
    return dict(rows(url, "SELECT name, taken FROM genba.bucket"))


def done(store, jobs):
    assert store.finish(1, [success(job) for job in jobs]) == {job.id for job in jobs}


def go(store, count=64):
    return claimed(store, count)


def parked(store, ids):
    return [store.job(id).parked_on for id in ids]


def test_no_more_than_n_jobs_of_a_bucket_can_be_claimed(store, url):
    joined(store)
    ids = enqueued(store, 5, **limited(2))

    assert [job.id for job in go(store)] == ids[:2]
    assert parked(store, ids) == [None, None, *[PARKED_ON_LIMIT + "b"] * 3]
    assert taken(url) == {"b": 2}


def test_the_transaction_that_frees_a_slot_hands_it_to_the_head_of_the_line(store, url):
    joined(store)
    ids = enqueued(store, 4, **limited(2))
    first = go(store)

    done(store, first[:1])

    assert [job.id for job in go(store)] == [ids[2]]
    assert taken(url) == {"b": 2}


def test_a_finish_and_the_next_claim_of_the_same_bucket_are_one_commit(store):
    joined(store)
    ids = enqueued(store, 3, **limited(1))
    (first,) = go(store)

    _, jobs = store.claims.finish_and_claim(1, CLAIM, [success(first)], {"default": 8}, [TASK])

    assert [job.id for job in jobs] == [ids[1]]


@pytest.mark.parametrize("end", ["failed", "held", "scheduled", "cancelled"])
def test_every_end_of_an_attempt_frees_the_slot(store, end):
    joined(store)
    ids = enqueued(store, 2, **limited(1))
    (job,) = go(store)

    store.end(1, [ending(job, end, due_at=2**60 if end == "scheduled" else None)])

    assert [job.id for job in go(store)] == [ids[1]]


def test_a_released_job_takes_its_slot_again_before_those_behind_it(store):
    joined(store)
    ids = enqueued(store, 2, **limited(1))
    (job,) = go(store)

    store.end(1, [ending(job, "waiting", "drain", happened=False)])

    assert [job.id for job in go(store)] == [ids[0]]


def test_a_retry_waits_for_a_slot_like_any_other(store, clock):
    joined(store)
    ids = enqueued(store, 2, **limited(1))
    (job,) = go(store)
    store.end(1, [ending(job, "scheduled", due_at=clock.now() + SECOND)])
    (second,) = go(store)
    clock.advance(2)

    assert store.promote() == 1
    assert go(store) == []
    done(store, [second])

    assert [job.id for job in go(store)] == [ids[0]]


def test_a_cancelled_job_gives_its_slot_to_the_next(store, url):
    joined(store)
    ids = enqueued(store, 3, **limited(1))

    store.cancel(ids[0], None)

    assert [job.id for job in go(store)] == [ids[1]]
    assert taken(url) == {"b": 1}


def test_one_that_leaves_the_line_frees_nothing(store, url):
    joined(store)
    ids = enqueued(store, 3, **limited(1))

    store.cancel(ids[1], None)
    store.hold(ids[2], "why")

    assert taken(url) == {"b": 1}
    assert len(go(store)) == 1
    assert go(store) == []


def test_a_held_job_frees_its_slot_and_takes_one_when_it_is_resumed(store):
    joined(store)
    ids = enqueued(store, 2, **limited(1))
    store.hold(ids[0], "why")

    (job,) = go(store)
    assert job.id == ids[1]
    store.resume(ids[0])
    assert go(store) == []
    done(store, [job])

    assert [job.id for job in go(store)] == [ids[0]]


def test_a_requeued_job_needs_a_slot_again(store, url):
    joined(store)
    ids = enqueued(store, 2, **limited(1))
    done(store, go(store))
    (second,) = go(store)

    store.requeue(ids[0])

    assert go(store) == []
    done(store, [second])
    assert [job.id for job in go(store)] == [ids[0]]
    assert taken(url) == {"b": 1}


def test_a_job_that_waited_for_another_needs_a_slot_when_it_may_start(store):
    joined(store)
    parent = one(store)
    (job,) = go(store)
    child = one(store, after=after(parent), **limited(1))
    other = one(store, **limited(1))
    done(store, [job])
    settle(store)

    assert [job.id for job in go(store)] == [other]
    assert state(store, child) == "waiting"


def test_what_a_dead_node_ran_frees_its_slots(store):
    joined(store)
    ids = enqueued(store, 2, **limited(1))
    go(store)
    joined(store, 2)

    assert store.nodes.declare_dead(1, loss) == [ids[0]]

    (job,) = claimed(store, 8, node=2)
    assert job.id == ids[0]


def test_an_expired_job_frees_its_slot(store, clock):
    joined(store)
    one(store, expires_in=SECOND, **limited(1))
    other = one(store, **limited(1))
    clock.advance(2)

    assert store.expire() == 1
    assert [job.id for job in go(store)] == [other]


def test_a_job_gets_all_its_slots_or_none(store, url):
    joined(store)
    a = LimitRule("a", 1)
    first = one(store, needs=needs_of((a,), {}), rules=(a,))
    both = one(store, **limited(1, "b", a))
    lone = one(store, **limited(1))

    assert [job.id for job in go(store)] == [first, lone]
    assert taken(url) == {"a": 1, "b": 1}
    assert store.job(both).parked_on in (PARKED_ON_LIMIT + "a", PARKED_ON_LIMIT + "b")


def test_a_job_with_two_limits_starts_when_the_last_one_has_room(store, url):
    joined(store)
    a = LimitRule("a", 1)
    one(store, needs=needs_of((a,), {}), rules=(a,))
    one(store, **limited(1))
    both = one(store, **limited(1, "b", a))
    x, y = go(store)

    done(store, [y])
    assert go(store) == []
    done(store, [x])

    assert [job.id for job in go(store)] == [both]
    assert taken(url) == {"a": 1, "b": 1}


def test_higher_priority_gets_the_slot_first(store):
    joined(store)
    one(store, **limited(1))
    low = one(store, **limited(1))
    high = one(store, priority=5, **limited(1))
    first = go(store)
    done(store, first)
    second = go(store)
    done(store, second)

    assert [second[0].id, go(store)[0].id] == [high, low]


def test_a_stripe_runs_in_the_order_of_enqueue_whatever_the_priority(store):
    joined(store)
    ids = [one(store, priority=p, **limited(1, "s", ordered=True)) for p in (0, 5, 9)]
    seen = []
    while jobs := go(store):
        assert len(jobs) == 1
        seen.append(jobs[0].id)
        done(store, jobs)

    assert seen == ids


@pytest.mark.parametrize("end", ["scheduled", "held", "waiting"])
def test_the_head_of_a_stripe_keeps_its_place_when_it_must_come_back(store, clock, end):
    joined(store)
    ids = enqueued(store, 3, **limited(1, "s", ordered=True))
    (job,) = go(store)
    store.end(1, [ending(job, end, due_at=clock.now() + SECOND if end == "scheduled" else None)])

    if end != "waiting":
        assert go(store) == []
    clock.advance(2)
    store.promote()
    store.resume(ids[0])

    for id in ids:
        jobs = go(store)
        assert [job.id for job in jobs] == [id]
        done(store, jobs)


def test_one_of_a_stripe_that_is_held_in_the_line_is_not_passed(store):
    joined(store)
    ids = enqueued(store, 3, **limited(1, "s", ordered=True))
    store.hold(ids[1], "why")

    done(store, go(store))
    assert go(store) == []
    store.resume(ids[1])

    assert [job.id for job in go(store)] == [ids[1]]


def test_a_stripe_goes_on_when_its_head_is_cancelled(store):
    joined(store)
    ids = enqueued(store, 3, **limited(1, "s", ordered=True))
    store.hold(ids[0], "why")
    assert go(store) == []

    store.cancel(ids[0], None)

    assert [job.id for job in go(store)] == [ids[1]]


def test_the_turn_in_a_stripe_is_kept_while_another_limit_is_waited_for(store):
    joined(store)
    gpu = LimitRule("gpu", 1)
    one(store, needs=needs_of((gpu,), {}), rules=(gpu,))
    head = one(store, **limited(1, "s", gpu, ordered=True))
    one(store, **limited(1, "s", ordered=True))
    (lone,) = go(store)

    assert go(store) == []
    done(store, [lone])

    assert [job.id for job in go(store)] == [head]


def test_a_rate_lets_its_burst_go_and_then_one_at_a_time(store, clock):
    joined(store)
    ids = enqueued(store, 5, **rated(2, SECOND))

    first = go(store)
    assert [job.id for job in first] == ids[:2]
    done(store, first)
    assert go(store) == []
    assert store.nodes.due_work(1, ["default"], [TASK]).next_ripe == clock.now() + SECOND // 2
    clock.advance(0.5)
    assert store.limits.serve_due_rates() == clock.now() + SECOND // 2

    assert [job.id for job in go(store)] == ids[2:3]


def test_starts_that_a_rate_allows_do_not_pile_up_while_they_are_unused(store, clock):
    joined(store)
    enqueued(store, 20, **rated(2, SECOND))
    for _ in range(20):
        clock.advance(1)
        store.limits.serve_due_rates()

    assert len(go(store)) == 2


def test_an_operators_n_holds_at_once_and_stops_no_running_job(store, url):
    joined(store)
    enqueued(store, 6, **limited(3))
    jobs = go(store)
    store.operators.set_limit("b", 1, "a test")

    done(store, jobs[:2])
    assert go(store) == []
    store.operators.set_limit("b", 4, "a test")
    assert len(go(store)) == 3
    store.operators.set_limit("b", None, "a test")

    assert store.limits.rules()["b"] == (3, None)
    with pytest.raises(BadOption, match="no limit 'x'"):
        store.operators.set_limit("x", 1, "a test")


def test_jobs_of_the_callers_own_transaction_get_their_slots_after_its_commit(store, url, clock):
    joined(store)
    with transaction(url) as conn:
        made = store.enqueue([a_job(**limited(1)), a_job(**limited(1))], conn)
        conn.execute("COMMIT")
    assert go(store) == []
    assert store.nodes.due_work(1, ["default"], [TASK]).recheck

    assert store.limits.recheck() == 1

    assert [job.id for job in go(store)] == [made[0].id]


def test_an_unclaimed_slot_goes_to_a_job_of_another_queue(store, clock):
    joined(store, queues=("default", "fast"))
    slow = one(store, **limited(1))
    fast = one(store, queue="fast", **limited(1))
    clock.advance(0.5)
    store.limits.sweep()
    assert store.claim(1, CLAIM, {"fast": 1}, [TASK]) == []
    clock.advance(1)

    store.limits.sweep()

    (job,) = store.claim(1, CLAIM, {"fast": 1}, [TASK])
    assert job.id == fast
    assert go(store) == []
    done(store, [job])
    assert [job.id for job in go(store)] == [slow]


def test_the_slot_of_a_job_that_no_node_can_run_goes_to_the_next(store, clock, url):
    joined(store)
    unknown = one(store, task="x.y", **limited(1))
    known = one(store, **limited(1))
    store.parked.park_unknown("default", [TASK])
    clock.advance(2)

    store.limits.sweep()
    (job,) = go(store)
    assert job.id == known
    assert store.parked.unpark(["unknown task x.y"]) == 1
    assert store.job(unknown).parked_on == PARKED_ON_LIMIT + "b"
    assert taken(url) == {"b": 1}


def test_the_sweep_finds_a_line_that_was_forgotten(store, url):
    joined(store)
    enqueued(store, 2, **limited(1))
    jobs = go(store)
    done(store, jobs)
    go(store)
    with transaction(url) as conn:
        prefix = "genba_" if url.startswith("sqlite") else "genba."
        conn.execute(f"UPDATE {prefix}bucket SET taken = 0")
        conn.execute("COMMIT")
    third = one(store)
    assert third
    late = one(store, **limited(1))

    store.limits.sweep()

    assert late in [job.id for job in go(store)]


def test_unused_buckets_are_forgotten(store, url):
    joined(store)
    enqueued(store, 2, **limited(1))
    assert store.limits.prune() == 0
    done(store, go(store))
    done(store, go(store))

    assert store.limits.prune() == 1
    assert taken(url) == {}


def test_max_waiting_refuses_a_batch_as_a_whole_and_never_what_comes_back(store):
    joined(store)
    capped = {"capped": True, "max_waiting": 2}
    first = one(store, **capped)
    with pytest.raises(TaskFull, match="1 jobs wait already, and max_waiting is 2; 2 more"):
        store.enqueue([a_job(**capped), a_job(**capped)])
    one(store, **capped)
    with pytest.raises(TaskFull):
        one(store, **capped)
    (job, *_) = go(store, 1)
    one(store, **capped)

    store.end(1, [ending(job, "waiting", "drain", happened=False)])

    assert state(store, first) == "waiting"
    one(store, capped=True)
    with pytest.raises(TaskFull):
        one(store, **capped)


def test_max_waiting_holds_for_many_enqueues_at_once(store):
    def enqueue(_):
        try:
            return one(store, capped=True, max_waiting=5)
        except TaskFull:
            return None

    store.install()
    assert sum(made is not None for made in together(12, enqueue)) == 5


def test_a_call_that_returns_an_open_job_is_not_refused(store):
    capped = {"capped": True, "max_waiting": 1, "identity": "same"}

    assert one(store, **capped) == one(store, **capped)


def test_a_running_job_takes_slots_of_buckets_named_at_run_time(store, url):
    joined(store)
    enqueued(store, 2)
    one_job, other = go(store)
    with store._db.transaction() as tx:
        assert store.limits.take(tx, one_job.id, {"x": 1, "y": 2}) is None
    with store._db.transaction() as tx:
        assert store.limits.take(tx, other.id, {"x": 1, "y": 2}) == "x"
        store.attempts.end(tx, 1, [ending(other, "waiting", "drain", happened=False)])
        store.limits.wait_for(tx, other.id, {"x": 1})
    assert taken(url) == {"x": 1, "y": 1}
    assert go(store) == []

    done(store, [one_job])

    assert taken(url) == {"x": 1, "y": 0}
    (again,) = go(store)
    assert again.id == other.id
    with store._db.transaction() as tx:
        store.limits.give_back(tx, other.id, {"x"})
    assert taken(url) == {"x": 0, "y": 0}


def test_a_limit_shows_the_holder_of_the_slot_and_the_jobs_before(store):
    joined(store)
    ids = enqueued(store, 4, **limited(1))
    go(store)

    record = store.job(ids[3])
    line = store.limits.line(record.id, record.rank, record.parked_on)

    assert (line.bucket, line.n, line.ahead) == ("b", 1, 2)
    assert [(holder.job, holder.node) for holder in line.holders] == [(ids[0], "node-1")]


def test_many_ends_and_enqueues_at_once_never_exceed_the_limit(store, url):
    """Threads with connections of their own; every one of them sees at most n running."""
    joined(store)
    names = [f"b{i}" for i in range(4)]

    def work(i):
        worst = 0
        for round in range(12):
            given = [
                limited(2, names[(i + round + k) % 4], LimitRule(names[(i + k) % 4], 2))
                for k in range(3)
            ]
            store.enqueue([a_job(**one_given) for one_given in given])
            jobs = store.claim(1, CLAIM, {"default": 2}, [TASK])
            over = [held for held in taken(url).values() if held > 2]
            worst = max([worst, *over])
            store.finish(1, [success(job) for job in jobs])
        return worst

    def still() -> list:
        return list(rows(url, "SELECT id FROM genba.job WHERE parked_on IS NOT NULL"))

    assert together(4, work) == [0] * 4
    for _ in range(400):
        store.limits.recheck()
        store.limits.sweep()
        jobs = go(store)
        store.finish(1, [success(job) for job in jobs])
        if not jobs and not still():
            break
    assert set(taken(url).values()) == {0}
    assert still() == []


def test_jobs_that_are_steered_in_bulk_free_and_take_slots_too(store, url, clock):
    joined(store)
    ids = enqueued(store, 4, **limited(1))

    assert store.bulk.hold(ids[:1], "why") == 1
    assert store.bulk.delete(ids[1:2]) == 1
    assert store.bulk.change(ids[2], {"due_at": clock.now() + SECOND}, lambda old: old)
    assert taken(url) == {"b": 1}
    assert [job.id for job in go(store)] == [ids[3]]
    store.bulk.resume(ids[:1])
    clock.advance(2)
    store.promote()

    assert go(store) == []
    assert taken(url) == {"b": 1}


def test_a_job_that_moves_on_to_the_line_of_a_rate_starts_when_that_is_ripe(store, clock):
    joined(store)
    rate = LimitRule("rate r", 1, False, SECOND, 1)
    enqueued(store, 1, **rated(1, SECOND, 1))
    done(store, go(store))
    enqueued(store, 1, **limited(1))
    first = go(store)
    (id,) = enqueued(store, 1, **limited(1, "b", rate))

    done(store, first)
    assert parked(store, [id]) == [PARKED_ON_LIMIT + "rate r"]
    clock.advance("1s")
    store.limits.serve_due_rates()

    assert [job.id for job in go(store)] == [id]


def test_a_limit_of_none_lets_none_start_until_it_is_raised(store):
    joined(store)
    ids = enqueued(store, 3, **limited(0))

    assert go(store) == []
    assert 'bucket "b" lets none start (its n is 0), 2nd in line' in str(
        explain(store, store.job(ids[1]))
    )
    store.operators.set_limit("b", 2, "a test")
    assert [job.id for job in go(store)] == ids[:2]


def test_lines_that_were_forgotten_are_found_some_at_a_time(store, url, monkeypatch):
    monkeypatch.setattr("genba.storage.limits.slots.LINES_PER_SWEEP", 2)
    joined(store)
    first = [id for name in "abcde" for id in enqueued(store, 1, **limited(1, name))]
    ids = [id for name in "abcde" for id in enqueued(store, 1, **limited(1, name))]
    with connection(url) as conn:  # as no caller of the store can do it
        table = "genba.bucket" if url.startswith("postgres") else "genba_bucket"
        conn.execute(f"UPDATE {table} SET taken = 0")

    waiting = []
    for _ in range(4):
        store.limits.sweep()
        waiting.append(len([line for line in parked(store, ids) if line]))

    assert waiting == [3, 1, 0, 0]
    assert {job.id for job in go(store)} == {*first, *ids}
