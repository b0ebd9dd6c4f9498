"""Schedules in the store: ticks happen once, intervals always have one next run, and people may change their minds."""

from __future__ import annotations

from typing import Any

import pytest
from tests.storage.builders import (
    CLAIM,
    TASK,
    a_job,
    claimed,
    ending,
    joined,
    rows,
    state,
    success,
    together,
)

from genba.domain.duration import DAY, HOUR, MILLISECOND, MINUTE, SECOND
from genba.domain.schedule import ScheduleRule
from genba.errors import ScheduleNotFound, TaskDisabled
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import Maintenance
from genba.storage.records import Claimed, JobRecord
from genba.storage.schedules.rows import NewSchedule, ScheduleRecord
from genba.storage.schedules.schedules import BY_CODE, UNDECLARED_REASON
from genba.storage.store import Store

START = 1_767_225_600_000_000  # of the clock: 2026-01-01 00:00 UTC


def wanted(
    name: str = "s", args: bytes = b"{}", job: dict[str, Any] | None = None, **rule: Any
) -> NewSchedule:
    rule = {"overlap": "skip" if "every" in rule else "allow", **rule}
    return NewSchedule(
        name=name,
        rule=ScheduleRule(**rule),
        job=a_job(args=args, **(job or {})),
        said=repr(sorted(rule.items())),
    )


def made(store: Store, **rule: Any) -> ScheduleRecord:
    store.schedules.put(wanted(**rule))
    return store.schedules.named("s")


def runs(store: Store, name: str = "s") -> list[JobRecord]:
    """The open jobs of a schedule."""
    row = store.schedules.named(name)
    found = [store.job(run.id) for run in store.schedules.open_runs(row.id)]
    return [job for job in found if job is not None]


def due_after(store: Store) -> int:
    """When the only next run is due, after the start of the clock."""
    (job,) = runs(store)
    return job.due_at - START


def turn(store: Store) -> None:
    """Prune, as maintenance does."""
    while store.ticks.fire():
        pass
    store.promote()


def jobs_made(store: Store, url: str) -> list[int]:
    """The moments of all jobs that schedules have made, after the start of the clock."""
    ticks = rows(url, "SELECT moment FROM genba.tick WHERE job_id IS NOT NULL ORDER BY moment")
    return [row[0] - START for row in ticks]


def skips(store: Store, name: str = "s") -> list[tuple[str, int | None]]:
    row = store.schedules.named(name)
    return [
        (tick.skipped, tick.count)
        for tick in reversed(store.schedules.ticks(row.id, 1000))
        if tick.skipped
    ]


def run_one(store: Store, end: str = "succeeded") -> int:
    """Claims the run that waits, and ends it; its id."""
    (job,) = claimed(store)
    if end == "succeeded":
        assert store.finish(1, [success(job)]) == {job.id}
    else:
        assert store.end(1, [ending(job, end)]) == {job.id}
    return job.id


# cron


def test_a_cron_tick_makes_one_job_however_many_look(store, clock, url):
    made(store, cron="*/5 * * * *")
    turn(store)
    assert jobs_made(store, url) == []
    clock.advance("5m")
    for _ in range(3):
        turn(store)
    assert jobs_made(store, url) == [5 * MINUTE]
    (job,) = runs(store)
    assert (job.state, job.task, job.due_at) == ("waiting", TASK, START + 5 * MINUTE)
    clock.advance("5m")
    turn(store)
    assert jobs_made(store, url) == [5 * MINUTE, 10 * MINUTE]


@pytest.mark.parametrize(
    ("misfire", "expected"),
    [("once", [720]), ("all", list(range(720 - 99, 721))), ("skip", [720])],
)
def test_after_twelve_hours_without_a_node_a_schedule_runs_as_its_policy_says(
    store, clock, url, misfire, expected
):
    made(store, cron="* * * * *", misfire=misfire)
    clock.advance("12h")
    turn(store)
    assert jobs_made(store, url) == [minute * MINUTE for minute in expected]
    assert sum(count or 0 for _, count in skips(store)) == 720 - len(expected)
    turn(store)
    assert len(jobs_made(store, url)) == len(expected)


