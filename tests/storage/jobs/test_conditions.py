"""Jobs with conditions wait outside of the claim index until one of them is sent to be asked for all."""

from __future__ import annotations

import pytest
from tests.storage.builders import (
    HOUR,
    SECOND,
    TASK,
    a_job,
    claimed,
    ending,
    joined,
    one,
    rows,
    states,
)

from genba.domain.limits import LIMIT, LimitRule, SlotNeed
from genba.storage.jobs.conditions import (
    ConditionAnswer,
    SlotRequest,
    check_key,
    pause_after_checks,
)

READY = ("shop.open",)
OPTIONS = '{"ready":["shop.open"]}'


@pytest.fixture(autouse=True)
def _node(store):
    joined(store)


def asking(store, count=1, **given):
    jobs = [a_job(ready=READY, options=OPTIONS, **given) for _ in range(count)]
    return [made.id for made in store.enqueue(jobs)]


def key(args=b"{}"):
    return check_key(TASK, READY, args, OPTIONS)


def no(job, **changes):
    gone = ending(job, "waiting", "not ready", happened=False, quiet=True)
    return ConditionAnswer(
        ending=gone,
        key=key(job.args),
        task=TASK,
        conditions=READY,
        **{"said": "shop.open", **changes},
    )


def scout(store):
    store.conditions.send_scouts()
    (job,) = claimed(store, 8)
    return job


def test_jobs_that_ask_the_same_send_one_of_them(store):
    first, *_ = asking(store, 3)
    other = asking(store, args=b'{"x":1}')
    assert claimed(store) == []

    assert store.conditions.send_scouts()[0] == 2

    assert [job.id for job in claimed(store, 8)] == [first, *other]


def test_a_no_leaves_no_trace_and_is_looked_at_again_later_and_later(store, clock, url):
    (id,) = asking(store)
    for pause in (1, 2, 4, 8, 16, 32, 60, 60):
        job = scout(store)
        assert job.attempt == 1
        store.conditions.record_answers(1, [no(job)])
        record = store.job(id)
        assert (record.state, record.attempt, record.parked_on) == (
            "waiting",
            0,
            f"question {key()}",
        )
        assert store.conditions.check(key()).look_at == clock.now() + pause * SECOND
        assert store.conditions.send_scouts()[0] == 0
        clock.advance(pause)
    assert store.attempts_of(id) == []
    assert rows(url, "SELECT count(*) FROM genba.event")[0][0] == 2  # a node and a job have come


def test_the_pause_grows_to_a_minute():
    assert [pause_after_checks(looks) // SECOND for looks in (0, 1, 5, 6, 1000)] == [
        1,
        2,
        32,
        60,
        60,
    ]


def test_wait_says_itself_when(store, clock):
    asking(store)
    store.conditions.record_answers(1, [no(scout(store), wait=HOUR)])
    assert store.conditions.check(key()).look_at == clock.now() + HOUR


def test_a_newcomer_is_worth_a_look_within_a_second(store, clock):
    asking(store)
    store.conditions.record_answers(1, [no(scout(store), wait=HOUR)])
    asking(store)
    assert store.conditions.check(key()).look_at == clock.now() + SECOND


def test_a_yes_lets_all_start_and_leaves_nothing_behind(store):
    ids = asking(store, 5)
    job = scout(store)

    assert store.conditions.open(key()) == 4

    assert [job.id, *(other.id for other in claimed(store, 8))] == ids
    assert store.conditions.check(key()) is None


def test_five_errors_in_a_row_hold_all_jobs_with_the_same_condition(store, clock, url):
    ids = asking(store, 3)
    for _ in range(5):
        assert set(states(store, ids)) == {"waiting"}
        store.conditions.record_answers(1, [no(scout(store), error="RuntimeError: no")])
        clock.advance(120)

    assert set(states(store, ids)) == {"held"}
    assert (
        store.job(ids[0]).reason == "condition shop.open raised 5 times in a row: RuntimeError: no"
    )
    assert rows(url, "SELECT count(*) FROM genba.event WHERE kind = 'condition_failed'")[0][0] == 5
    store.resume(ids[0])
    (job,) = claimed(store)
    store.conditions.record_answers(1, [no(job)])
    assert store.conditions.check(key()).raised == 0


def test_an_answer_between_raises_begins_the_count_anew(store, clock):
    asking(store)
    for error in ("boom", "boom", None, "boom", "boom", "boom", "boom"):
        store.conditions.record_answers(1, [no(scout(store), error=error)])
        clock.advance(120)
    assert store.conditions.check(key()).raised == 4


def test_a_scout_that_is_not_claimed_is_not_followed_by_others(store, clock):
    asking(store, 3)
    assert store.conditions.send_scouts()[0] == 1
    clock.advance(10)

    store.conditions.send_scouts()

    assert len(claimed(store, 8)) == 1


