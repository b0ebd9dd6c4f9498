"""What a node decides about jobs that wait for jobs: slots that are lent, the reserve, and refusals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tests.node.decide.test_brain import CLAIM, MS, SECOND, Stage, a_job, a_stage, of

from genba.node.decide import actions as do
from genba.node.decide.actions import Action
from genba.node.decide.lending import LOOK_AGAIN_US, MOST_LENT


def waiting(
    stage: Stage, awaited: Mapping[int, Sequence[int]], after: int = 50 * MS
) -> list[Action]:
    """A tick in which these workers' jobs wait for these jobs."""
    stage.now += after
    views = {
        slot: replace(worker.view(), waits=slot in awaited, awaited=tuple(awaited.get(slot, ())))
        for slot, worker in stage.workers.items()
    }
    return stage.perform(stage.brain.on_tick(stage.now, views))


def fill(stage: Stage, count: int) -> dict[int, list[int]]:
    """So many jobs run, one after the other; in the next tick each waits for the next one."""
    awaited: dict[int, list[int]] = {}
    for id in range(1, count + 1):
        for ask in of(do.ClaimAwaited, waiting(stage, awaited)):
            assert ask.ids
            stage.perform(stage.brain.on_claimed_awaited([], CLAIM, stage.now))
        stage.ready()
        stage.claimed(a_job(id))
        (slot,) = (slot for slot in stage.workers if stage.given(slot))
        stage.start(slot)
        awaited[slot] = [id + 1]
    return awaited


def look(stage: Stage, awaited: dict[int, list[int]], *, can_end: bool) -> list[Action]:
    """A tick with a look at the awaited jobs, and what follows from the answer."""
    done = waiting(stage, awaited, after=LOOK_AGAIN_US + MS)
    assert of(do.CheckAwaited, done)
    return stage.perform(stage.brain.on_awaited_checked(can_end, stage.now))


def test_a_job_that_waits_lends_its_slot_and_takes_it_back() -> None:
    stage = a_stage(1, max=1)
    stage.claimed(a_job(1))
    stage.start()

    spawned = of(do.SpawnWorker, waiting(stage, {1: [2]}))
    assert len(spawned) == 1
    stage.ready()

    assert of(do.DismissWorker, waiting(stage, {})) == [do.DismissWorker(spawned[0].slot)]


def test_a_dedicated_job_has_no_slot_to_lend() -> None:
    stage = a_stage(1, max=1)
    stage.claimed(*(a_job(id, dedicated=True) for id in (1, 2, 3, 4)))
    stage.ready()
    stage.tick()
    apart = [slot for slot in stage.workers if stage.given(slot)]
    assert len(apart) == 4
    for slot in apart:
        stage.start(slot)

    done = waiting(stage, {slot: [10 + slot] for slot in apart})

    assert of(do.SpawnWorker, done) == []
    assert of(do.RefuseWait, done) == []
    assert len(stage.workers) == 5


def test_when_all_slots_are_lent_one_more_worker_runs_awaited_jobs_only() -> None:
    stage = a_stage(2, max=2)
    awaited = fill(stage, 2 + MOST_LENT)

    done = waiting(stage, awaited, after=SECOND)

    assert len(stage.workers) == 2 + MOST_LENT + 1
    (claim,) = of(do.ClaimAwaited, done)
    assert set(claim.ids) == {id for ids in awaited.values() for id in ids}
    assert not of(do.RefuseWait, done)

    # Another job, claimed meanwhile, goes back; the awaited one starts in the reserve.
    stage.claimed(a_job(90))
    assert stage.ending(90).state == "waiting"
    stage.perform(stage.brain.on_claimed_awaited([a_job(11)], CLAIM, stage.now))
    waiting(stage, awaited)
    stage.ready()
    assert [stage.given(slot) for slot in stage.workers if stage.given(slot)] == [[11]]


def test_a_wait_is_refused_after_two_looks_that_found_that_nothing_can_end_it() -> None:
    stage = a_stage(1, max=1)
    awaited = fill(stage, 1 + MOST_LENT + 1)

    assert look(stage, awaited, can_end=False) == []
    (refused,) = look(stage, awaited, can_end=False)

    assert isinstance(refused, do.RefuseWait)
    assert refused.slot == max(awaited)  # the newest wait


def test_a_wait_is_not_refused_while_something_can_end_it_or_the_waits_change() -> None:
    stage = a_stage(1, max=1)
    awaited = fill(stage, 1 + MOST_LENT + 1)

    assert look(stage, awaited, can_end=False) == []
    assert look(stage, awaited, can_end=True) == []
    assert look(stage, awaited, can_end=False) == []
    newest = max(awaited)
    assert (
        of(
            do.RefuseWait,
            waiting(stage, {s: ids for s, ids in awaited.items() if s != newest}, SECOND),
        )
        == []
    )
    assert look(stage, awaited, can_end=False) == []


def test_a_node_with_idle_workers_looks_for_no_deadlock() -> None:
    stage = a_stage(24, max=24)
    stage.ready()
    stage.claimed(*(a_job(id) for id in range(1, 13)))
    slots = [slot for slot in stage.workers if stage.given(slot)]
    for slot in slots:
        stage.start(slot)

    done = waiting(stage, {slot: [100 + slot] for slot in slots}, after=SECOND)

    assert not of(do.CheckAwaited, done)
    assert not of(do.RefuseWait, done)


def test_dedicated_jobs_that_all_wait_are_looked_at_when_there_is_no_room_for_more() -> None:
    stage = a_stage(1, max=1, max_dedicated=2)
    stage.claimed(*(a_job(id, dedicated=True) for id in (1, 2)))
    stage.ready()
    stage.tick()
    slots = [slot for slot in stage.workers if stage.given(slot)]
    for slot in slots:
        stage.start(slot)

    (asked,) = of(do.CheckAwaited, waiting(stage, {slot: [10 + slot] for slot in slots}))

    assert asked.slot_free
    assert not asked.dedicated_free
