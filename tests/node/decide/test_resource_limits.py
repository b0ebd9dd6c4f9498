"""What a node decides about memory, CPU time, gates, dedicated jobs, recycling, the lease, and another size."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from tests.node.decide.test_brain import MS, SECOND, Stage, a_job, a_stage, jobs, of

from genba import wire
from genba.errors import BadOption
from genba.node.decide import actions as do
from genba.node.decide.actions import Action
from genba.node.decide.dispatch import DEDICATED_AGAIN_US
from genba.node.decide.worker_state import ResourceUse
from genba.node.settings import NodeSettings

MB = 1 << 20


def weigh(stage: Stage, slot: int, memory: int, cpu: int = 0, after: int = 50 * MS) -> list[Action]:
    """A tick in which this worker, and no other, uses so much."""
    stage.now += after
    views = {slot: worker.view() for slot, worker in stage.workers.items()}
    assert [one for one, _ in stage.brain.measured] == [slot]
    views[slot] = replace(views[slot], use=ResourceUse(memory, cpu))
    return stage.perform(stage.brain.on_tick(stage.now, views))


def at_work(**options: Any) -> Stage:
    """One job, with these options, that runs."""
    stage = a_stage()
    stage.claimed(a_job(1, **options))
    if options.get("at_most_once"):
        stage.marked(1)
    stage.start()
    return stage


# memory and CPU time


def test_a_job_above_its_memory_is_killed_at_once_with_what_it_took() -> None:
    stage = at_work(memory=100 * MB)
    weigh(stage, 1, 99 * MB)
    assert stage.workers[1].signals == []

    weigh(stage, 1, 101 * MB)
    assert stage.workers[1].signals == [signal.SIGKILL]
    sweep = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep[0].token)
    ending = stage.ending(1)
    assert (ending.cause, ending.crashes, ending.peak) == ("out of memory", 1, 101 * 1024)


def test_memory_does_not_wait_for_the_grace_of_another_stop() -> None:
    stage = at_work(memory=100 * MB, timeout=SECOND, grace=60 * SECOND)
    weigh(stage, 1, MB)
    weigh(stage, 1, MB, after=2 * SECOND)
    assert stage.workers[1].signals == [signal.SIGTERM]

    weigh(stage, 1, 101 * MB)
    assert stage.workers[1].signals == [signal.SIGTERM, signal.SIGKILL]


def test_a_job_above_its_cpu_time_gets_its_grace_and_counts_as_a_crash() -> None:
    stage = at_work(cpu=SECOND, grace=2 * SECOND)
    weigh(stage, 1, 0, cpu=7 * SECOND)  # what the worker used before
    weigh(stage, 1, 0, cpu=7_900_000)
    assert stage.workers[1].signals == []

    weigh(stage, 1, 0, cpu=8 * SECOND)
    assert stage.workers[1].signals == [signal.SIGTERM]
    stage.end(outcome=wire.STOPPED, payload=None)
    assert (stage.ending(1).cause, stage.ending(1).crashes) == ("cpu limit", 1)


def test_no_worker_is_weighed_without_need() -> None:
    stage = at_work(timeout=SECOND)
    assert stage.brain.measured == []

    stage = at_work(memory=MB)
    assert stage.brain.measured == [(1, 101)]
    stage.end()
    assert stage.brain.measured == []


@pytest.mark.parametrize(
    ("status", "starved", "cause"),
    [
        (signal.SIGKILL, True, "out of memory"),
        (signal.SIGKILL, False, "signal 9"),
        (signal.SIGSEGV, True, "signal 11"),
        (signal.SIGXCPU, False, "cpu limit"),
    ],
)
def test_the_kernels_own_kills_are_known(status: int, starved: bool, cause: str) -> None:
    stage = at_work()
    view = stage.workers.pop(1).view()
    done = stage.perform(
        stage.brain.on_worker_ended(1, int(status), 5, 6, view, stage.now, starved)
    )
    stage.swept(of(do.SweepLeftovers, done)[0].token)

    assert stage.ending(1).cause == cause


# gates


def test_behind_a_closed_gate_nothing_is_claimed_and_what_is_here_runs() -> None:
    stage = a_stage()
    stage.claimed(a_job(1), a_job(2))
    stage.perform(stage.brain.on_load_gate(True, stage.now))

    stage.work_off(1, 2)
    assert set(stage.ended) == {1, 2}
    assert of(do.ClaimJobs, stage.perform(stage.brain.on_wakeup(stage.now))) == []
    assert of(do.ClaimJobs, stage.perform(stage.brain.on_load_gate(False, stage.now)))


# dedicated


def test_a_dedicated_job_gets_a_worker_outside_the_slots_that_leaves_after_it() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, dedicated=True), a_job(2))
    assert stage.given(1) == [2]
    assert set(stage.workers) == {1, 2}

    stage.ready(2)
    assert stage.given(2) == [1]
    stage.start(2)
    done = stage.end(2)
    assert of(do.DismissWorker, done) == [do.DismissWorker(2)]
    stage.die(2, status=0)
    assert set(stage.workers) == {1}


def test_dedicated_jobs_are_not_counted_when_more_is_claimed() -> None:
    stage = a_stage()
    stage.perform(stage.brain.on_wakeup(stage.now))
    done = stage.claimed(a_job(1, dedicated=True))
    done += stage.perform(stage.brain.on_wakeup(stage.now))

    assert of(do.ClaimJobs, done)[-1].wants == {"default": 1}


def test_without_a_free_slot_dedicated_jobs_are_looked_for_once_a_second() -> None:
    stage = a_stage(max_dedicated=2)
    done = stage.claimed(a_job(1))
    assert of(do.ClaimDedicated, done) == [do.ClaimDedicated(["default"], 2)]
    assert of(do.ClaimDedicated, stage.tick(5 * SECOND)) == []  # not before there is an answer

    done = stage.perform(
        stage.brain.on_claimed_dedicated([a_job(2, dedicated=True)], 78, stage.now)
    )
    assert of(do.ClaimDedicated, done) == [do.ClaimDedicated(["default"], 1)]
    stage.ready(2)
    assert stage.given(2) == [2]
    stage.perform(stage.brain.on_claimed_dedicated([], 0, stage.now))
    assert of(do.ClaimDedicated, stage.tick(SECOND // 2)) == []
    assert of(do.ClaimDedicated, stage.tick(SECOND // 2)) == [do.ClaimDedicated(["default"], 1)]


def test_a_dedicated_job_for_which_there_is_no_room_comes_back_later_uncounted() -> None:
    stage = a_stage(max_dedicated=2)
    stage.claimed(*(a_job(id, dedicated=True) for id in (1, 2, 3)))

    ending = stage.ending(3)
    assert (ending.state, ending.happened, ending.losses, ending.crashes) == (
        "scheduled",
        False,
        0,
        0,
    )
    assert ending.wait == DEDICATED_AGAIN_US
    assert len(stage.workers) == 3


def test_a_dedicated_job_that_may_run_once_is_marked_first() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, dedicated=True, at_most_once=True))
    done = stage.ready(2)
    assert [mark.first for mark in of(do.MarkStarted, done)] == [True]
    assert stage.given(2) == []

    stage.marked(1)
    assert stage.given(2) == [1]


def test_a_worker_that_came_for_a_dedicated_job_goes_when_that_was_cancelled() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, dedicated=True))
    stage.cancel(1)
    assert stage.ending(1).state == "cancelled"

    stage.ready(2)
    assert of(do.DismissWorker, stage.tick()) == [do.DismissWorker(2)]
    assert of(do.DismissWorker, stage.tick()) == []


def test_a_drain_gives_back_dedicated_jobs_that_wait_for_their_worker() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, dedicated=True))
    stage.drain()

    assert (stage.ending(1).state, stage.ending(1).happened) == ("waiting", False)
    assert stage.brain.empty


# recycling


def test_a_worker_never_gets_more_jobs_than_it_may_run() -> None:
    stage = a_stage(mean=MS, recycle_jobs=11)
    stage.claimed(*jobs(1, 30))
    assert len(stage.given()) == 10  # one it has run before

    stage.work_off(1, 9)
    stage.start()
    assert of(do.DismissWorker, stage.end()) == [do.DismissWorker(1)]
    stage.die(1, status=0)
    assert set(stage.workers) == {2}
    stage.ready(2)
    assert len(stage.given(2)) == 11


def test_a_worker_that_has_grown_leaves_and_what_it_had_in_advance_goes_to_the_next() -> None:
    stage = a_stage(mean=MS, recycle_memory=6 * 1024)  # what the fake worker says
    stage.die(1, status=0)
    stage.ready()
    stage.claimed(*jobs(1, 10))
    stage.start(2)

    assert of(do.DismissWorker, stage.end(2)) == [do.DismissWorker(2)]
    stage.die(2, status=0)
    stage.ready(3)
    assert set(stage.given(3)) == set(range(2, 11))
    assert set(stage.ended) == {1}


# another size


def settings(stage: Stage, **changes: Any) -> list[Action]:
    return stage.perform(
        stage.brain.on_settings(stage.brain.settings.changed(**changes), stage.now)
    )


def test_a_larger_pool_gets_its_workers_at_once() -> None:
    stage = a_stage(1)

    assert len(of(do.SpawnWorker, settings(stage, min=3))) == 2


def test_of_a_smaller_pool_the_idle_leave_first_and_the_busy_when_they_are_done() -> None:
    stage = a_stage(3)
    stage.claimed(a_job(1), a_job(2))
    assert [slot for slot in (1, 2, 3) if not stage.given(slot)] == [3]
    stage.start(1)
    stage.start(2)

    done = settings(stage, min=1)
    assert of(do.DismissWorker, done) == [do.DismissWorker(3)]
    leaving = [slot for slot in (1, 2) if of(do.DismissWorker, stage.end(slot))]
    assert len(leaving) == 1


def test_only_the_pool_can_be_changed_and_only_sensibly() -> None:
    before = NodeSettings(target="a:b", min=1, max=2)

    assert before.changed(max=4).slots == 4
    assert before.changed(pool="static", min=3).slots == 3
    with pytest.raises(BadOption, match="greater than max"):
        before.changed(min=3)
    with pytest.raises(BadOption, match="name cannot be changed"):
        before.changed(name="x")


# the lease


def test_a_job_that_must_not_run_twice_is_stopped_before_the_lease_is_over() -> None:
    stage = at_work(at_most_once=True, grace=60 * SECOND)
    stage.brain.on_renewed(stage.now, 15 * SECOND)
    stage.tick(11 * SECOND)
    assert stage.workers[1].signals == []

    stage.tick(300 * MS)
    assert stage.workers[1].signals == [signal.SIGTERM]
    stage.tick(2_250 * MS)
    assert stage.workers[1].signals == [signal.SIGTERM, signal.SIGKILL]
    stage.swept(of(do.SweepLeftovers, stage.die())[0].token)
    ending = stage.ending(1)
    assert (ending.state, ending.cause) == ("failed", "maybe_ran")
    assert "lease lost" in str(ending.reason)


def test_a_job_that_has_taken_a_lock_is_stopped_before_the_lease_is_over_and_its_end_frees_it() -> (
    None
):
    stage = at_work(grace=60 * SECOND)
    stage.workers[1].locked = True
    stage.brain.on_renewed(stage.now, 15 * SECOND)
    stage.tick(11_300 * MS)
    assert stage.workers[1].signals == [signal.SIGTERM]
    stage.tick(2_250 * MS)
    assert stage.workers[1].signals == [signal.SIGTERM, signal.SIGKILL]
    stage.swept(of(do.SweepLeftovers, stage.die())[0].token)

    assert stage.ending(1).locks


def test_a_plain_job_runs_on_without_a_lease() -> None:
    stage = at_work()
    stage.brain.on_renewed(stage.now, 15 * SECOND)
    stage.tick(60 * SECOND)

    assert stage.workers[1].signals == []
    assert stage.workers[1].asked is None


def test_a_job_that_must_not_run_twice_is_not_started_when_the_lease_is_nearly_over() -> None:
    stage = a_stage()
    stage.brain.on_renewed(stage.now, 15 * SECOND)
    stage.claimed(a_job(1, at_most_once=True))
    stage.now += 12 * SECOND
    stage.marked(1)
    assert stage.given() == []

    stage.brain.on_renewed(stage.now, 15 * SECOND)
    stage.tick()
    assert stage.given() == [1]