def test_missed_ticks_that_are_late_are_skipped_with_the_reason(store, clock, url):
    made(store, cron="0 * * * *", misfire="skip")
    clock.advance("3h20m")
    turn(store)
    assert jobs_made(store, url) == []
    assert skips(store) == [("missed: more than 10s late", 3)]


def test_grace_bounds_what_is_made_up_for(store, clock, url):
    made(store, cron="0 * * * *", misfire="all", grace=90 * MINUTE)
    clock.advance("4h20m")
    turn(store)
    assert jobs_made(store, url) == [3 * HOUR, 4 * HOUR]
    assert sum(count or 0 for _, count in skips(store)) == 2


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [("skip", ["running"]), ("queue", ["running", "blocked"]), ("allow", ["running", "waiting"])],
)
def test_overlap_says_what_becomes_of_a_tick_while_the_one_before_is_open(
    store, clock, overlap, expected
):
    joined(store)
    made(store, cron="* * * * *", overlap=overlap)
    clock.advance("1m")
    turn(store)
    (job,) = claimed(store)
    clock.advance("1m")
    turn(store)
    assert [each.state for each in runs(store)] == expected
    if overlap == "skip":
        assert skips(store) == [(f"job {job.id} of the tick before is running", 1)]
    if overlap == "queue":
        store.finish(1, [success(job)])
        store.settle()
        assert [each.state for each in runs(store)] == ["waiting"]


def test_start_until_and_max_runs_bound_a_schedule(store, clock, url):
    store.schedules.put(
        wanted("late", cron="0 * * * *", start=START + 3 * HOUR, until=START + 5 * HOUR)
    )
    store.schedules.put(wanted("few", cron="0 * * * *", max_runs=2))
    for _ in range(9):
        clock.advance("1h")
        turn(store)
    named = {one.name: one for one in store.schedules.all()}
    late = store.schedules.ticks(named["late"].id, 10)
    assert [tick.moment - START for tick in late] == [5 * HOUR, 4 * HOUR, 3 * HOUR]
    assert (named["few"].runs, named["few"].next_at) == (2, None)


def test_jitter_delays_each_run_within_its_bounds_and_the_same_for_all(store, clock):
    made(store, cron="0 * * * *", jitter=MINUTE)
    clock.advance("1h")
    turn(store)
    (job,) = runs(store)
    assert HOUR <= job.due_at - START <= HOUR + MINUTE
    assert job.moment == START + HOUR


def test_a_disabled_task_skips_its_ticks_and_tells_so_once_each(store, clock, url):
    joined(store)
    made(store, cron="* * * * *")
    with_conn(url, f"UPDATE genba.task SET enabled = {'false' if url.startswith('post') else '0'}")
    for _ in range(3):
        clock.advance("1m")
        turn(store)
    assert jobs_made(store, url) == []
    assert skips(store) == [(f"task {TASK} is disabled", 1)] * 3


def with_conn(url: str, statement: str) -> None:
    from tests.storage.builders import connection

    with connection(url) as conn:
        conn.execute(statement if url.startswith("post") else statement.replace("genba.", "genba_"))


def test_regression_18_retention_zero_and_a_restart_make_no_second_job_of_a_tick(store, clock, url):
    joined(store)
    made(store, cron="* * * * *")
    clock.advance("1m")
    turn(store)
    run_one(store)
    clock.advance("1s")
    assert store.prune(clock.now()) == 1
    clock.set(START + 30 * SECOND)  # and the clock is set back
    store.ticks.replan()
    clock.advance("31s")
    turn(store)
    assert jobs_made(store, url) == [MINUTE]


def test_regression_18_an_edit_takes_effect_for_the_next_minute(store, clock, url):
    made(store, cron="* * * * *")
    clock.advance("90s")
    turn(store)
    store.schedules.put(wanted(cron="*/10 * * * *"))
    clock.advance("9m")
    turn(store)
    assert jobs_made(store, url) == [MINUTE, 10 * MINUTE]


