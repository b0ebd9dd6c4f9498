"""Shared workers: which jobs get a seat, which do not, and what becomes of their neighbours."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, TypeVar

from genba import wire
from genba.domain.duration import SECOND
from genba.node.decide import actions as do
from genba.node.decide.actions import Action
from genba.node.decide.brain import Brain
from genba.node.decide.shared_workers import concurrency_of
from genba.node.decide.state import LONG_JOB_US
from genba.node.decide.worker_state import WorkerView
from genba.node.settings import NodeSettings
from genba.storage.records import Claimed

A = TypeVar("A")
CLAIM = 77


def of(kind: type[A], actions: Sequence[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def a_job(id: int, task: str = "fetch", **more: Any) -> Claimed:
    row = {
        "rank": id, "id": id, "attempt": 1, "task": task, "args": b"{}", "options": None, "priority": 0, "retries": 0,
        "crashes": 0, "losses": 0, "saved": None, "due_at": 0, "open_deps": 0, "claimed_at": 0, "expires_at": None,
    }  # fmt: skip
    return Claimed(**{**row, **more})


def a_brain(workers: int = 1, concurrency: int = 3) -> Brain:
    """With workers that are ready, and have been asked for more."""
    settings = NodeSettings(target="tasks:app", pool="static", min=workers, max=workers)
    brain = Brain(settings, ["fetch", "plain"], lambda: 0.0)
    brain.concurrency = {"fetch": concurrency}
    for spawn in of(do.SpawnWorker, brain.on_zygote_ready(0)):
        brain.on_worker_ready(spawn.slot, 100 + spawn.slot, 0)
    return brain


def given(actions: Sequence[Action]) -> dict[int, int]:
    """Which job has gone to which worker."""
    return {job.id: give.slot for give in of(do.GiveJobs, actions) for job in give.jobs}


def places(actions: Sequence[Action]) -> dict[int, int]:
    """Where in its bunch each job is."""
    return {
        job.id: wire.place(give.serial, index)
        for give in of(do.GiveJobs, actions)
        for index, job in enumerate(give.jobs)
    }


def running(place: int) -> WorkerView:
    return WorkerView(place, wire.RUNNING, 0, False, None)


def result(place: int, spent: int = 1) -> list[Any]:
    return [place >> 24, place & 0xFFFFFF, wire.RETURNED, b"1", 1, 1 + spent, None, 5, None]


NOTHING = WorkerView(0, wire.IDLE, 0, False, None)


def test_jobs_of_a_task_with_concurrency_sit_together_and_more_of_it_is_claimed_for_the_free_seats():
    brain = a_brain()
    done = brain.on_claimed([a_job(1), a_job(2)], CLAIM, 1)

    assert of(do.SetSeats, done) == [do.SetSeats(1, (2, 3, 4))]
    assert given(done) == {1: 1, 2: 1}
    assert of(do.ClaimJobs, done) == [do.ClaimJobs({"default": 1})]  # one of any task, now and then
    done = brain.on_claimed([], CLAIM, 2)
    assert of(do.ClaimJobs, done) == [do.ClaimJobs({"default": 1}, ("fetch",))]


def test_a_worker_without_a_job_does_not_keep_the_seats_of_another_empty():
    brain = a_brain(workers=2, concurrency=50)
    asked: list[do.ClaimJobs] = []
    done = brain.on_claimed([a_job(1)], CLAIM, 1)
    for n in range(2, 5):
        (claim,) = of(do.ClaimJobs, done)
        asked.append(claim)
        done = brain.on_claimed(
            [a_job(n)], CLAIM, n
        )  # it sits beside the others, and a worker is still without

    one_of_any = do.ClaimJobs({"default": 1})
    assert asked == [one_of_any, do.ClaimJobs({"default": 48}, ("fetch",)), one_of_any]


def test_no_more_sit_together_than_the_task_says():
    brain = a_brain(workers=2)
    done = brain.on_claimed([a_job(n) for n in range(1, 9)], CLAIM, 1)

    assert len(of(do.SetSeats, done)) == 2
    assert sorted(given(done)) == [1, 2, 3, 4, 5, 6]
    assert sorted(brain.claimed_ids()) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_what_is_limited_must_run_once_or_has_crashed_runs_alone():
    limited: list[dict[str, Any]] = [
        {"options": '{"at_most_once":true}'},
        {"options": '{"memory":1000000}'},
    ]
    for more in (*limited, {"crashes": 1}, {"losses": 1}):
        brain = a_brain()
        done = brain.on_claimed([a_job(1, **more)], CLAIM, 1)
        done += brain.on_marked([1], 2)
        assert of(do.SetSeats, done) == []
        assert given(done) == {1: 1}


def test_a_shared_worker_that_others_need_gets_no_more_company_and_then_is_theirs():
    brain = a_brain()
    at = places(brain.on_claimed([a_job(1), a_job(2)], CLAIM, 1))
    brain.on_claimed([a_job(3, "plain")], CLAIM, 2)
    assert given(brain.on_claimed([a_job(4)], CLAIM, 3)) == {}
    brain.on_results(1, [result(at[1])], 4)
    done = brain.on_results(1, [result(at[2])], 5)

    assert do.SetSeats(1, ()) in done
    assert given(done) == {3: 1}


def test_an_idle_shared_worker_goes_over_to_another_task_in_company():
    brain = a_brain()
    brain.concurrency = {"fetch": 3, "other": 2}
    at = places(brain.on_claimed([a_job(1)], CLAIM, 1))
    assert (
        given(brain.on_claimed([a_job(2, "other")], CLAIM, 2)) == {}
    )  # its worker runs jobs of another task
    assert given(brain.on_claimed([a_job(3)], CLAIM, 3)) == {}  # and gets no more of it
    done = brain.on_results(1, [result(at[1])], 4)

    assert of(do.SetSeats, done) == [do.SetSeats(1, ()), do.SetSeats(1, (5, 6))]
    assert given(done) == {2: 1}


def test_a_stop_is_for_one_seat_and_what_has_to_be_killed_takes_its_neighbours_with_it_uncounted():
    brain = a_brain()
    at = places(brain.on_claimed([a_job(1, options='{"grace":1000000}'), a_job(2)], CLAIM, 1))
    views = {
        1: NOTHING,
        2: NOTHING,
        3: running(at[2]),
        4: running(at[1]),
    }  # any seat may have taken it
    brain.on_tick(2, views)
    brain.on_cancel(1, "cancel", None, 3)

    assert of(do.StopSeat, brain.on_tick(4, views)) == [do.StopSeat(4, at[1])]
    assert of(do.SignalWorker, brain.on_tick(SECOND // 2, views)) == []
    assert of(do.SignalWorker, brain.on_tick(2 * SECOND, views)) == [
        do.SignalWorker(1, signal.SIGKILL)
    ]
    seats = {slot: view for slot, view in views.items() if slot != 1}
    done = brain.on_worker_ended(1, signal.SIGKILL, 0, 0, NOTHING, 2 * SECOND, seats=seats)
    done = brain.on_swept(of(do.SweepLeftovers, done)[0].token, 3 * SECOND)
    ended = {end.id: end for finish in of(do.WriteEndings, done) for end in finish.ended}
    assert (ended[1].state, ended[1].cause) == ("cancelled", "cancelled")
    assert (ended[2].state, ended[2].cause, ended[2].crashes) == ("waiting", "collateral", 0)


def test_a_worker_that_dies_by_itself_has_crashed_for_all_that_had_started_and_for_no_other():
    brain = a_brain()
    at = places(brain.on_claimed([a_job(1), a_job(2)], CLAIM, 1))
    seats = {2: running(at[1]), 3: NOTHING, 4: NOTHING}
    done = brain.on_worker_ended(1, signal.SIGSEGV, 0, 0, NOTHING, LONG_JOB_US, seats=seats)
    done += brain.on_swept(of(do.SweepLeftovers, done)[0].token, LONG_JOB_US)

    ended = {end.id: end for finish in of(do.WriteEndings, done) for end in finish.ended}
    assert {id: (end.cause, end.crashes) for id, end in ended.items()} == {1: ("signal 11", 1)}
    assert brain.claimed_ids() == [2]


def test_a_drain_lets_a_shared_worker_go_when_its_last_seat_is_empty():
    brain = a_brain()
    at = places(brain.on_claimed([a_job(1), a_job(2)], CLAIM, 1))
    assert of(do.DismissWorker, brain.on_drain(2)) == []
    assert of(do.DismissWorker, brain.on_results(1, [result(at[1])], 3)) == []
    assert of(do.DismissWorker, brain.on_results(1, [result(at[2])], 4)) == [do.DismissWorker(1)]
    assert brain.empty
    assert not brain.may_leave
    brain.on_worker_ended(1, 0, 0, 0, NOTHING, 5, seats=dict.fromkeys((2, 3, 4), NOTHING))
    assert brain.may_leave


def a_brain_that_knows(spent: int, workers: int = 1) -> Brain:
    """How long such jobs take, waits and all."""
    brain = a_brain(workers)
    at = places(brain.on_claimed([a_job(1)], CLAIM, 1))
    brain.on_results(1, [result(at[1], spent)], 2)
    return brain


def test_of_short_ones_a_worker_has_more_in_hand_than_it_has_seats_and_of_long_ones_it_has_not():
    for spent, in_hand in ((10_000, 18), (40_000, 3)):
        brain = a_brain_that_knows(spent)
        done = brain.on_claimed([a_job(n) for n in range(2, 30)], CLAIM, 3)
        assert len(given(done)) == in_hand


def test_short_ones_are_claimed_by_as_many_as_a_worker_may_have_in_hand():
    brain = a_brain_that_knows(10_000)
    done = brain.on_claimed([a_job(2)], CLAIM, 3)

    assert of(do.ClaimJobs, done) == [do.ClaimJobs({"default": 17}, ("fetch",))]


def test_every_free_seat_is_taken_before_a_worker_gets_jobs_in_advance():
    brain = a_brain_that_knows(10_000, workers=2)
    done = brain.on_claimed([a_job(n) for n in range(2, 9)], CLAIM, 3)
    slots = list(given(done).values())

    assert sorted(slots) == [1, 1, 1, 1, 2, 2, 2]


def test_what_waits_behind_long_ones_is_taken_back_and_let_go():
    brain = a_brain_that_knows(10_000)
    at = places(brain.on_claimed([a_job(n) for n in range(2, 12)], CLAIM, 3))
    views = {1: NOTHING, 2: running(at[2]), 3: running(at[3]), 4: NOTHING}
    assert of(do.TakeJobsBack, brain.on_tick(4, views)) == []
    assert of(do.TakeJobsBack, brain.on_tick(4 + LONG_JOB_US, views)) == [do.TakeJobsBack(1)]
    brain.on_taken_back(1, 7, 5 + LONG_JOB_US)
    assert sorted(brain.claimed_ids()) == list(range(2, 12))
    done = brain.on_tick(6 + LONG_JOB_US, views)

    released = {end.id: end.state for finish in of(do.WriteEndings, done) for end in finish.ended}
    assert released == dict.fromkeys(range(5, 12), "waiting")
    assert sorted(brain.claimed_ids()) == [2, 3, 4]


def test_one_that_has_not_begun_is_cancelled_without_a_word_to_those_that_run():
    brain = a_brain_that_knows(10_000)
    at = places(brain.on_claimed([a_job(n) for n in range(2, 12)], CLAIM, 3))
    views = {1: NOTHING, 2: running(at[2]), 3: running(at[3]), 4: running(at[4])}
    brain.on_tick(4, views)
    assert of(do.TakeJobsBack, brain.on_cancel(9, "cancel", None, 5)) == [do.TakeJobsBack(1)]
    done = brain.on_taken_back(1, 7, 6)

    assert [
        (end.id, end.state) for finish in of(do.WriteEndings, done) for end in finish.ended
    ] == [(9, "cancelled")]
    assert sorted(given(done)) == [5, 6, 7, 8, 10, 11]
    done = brain.on_tick(7, views)
    assert not of(do.StopSeat, done)
    assert not of(do.RequestStop, done)


def test_several_are_stopped_at_a_time_each_at_its_seat():
    brain = a_brain()
    at = places(brain.on_claimed([a_job(1), a_job(2), a_job(3)], CLAIM, 1))
    views = {1: NOTHING, 2: running(at[1]), 3: running(at[2]), 4: running(at[3])}
    brain.on_tick(2, views)
    brain.on_cancel(1, "cancel", None, 3)
    brain.on_cancel(3, "cancel", None, 3)

    assert of(do.StopSeat, brain.on_tick(4, views)) == [
        do.StopSeat(2, at[1]),
        do.StopSeat(4, at[3]),
    ]


def test_a_pool_that_shrinks_lets_a_shared_worker_end_what_it_runs():
    brain = a_brain(workers=2)
    at = places(brain.on_claimed([a_job(n) for n in range(1, 7)], CLAIM, 1))
    done = brain.on_settings(NodeSettings(target="tasks:app", pool="static", min=1, max=1), 2)

    assert of(do.DismissWorker, done) == []
    (back,) = of(do.TakeJobsBack, done)
    brain.on_taken_back(back.slot, 0, 3)
    mine = [at[n] for n in (range(1, 4) if back.slot == 1 else range(4, 7))]
    done = brain.on_results(back.slot, [result(place) for place in mine], 4)
    assert of(do.DismissWorker, done) == [do.DismissWorker(back.slot)]


def test_other_seats_are_made_when_those_that_sit_have_ended():
    brain = a_brain(concurrency=2)
    done = brain.on_claimed([a_job(1), a_job(2), a_job(3)], CLAIM, 1)
    sitting = places(done)
    (host,) = {share.slot for share in of(do.SetSeats, done)}
    assert sorted(given(done)) == [1, 2]  # the third waits for a seat

    assert given(brain.on_concurrency({"fetch": 4}, 2)) == {}
    assert (
        given(brain.on_results(host, [result(sitting[1])], 3)) == {}
    )  # the other one is still there
    more = brain.on_results(host, [result(sitting[2])], 4)

    assert [len(share.seats) for share in of(do.SetSeats, more)] == [0, 4]
    assert list(given(more)) == [3]
    assert len(given(brain.on_claimed([a_job(n) for n in range(4, 7)], CLAIM, 5))) == 3


def test_a_task_that_has_no_company_any_more_runs_one_at_a_time():
    brain = a_brain(concurrency=2)
    done = brain.on_claimed([a_job(1), a_job(2)], CLAIM, 1)
    sitting = places(done)
    (host,) = {share.slot for share in of(do.SetSeats, done)}

    brain.on_concurrency({}, 2)
    ended = [
        *brain.on_results(host, [result(sitting[1])], 3),
        *brain.on_results(host, [result(sitting[2])], 4),
    ]
    assert [share.seats for share in of(do.SetSeats, ended)] == [()]
    assert len(given(brain.on_claimed([a_job(3), a_job(4)], CLAIM, 5))) == 1


def test_operators_say_how_many_sit_together_where_the_code_can_do_it(caplog):
    a, b = {"name": "a", "concurrency": 4, "async": True}, {"name": "b", "async": True}
    c = {"name": "c", "async": False}
    hello = {"tasks": [a, b, c], "shareable": True}

    assert concurrency_of(hello, {}) == {"a": 4}
    assert concurrency_of(hello, {"a": 1, "b": 8, "c": 2, "elsewhere": 3}) == {"b": 8}
    assert "concurrency=2 of task c is ignored" in caplog.text
    assert concurrency_of({**hello, "shareable": False}, {"b": 8}) == {"a": 4}
