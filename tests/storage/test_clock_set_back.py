"""The clock was set back: what was to happen soon happens soon, and what was asked for by its moment keeps it."""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

from tests.storage.builders import (
    CLAIM,
    a_job,
    claimed,
    ending,
    enqueued,
    finish,
    joined,
    one,
    running,
    state,
    states,
    success,
)
from tests.storage.limits.test_slots import limited, rated

from genba.client.job_options import update_options as update
from genba.domain.duration import DAY, HOUR, MINUTE, SECOND
from genba.domain.schedule import ScheduleRule
from genba.domain.verdict import AttemptEnd
from genba.options.snapshot import OptionsSnapshot
from genba.storage.jobs.judge import build_ending
from genba.storage.records import Edge
from genba.storage.schedules.rows import NewSchedule
from genba.storage.store import Store

PLAIN_RETRY, AT_ONCE = (
    OptionsSnapshot(retry={"times": 1, "delay": "7s"}),
    OptionsSnapshot(retry={"times": 1, "delay": 0}),
)


def waits(store, id):
    """How long it is until it may start."""
    return store.job(id).due_at - store.now()


def retried(store: Store, wait: int, **given: Any) -> int:
    job = running(store, **given)
    assert store.end(1, [ending(job, "scheduled", wait=wait)]) == {job.id}
    return job.id


def test_a_retry_waits_as_long_as_it_should_have(store, clock):
    joined(store)
    job = retried(store, 10 * SECOND)
    asked_for = one(store, due_at=clock.now() + HOUR)
    clock.set(clock.now() - DAY)

    assert store.clock_set_back.repair() == 1
    assert store.clock_set_back.repair() == 0  # another node has seen it, too
    assert waits(store, job) == 10 * SECOND
    assert waits(store, asked_for) == DAY + HOUR


def test_also_one_that_was_claimed_long_before_the_new_time(store, clock):
    joined(store)
    job = running(store)
    clock.advance("2h")
    store.end(1, [ending(job, "scheduled", wait=10 * SECOND)])
    clock.set(clock.now() - HOUR)

    assert store.clock_set_back.repair() == 1
    assert waits(store, job.id) == 10 * SECOND


def test_a_failure_that_is_written_after_the_clock_was_set_counts_by_the_new_time(store, clock):
    joined(store)
    job = running(store)
    old = clock.now()
    clock.set(old - DAY)  # the node has had no beat since, and believes that it is `old`

    store.end(
        1,
        [
            build_ending(
                job, CLAIM, PLAIN_RETRY, AttemptEnd(cause="exception", started=True), old, 0
            )
        ],
    )

    assert (state(store, job.id), waits(store, job.id)) == ("scheduled", 7 * SECOND)
    assert store.clock_set_back.repair() == 0


def test_so_does_one_that_is_tried_again_at_once(store, clock):
    joined(store)
    job = running(store)
    old = clock.now()
    clock.set(old - DAY)

    store.end(
        1, [build_ending(job, CLAIM, AT_ONCE, AttemptEnd(cause="exception", started=True), old, 0)]
    )
    one(store)

    assert [job.id for job in claimed(store)] == [job.id]  # before those that came after it


def test_what_its_code_has_asked_for_by_its_moment_keeps_it(store, clock):
    joined(store)
    job = running(store)
    store.end(1, [ending(job, "scheduled", due_at=clock.now() + HOUR)])
    clock.set(clock.now() - DAY)

    assert store.clock_set_back.repair() == 0
    assert waits(store, job.id) == DAY + HOUR


def test_delays_go_on_one_behind_the_other_and_none_is_early(store, clock):
    ids = []
    for _ in range(3):
        ids += enqueued(store, 300, delay=HOUR)
        clock.advance("1m")
    late, sooner = one(store, delay=HOUR), one(store, delay=MINUTE)
    clock.set(clock.now() - DAY)

    assert store.clock_set_back.repair() == 902
    assert [waits(store, id) for id in (ids[0], ids[300], ids[-1])] == [
        HOUR - n * MINUTE for n in (3, 2, 1)
    ]
    assert (waits(store, late), waits(store, sooner)) == (HOUR, MINUTE)