def test_a_schedule_deleted_and_made_again_within_its_minute_fires_once(store, clock, url):
    made(store, cron="* * * * *")
    clock.advance("61s")
    turn(store)
    store.schedules.delete("s")
    with pytest.raises(ScheduleNotFound):
        store.schedules.named("s")
    clock.set(START + 59 * SECOND)
    made(store, cron="* * * * *")
    clock.advance("3s")
    turn(store)
    assert jobs_made(store, url) == [MINUTE]


@pytest.mark.parametrize("jump", [-HOUR, HOUR, -DAY, DAY, 3653 * DAY])
def test_after_a_jump_of_the_clock_cron_is_back_within_a_minute_without_a_storm(
    store, clock, url, jump
):
    made(store, cron="* * * * *")
    for _ in range(3):
        clock.advance("1m")
        turn(store)
    old = {job.id for job in runs(store)}
    clock.set(clock.now() + jump)
    before = len(jobs_made(store, url))
    store.ticks.replan()
    turn(store)
    clock.advance("1m")
    turn(store)
    new = len(jobs_made(store, url)) - before
    assert 1 <= new <= 2  # what was missed, once; and the minute that has passed
    assert all(
        (job.moment or 0) <= job.due_at <= clock.now() for job in runs(store) if job.id not in old
    )


@pytest.mark.parametrize("damage", ["replace(definition, 'UTC', 'No/Where')", "'{}'", "'no JSON'"])
def test_a_schedule_that_cannot_be_read_is_paused_and_holds_up_nothing(store, clock, url, damage):
    for name in ("a", "b", "c"):
        store.schedules.put(
            NewSchedule(
                name=name, rule=ScheduleRule(cron="* * * * *", tz="Etc/UTC"), job=a_job(), said=name
            )
        )
    with_conn(url, f"UPDATE genba.schedule SET definition = {damage} WHERE name = 'b'")
    clock.advance("1m")
    turn(store)
    assert len(jobs_made(store, url)) == 2
    found = store.schedules.named("b")
    assert found.paused
    assert found.reason.startswith("it cannot be read: ")
    clock.advance("1m")
    turn(store)
    store.ticks.replan()
    assert len(jobs_made(store, url)) == 4
    store.schedules.delete("b")


def test_a_moment_between_the_jump_and_its_discovery_is_not_lost(store, clock, url):
    made(store, cron="* * * * *")
    clock.advance("1m")
    turn(store)
    clock.set(START - DAY + 59 * SECOND)
    clock.advance("3s")  # a keeper looks once a second
    assert store.ticks.replan(set_back=True) == 1
    turn(store)
    turn(store)
    assert jobs_made(store, url) == [-DAY + MINUTE, MINUTE]
    assert store.schedules.named("s").next_at == START - DAY + 2 * MINUTE


# intervals


@pytest.mark.parametrize("end", ["succeeded", "failed", "timed_out", "held"])
def test_regression_02_the_next_run_is_there_when_the_one_before_has_ended(store, clock, end):
    joined(store)
    made(store, every=HOUR)
    assert due_after(store) == 0
    clock.advance("10s")
    turn(store)
    first = run_one(store, end)
    left = [job for job in runs(store) if job.id != first]
    assert [(job.state, job.due_at - START) for job in left] == [("scheduled", HOUR + 10 * SECOND)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"every": HOUR}, HOUR + 20 * MINUTE),
        ({"every": HOUR, "reference": "start"}, HOUR),
        ({"every": 10 * MINUTE, "reference": "start"}, 20 * MINUTE),
        ({"every": HOUR, "base": START - 3 * DAY + 5 * MINUTE}, HOUR + 5 * MINUTE),
        (
            {"every": 5 * MINUTE, "base": START - 3 * DAY},
            25 * MINUTE,
        ),  # the end is a slot: that one is over
        ({"every": -1}, 20 * MINUTE),
    ],
)
def test_the_next_run_counts_from_end_start_or_base(store, clock, rule, expected):
    joined(store)
    made(store, **rule)
    if "base" in rule:  # its first run is a slot; go there, and let it take until 20 past
        first = due_after(store)
        clock.advance(first / SECOND)
        turn(store)
        (job,) = claimed(store)
        clock.set(START + 20 * MINUTE)
    else:
        turn(store)
        (job,) = claimed(store)
        clock.advance("20m")
    store.finish(1, [success(job)])
    assert due_after(store) == expected