def test_a_scout_that_was_cancelled_is_followed_by_the_next(store, clock):
    first, second = asking(store, 2)
    store.conditions.send_scouts()
    store.cancel(first, None)
    clock.advance(10)

    assert scout(store).id == second


def test_a_job_that_was_cancelled_while_it_was_asked_is_cancelled(store):
    (id,) = asking(store)
    job = scout(store)
    store.cancel(id, "not needed")

    store.conditions.record_answers(1, [no(job)])

    assert (store.job(id).state, store.job(id).parked_on) == ("cancelled", None)


def test_a_condition_without_jobs_is_forgotten(store):
    (id,) = asking(store)
    store.cancel(id, None)
    assert store.conditions.send_scouts() == (0, None)
    assert store.conditions.check(key()) is None


def test_a_condition_that_a_node_does_not_know_parks_on_its_name(store):
    (id,) = asking(store)
    store.conditions.record_answers(1, [no(scout(store), unknown="shop.open")])
    assert store.job(id).parked_on == "unknown condition shop.open"
    assert store.parked.unpark(["unknown condition shop.open"]) == 1


def test_a_job_that_is_not_due_yet_is_asked_for_when_it_is(store, clock):
    (id,) = asking(store, delay=HOUR)
    assert store.conditions.send_scouts() == (0, None)
    clock.advance("1h")
    store.promote()

    (job,) = claimed(store)
    store.conditions.record_answers(1, [no(job)])

    assert store.job(id).parked_on == f"question {key()}"


def test_an_answer_of_a_node_that_lost_the_job_counts_for_nothing(store):
    (id,) = asking(store)
    job = scout(store)
    store.end(1, [ending(job, "failed")])

    store.conditions.record_answers(1, [no(job)])

    assert store.job(id).state == "failed"


def test_plain_jobs_are_not_asked(store):
    one(store)
    assert store.conditions.send_scouts() == (0, None)


# slots: those of limits come before the question, those of limit_to after it


def limited(store, count=1):
    rule = LimitRule("gpu", 1)
    jobs = [
        a_job(ready=READY, options=OPTIONS, needs=(SlotNeed("gpu", "gpu", LIMIT),), rules=(rule,))
        for _ in range(count)
    ]
    return [made.id for made in store.enqueue(jobs)]


def taken(url, name):
    found = rows(url, f"SELECT taken FROM genba.bucket WHERE name = '{name}'")
    return found[0][0] if found else 0


def test_a_slot_is_held_only_while_its_job_is_asked(store, url, clock):
    first, second = limited(store, 2)
    (job,) = claimed(store, 8)
    assert (job.id, taken(url, "gpu")) == (first, 1)

    store.conditions.record_answers(1, [no(job)])

    (other,) = claimed(store, 8)  # the slot went on to the next in line
    assert (other.id, taken(url, "gpu")) == (second, 1)
    store.conditions.record_answers(1, [no(other, shared=True)])
    assert taken(url, "gpu") == 0
    clock.advance(1)
    assert scout(store).id == first
    assert taken(url, "gpu") == 1
    store.conditions.open(key())
    assert (claimed(store, 8), store.job(second).parked_on) == ([], "limit gpu")


def test_limit_to_takes_the_slots_of_the_first_way_that_has_them(store, url):
    asking(store, 3)
    store.conditions.send_scouts()
    (first,) = claimed(store)
    store.conditions.open(key())
    second, third = claimed(store, 2)
    ways = ((("pay:a", 1),), (("pay:b", 1), ("pay", 5)))

    got = [
        store.conditions.take_slots(1, [SlotRequest(no(job), ways)])
        for job in (first, second, third)
    ]

    assert got == [{first.id}, {second.id}, set()]
    assert [taken(url, name) for name in ("pay:a", "pay:b", "pay")] == [1, 1, 1]
    assert (store.job(third.id).parked_on, store.job(third.id).attempt) == ("limit pay:a", 0)
    store.end(1, [ending(first, "failed")])
    (again,) = claimed(store)  # the freed slot is its own already
    assert again.id == third.id
    assert store.conditions.take_slots(1, [SlotRequest(no(again), ways)]) == {third.id}
    store.end(1, [ending(again, "failed"), ending(second, "failed")])
    assert [taken(url, name) for name in ("pay:a", "pay:b", "pay")] == [0, 0, 0]


def test_slots_are_not_taken_for_a_job_that_is_not_ours_any_more(store, url):
    asking(store)
    job = scout(store)
    store.end(1, [ending(job, "failed")])
    assert store.conditions.take_slots(1, [SlotRequest(no(job), ((("pay", 1),),))]) == set()
    assert taken(url, "pay") == 0