def test_a_delay_that_began_before_the_new_time_waits_no_longer_than_it_was(store, clock):
    id = one(store, delay=3 * HOUR)
    clock.advance("2h")
    clock.set(clock.now() - HOUR)

    assert store.clock_set_back.repair() == 0
    assert waits(store, id) == 2 * HOUR


def test_what_an_operator_has_put_off_waits_for_as_long_or_until_then(store, clock):
    zone = ZoneInfo("UTC")
    delayed, named, waiting = one(store), one(store), one(store)
    assert update(store, delayed, {"delay": "10s"}, zone)
    assert update(store, named, {"at": clock.now() // SECOND + 10}, zone)
    clock.set(clock.now() - DAY)

    assert store.clock_set_back.repair() == 1
    assert (waits(store, delayed), waits(store, named)) == (10 * SECOND, DAY + 10 * SECOND)
    assert update(store, waiting, {"priority": 3}, zone)
    assert state(store, waiting) == "waiting"  # nothing has set its moment


def test_children_and_held_jobs_do_not_wait_for_the_old_time(store, clock):
    joined(store)
    parent = one(store)
    after = (Edge(parent, "success"),)
    child, later = one(store, after=after), one(store, after=after, delay=HOUR)
    held = one(store)
    assert store.hold(held, "why")
    clock.set(clock.now() - DAY)

    finish(store, parent)
    store.settle()
    store.resume(held)
    assert states(store, [child, held, later]) == ["waiting", "waiting", "scheduled"]
    assert store.clock_set_back.repair() == 1
    assert waits(store, later) == HOUR


def test_a_requeued_job_does_not_either(store, clock):
    joined(store)
    id = one(store, due_at=clock.now() + SECOND)
    clock.advance("1s")
    store.promote()
    finish(store, id)
    store.requeue(id)
    assert store.hold(id, "why")
    clock.set(clock.now() - DAY)

    store.resume(id)
    assert state(store, id) == "waiting"


def test_a_waiting_job_is_not_overtaken_by_all_later_jobs(store, clock):
    joined(store)
    ids = enqueued(store, 3)
    clock.advance("1m")
    ids += enqueued(store, 2, queue="other", **limited(1))
    clock.set(clock.now() - DAY)

    assert store.clock_set_back.repair_ranks() == 5
    assert store.clock_set_back.repair_ranks() == 0
    clock.advance("1s")
    late, urgent = one(store), one(store, priority=1)
    assert [job.id for job in claimed(store, 64)] == [urgent, *ids[:3], late]


def test_the_jitter_of_a_tick_does_not_wait_for_the_old_time(store, clock):
    rule = ScheduleRule(cron="* * * * *", jitter=HOUR)
    store.schedules.put(NewSchedule(name="s", rule=rule, job=a_job(), said="s"))
    clock.advance("1m")
    store.ticks.fire()
    (run,) = store.schedules.open_runs(store.schedules.named("s").id)
    left = run.due_at - clock.now()
    clock.set(clock.now() - DAY)

    store.clock_set_back.repair()
    assert waits(store, run.id) == left > 0


def test_a_rate_goes_on_by_the_new_time(store, clock):
    joined(store)
    ids = enqueued(store, 5, **rated(2, SECOND))
    first = claimed(store, 64)
    store.finish(1, [success(job) for job in first])
    clock.set(clock.now() - DAY)
    assert store.limits.serve_due_rates() is not None
    assert claimed(store, 64) == []

    assert store.clock_set_back.repair() == 1
    assert store.clock_set_back.repair() == 0
    clock.advance("1s")
    store.limits.serve_due_rates()
    assert {job.id for job in claimed(store, 64)} <= set(ids[2:])
    assert len([id for id in ids if store.job(id).attempt]) in (
        3,
        4,
    )  # no more than it may be in a second