@pytest.mark.parametrize("ahead", [0, 2 * DAY])
def test_an_interval_begins_at_its_base_and_waits_for_it_however_long(store, clock, ahead):
    made(store, every=HOUR, base=START + ahead)
    assert due_after(store) == ahead
    assert store.ticks.replan() == 0
    clock.advance(ahead / SECOND)
    joined(store)
    turn(store)
    run_one(store)
    assert due_after(store) == ahead + HOUR


def test_again_at_once_is_a_tenth_of_a_second_apart_and_backs_off_while_it_fails(store, clock):
    joined(store)
    made(store, every=-1)
    waits = []
    for end in ("succeeded", "failed", "failed", "failed", "succeeded"):
        turn(store)
        run_one(store, end)
        waits.append(due_after(store) - (clock.now() - START))
        clock.advance(waits[-1] / SECOND)
    assert waits == [MILLISECOND * each for each in (100, 200, 400, 800, 100)]


def test_an_interval_that_did_not_run_does_not_pile_up(store, clock, url):
    made(store, every=MINUTE)
    clock.advance("12h")
    turn(store)
    assert len(runs(store)) == 1


def test_a_run_that_is_cancelled_gives_way_to_the_next(store, clock):
    made(store, every=HOUR, start=START + HOUR)
    (job,) = runs(store)
    store.cancel(job.id, "not today")
    assert due_after(store) == 2 * HOUR
    store.schedules.end_series(job.schedule_id, job.id)
    with pytest.raises(ScheduleNotFound):
        store.schedules.named("s")


def test_a_run_that_expires_gives_way_to_the_next(store, clock):
    made(store, every=HOUR, grace=MINUTE, start=START + HOUR)
    clock.advance("2h")
    assert store.expire() == 1
    assert due_after(store) == 3 * HOUR


def test_regression_22_each_run_has_a_fresh_budget(store, clock):
    joined(store)
    made(store, every=HOUR, job={"options": '{"retry":{"times":2}}'})
    turn(store)
    (job,) = claimed(store)
    store.end(1, [ending(job, "failed", retries=2, crashes=1)])
    (following,) = runs(store)
    assert (following.retries, following.crashes, following.losses, following.attempt) == (
        0,
        0,
        0,
        0,
    )
    assert following.options == '{"retry":{"times":2}}'


def test_the_counts_of_a_run_survive_its_success(store, clock):
    joined(store)
    made(store, every=HOUR)
    turn(store)
    (job,) = claimed(store)
    store.end(1, [ending(job, "waiting", retries=2, crashes=1)])
    (again,) = claimed(store)
    store.finish(1, [success(again)])
    record = store.job(job.id)
    assert (record.state, record.retries, record.crashes, record.result) == (
        "succeeded",
        2,
        1,
        b"3",
    )


def test_a_held_run_that_is_resumed_does_not_start_a_second_series(store, clock):
    joined(store)
    made(store, every=HOUR)
    turn(store)
    held = run_one(store, "held")
    store.resume(held)
    run_one(store)
    assert len(runs(store)) == 1


def test_so_many_failures_in_a_row_pause_it(store, clock):
    joined(store)
    made(store, every=MINUTE, pause_after_failures=2)
    clock.advance("1h")
    turn(store)
    run_one(store, "failed")
    clock.advance("1h")
    turn(store)
    last = run_one(store, "failed")
    row = store.schedules.named("s")
    assert (bool(row.paused), row.reason) == (True, f"2 failures in a row, the last is job {last}")
    assert runs(store) == []
    store.schedules.resume("s")
    assert len(runs(store)) == 1


# people


def test_the_same_again_changes_nothing_and_other_words_change_the_future(store, clock):
    first = made(store, every=HOUR, start=START + HOUR)
    (job,) = runs(store)
    assert made(store, every=HOUR, start=START + HOUR) == first
    assert runs(store) == [job]
    made(store, every=HOUR, start=START + HOUR, args=b'{"x":1}')
    (changed,) = runs(store)
    assert (changed.args, changed.due_at) == (b'{"x":1}', job.due_at)
    assert store.job(job.id).reason == "schedule s was changed"
    made(store, every=10 * MINUTE)
    assert due_after(store) == 10 * MINUTE


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"every": 10}, {"every": 30}, 32),
        ({"every": 30}, {"every": 10}, 12),
        ({"every": 30}, {"every": 1}, 5),  # that would have been before now
        ({"every": 10}, {"every": 30, "reference": "start"}, 30),
        ({"every": 10, "reference": "start"}, {"every": 30}, 32),
        ({"every": 10}, {"every": 30, "start": START + 40 * SECOND}, 40),
        ({"every": 10}, {"every": 10, "misfire": "skip"}, 12),
        ({"every": 10, "base": START}, {"every": 30}, 32),
        ({"every": 10}, {"every": 30, "until": START + 20 * SECOND}, None),
    ],
)
@pytest.mark.parametrize("gone", [False, True])
def test_a_change_counts_from_what_the_next_run_was_counted_from(
    store, clock, url, before, after, expected, gone
):
    """It began at 0 and ended at 2; that is known of a job that was deleted too, but for its start."""
    joined(store)
    made(store, **{**before, "every": before["every"] * SECOND})
    turn(store)
    (job,) = claimed(store)
    clock.advance(2)
    store.finish(1, [success(job)])
    if gone:
        with_conn(url, f"DELETE FROM genba.job WHERE id = {job.id}")
        expected = 32 if "reference" in after else expected
    clock.advance(3)
    made(store, **{**after, "every": after["every"] * SECOND})
    assert [job.due_at - START for job in runs(store)] == (
        [] if expected is None else [expected * SECOND]
    )


def test_two_changes_count_from_the_same_end(store, clock):
    joined(store)
    made(store, every=10 * SECOND)
    turn(store)
    run_one(store)
    for every in (30, 60, 20):
        clock.advance(3)
        made(store, every=every * SECOND)
        assert due_after(store) == every * SECOND


def test_a_triggered_run_is_not_of_the_rhythm_that_is_changed(store, clock):
    joined(store)
    made(store, every=10 * SECOND)
    turn(store)
    run_one(store)
    clock.advance(3)
    extra = store.schedules.trigger("s")
    assert run_one(store) == extra
    made(store, every=30 * SECOND)
    assert due_after(store) == 30 * SECOND


def test_a_paused_interval_that_is_changed_goes_on_in_its_new_rhythm(store, clock):
    joined(store)
    made(store, every=10 * SECOND)
    turn(store)
    run_one(store)
    store.schedules.pause("s")
    clock.advance(3)
    made(store, every=30 * SECOND)
    assert runs(store) == []
    store.schedules.resume("s")
    assert due_after(store) == 30 * SECOND


def test_a_run_that_was_taken_back_does_not_count(store, clock):
    joined(store)
    made(store, every=HOUR, start=START + HOUR, max_runs=1)
    store.schedules.pause("s")
    store.schedules.resume("s")
    made(store, every=2 * HOUR, start=START + HOUR, max_runs=1)
    assert store.schedules.named("s").runs == 1
    assert due_after(store) == HOUR
    clock.advance("1h")
    joined(store, 2)
    turn(store)
    run_one(store)
    assert runs(store) == []


def test_what_runs_is_not_touched_by_a_change(store, clock):
    joined(store)
    made(store, every=HOUR)
    turn(store)
    (job,) = claimed(store)
    made(store, every=2 * HOUR)
    assert [each.id for each in runs(store)] == [job.id]
    store.finish(1, [success(job)])
    assert due_after(store) == 2 * HOUR


def test_any_number_of_nodes_may_declare_the_same_at_the_same_time(store, clock, url):
    both = [wanted("s", every=HOUR), wanted("c", cron="* * * * *")]
    for _ in range(3):  # also again, when they start anew
        together(6, lambda _: store.schedules.declare(both))
        together(6, lambda i: store.schedules.put(wanted("h", every=DAY)))
        clock.advance("1s")
    assert sorted(one.name for one in store.schedules.all()) == ["c", "h", "s"]
    assert [len(runs(store, name)) for name in ("s", "h", "c")] == [1, 1, 0]
    clock.advance("1m")
    together(6, lambda _: store.ticks.fire())
    assert len(runs(store, "c")) == 1


def test_code_does_not_overwrite_what_was_made_by_hand_and_may_change_its_own(store):
    store.schedules.put(wanted("hand", every=HOUR))
    store.schedules.declare([wanted("hand", every=DAY), wanted("code", every=HOUR)])
    store.schedules.declare([wanted("hand", every=DAY), wanted("code", every=2 * HOUR)])
    named = {one.name: (one.rule.every, one.owner) for one in store.schedules.all()}
    assert named == {"hand": (HOUR, None), "code": (2 * HOUR, BY_CODE)}
    store.schedules.put(wanted("code", every=3 * HOUR))
    store.schedules.declare([wanted("code", every=HOUR)])
    assert store.schedules.named("code").rule.every == 3 * HOUR


def test_what_no_node_declares_for_an_hour_is_paused_and_goes_on_when_one_does(store, clock, url):
    store.schedules.declare([wanted(cron="0 * * * *")])
    clock.advance("59m")
    store.schedules.still_declared(["s"])
    clock.advance("59m")
    assert store.schedules.abandoned() == []
    assert store.schedules.pause_abandoned(["s"]) == []
    clock.advance("2m")
    assert store.schedules.abandoned() == ["s"]
    assert store.schedules.pause_abandoned(["s"]) == ["s"]
    assert store.schedules.named("s").reason == UNDECLARED_REASON
    assert ("schedule_paused",) in rows(url, "SELECT kind FROM genba.event")
    store.schedules.declare([wanted(cron="0 * * * *")])
    assert not store.schedules.named("s").paused


@pytest.mark.parametrize("declared", [True, False])
def test_a_keeper_gives_others_time_to_declare_theirs_when_the_clock_was_set(
    store, clock, declared
):
    joined(store, 2)
    store.schedules.declare([wanted(cron="0 * * * *")])  # by another node
    maintenance = Maintenance(
        store, 2, lease=15 * SECOND, poll=SECOND, queues=["default"], tasks=[TASK], conditions=[], keep={},
        schedules=[], boot_id=None, clock=clock, lost_claims=LostClaims(clock), post=lambda what: None,
    )  # fmt: skip
    maintenance.step()
    clock.set(clock.now() + DAY)

    for _ in range(4):
        clock.advance("1m")
        maintenance.step()
    assert not store.schedules.named("s").paused
    if declared:
        store.schedules.still_declared(["s"])
    for _ in range(3):
        clock.advance("1m")
        maintenance.step()
    assert store.schedules.named("s").paused is not declared


def test_pause_and_resume_keep_the_rhythm_of_an_interval(store, clock):
    made(store, every=HOUR, start=START + HOUR)
    assert store.schedules.pause("s", "holiday")
    assert not store.schedules.pause("s")
    assert runs(store) == []
    clock.advance("30m")
    assert store.schedules.resume("s")
    assert due_after(store) == HOUR
    store.schedules.pause("s")
    clock.advance("2h")
    store.schedules.resume("s")
    assert due_after(store) == 2 * HOUR + 30 * MINUTE


def test_a_run_that_ends_while_its_schedule_is_paused_starts_nothing(store, clock):
    joined(store)
    made(store, every=HOUR)
    turn(store)
    (job,) = claimed(store)
    store.schedules.pause("s")
    store.finish(1, [success(job)])
    assert runs(store) == []
    store.schedules.resume("s")
    assert due_after(store) == HOUR


def test_ticks_of_a_paused_cron_are_recorded_as_skipped(store, clock, url):
    made(store, cron="0 * * * *")
    store.schedules.pause("s")
    clock.advance("3h30m")
    turn(store)
    store.schedules.resume("s")
    assert skips(store) == [("the schedule was paused", 3)]
    clock.advance("30m")
    turn(store)
    assert jobs_made(store, url) == [4 * HOUR]


def test_trigger_runs_once_more_beside_the_rhythm(store, clock, url):
    made(store, cron="0 * * * *")
    clock.advance("10m")
    job = store.schedules.trigger("s")
    assert state(store, job) == "waiting"
    clock.advance("50m")
    turn(store)
    assert jobs_made(store, url) == [10 * MINUTE, HOUR]


def test_two_triggers_at_the_same_instant_make_two_jobs_or_say_why_not(store, clock):
    made(store, cron="0 * * * *")
    made_first, made_second = store.schedules.trigger("s"), store.schedules.trigger("s")
    assert made_first != made_second
    assert [state(store, job) for job in (made_first, made_second)] == ["waiting", "waiting"]
    made(store, cron="0 * * * *", overlap="skip")
    assert store.schedules.trigger("s") is None
    assert skips(store) == [(f"triggered while job {made_first} was open", 1)]


def test_a_trigger_of_a_disabled_task_is_refused_as_an_enqueue_is(store, clock, url):
    joined(store)
    made(store, cron="0 * * * *")
    with_conn(url, f"UPDATE genba.task SET enabled = {'false' if url.startswith('post') else '0'}")
    with pytest.raises(TaskDisabled, match="to enable it"):
        store.schedules.trigger("s")
    assert jobs_made(store, url) == []


def test_a_triggered_interval_does_not_overlap_with_its_next_run_and_keeps_its_moment(store, clock):
    joined(store)
    made(store, every=HOUR, start=START + HOUR)
    extra = store.schedules.trigger("s")
    assert {job.state for job in runs(store)} == {"waiting", "blocked"}
    clock.advance("2h")
    turn(store)
    assert claimed(store, 8)[0].id == extra
    assert claimed(store, 8) == []
    assert store.schedules.trigger("s") is None
    store.finish(1, [success(_running(store, extra))])
    store.settle()
    (left,) = runs(store)
    assert (left.state, left.moment) == ("waiting", START + HOUR)


def _running(store: Store, id: int) -> Claimed:
    record = store.job(id)
    assert record is not None
    return Claimed(
        0, id, record.attempt, TASK, b"", None, 0, 0, 0, 0, None, 0, 0, record.claimed_at or 0, None
    )


def test_delete_takes_back_the_next_run_and_lets_the_running_one_end(store, clock):
    joined(store)
    made(store, every=HOUR)
    turn(store)
    (job,) = claimed(store)
    store.schedules.delete("s")
    assert store.finish(1, [success(job)]) == {job.id}
    assert rows_open(store) == 0
    made(store, every=HOUR, start=START + HOUR)
    (pending,) = runs(store)
    store.schedules.delete("s")
    assert store.job(pending.id).reason == "schedule s was deleted"


def rows_open(store: Store) -> int:
    from genba.storage.jobs.search import Filter

    return store.search.count(
        Filter(states=frozenset({"waiting", "scheduled", "running", "blocked", "held"}))
    )


# nets


def test_an_interval_whose_run_was_deleted_by_hand_gets_another(store, clock, url):
    made(store, every=HOUR)
    with_conn(url, "DELETE FROM genba.job")
    clock.advance("1s")
    assert store.ticks.replan() == 1
    assert len(runs(store)) == 1
    assert store.ticks.replan() == 0


def test_a_clock_set_back_delays_an_interval_by_one_interval_at_most(store, clock):
    joined(store)
    made(store, every=MINUTE)
    turn(store)
    run_one(store)
    clock.set(START - DAY)
    store.ticks.replan()
    (job,) = runs(store)
    assert job.due_at - clock.now() <= MINUTE + 2 * SECOND


def test_old_ticks_are_pruned_and_young_ones_are_not(store, clock, url):
    made(store, cron="0 0 * * *")
    for _ in range(40):
        clock.advance("24h")
        turn(store)
    store.ticks.prune_ticks()
    assert min(jobs_made(store, url)) == 10 * DAY


def test_the_fence_holds_for_the_runs_of_a_schedule_too(store, clock):
    joined(store)
    made(store, every=HOUR)
    turn(store)
    (job,) = claimed(store)
    assert store.finish(1, [success(job, claim=CLAIM + 1)]) == set()
    assert len(runs(store)) == 1
    assert store.finish(1, [success(job)]) == {job.id}
    assert store.finish(1, [success(job)]) == set()
    assert len(runs(store)) == 1
