"""Conditions are asked of a few free workers, within a second, and once for all jobs that share one."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from tests.node.decide.test_brain import CLAIM, MS, SECOND, WALL, a_job

from genba import wire
from genba.node.decide import actions as do
from genba.node.decide.brain import Brain
from genba.node.decide.worker_state import WorkerView
from genba.node.settings import NodeSettings

IDLE = WorkerView(0, wire.IDLE, 0, False, None)


class Asked:
    """A brain with ready workers."""

    def __init__(self, slots: int = 4) -> None:
        settings = NodeSettings(target="tasks:app", pool="static", min=slots, max=slots)
        self.brain = Brain(settings, ["tasks.work"], lambda: 0.0)
        self.brain.conditions = ["open"]
        self.brain.wall_offset = WALL
        self.now = 1_000 * SECOND
        for action in self.brain.on_zygote_ready(self.now):
            if isinstance(action, do.SpawnWorker):
                self.brain.on_worker_ready(action.slot, 100 + action.slot, self.now)

    def claimed(
        self, *ids: int, conditions: tuple[str, ...] = ("open",), **args: bytes
    ) -> list[Any]:
        jobs = [a_job(id, ready=conditions)._replace(args=args.get(f"j{id}", b"{}")) for id in ids]
        return self.brain.on_claimed(jobs, CLAIM, self.now)

    def answer(
        self,
        ask: do.CheckConditions,
        ways: Any = ([],),
        wait: int | None = None,
        error: bytes | None = None,
    ) -> list[Any]:
        return self.brain.on_conditions_checked(
            ask.slot, [ask.serial, list(ways), wait, "open", error], self.now
        )

    def tick(self, micros: int) -> list[Any]:
        self.now += micros
        return self.brain.on_tick(self.now, {})


def of(kind: type, actions: list[Any]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def given(actions: list[Any]) -> list[int]:
    return sorted(job.id for give in of(do.GiveJobs, actions) for job in give.jobs)


def test_a_job_is_given_when_its_conditions_hold():
    stage = Asked()
    (ask,) = of(do.CheckConditions, asked := stage.claimed(1))
    assert not of(do.GiveJobs, asked)
    assert (ask.job.id, ask.conditions) == (1, ("open",))

    yes = stage.answer(ask)

    assert given(yes) == [1]
    assert len(of(do.ReportConditionsHold, yes)) == 1


def test_a_no_gives_the_job_back_as_if_nothing_had_happened():
    stage = Asked()
    (ask,) = of(do.CheckConditions, stage.claimed(1))
    (report,) = of(do.ReportNotReady, stage.answer(ask, ways=(), wait=5 * SECOND))
    (answer,) = report.answers
    assert (answer.ending.id, answer.ending.state, answer.ending.happened) == (1, "waiting", False)
    assert answer.wait == 5 * SECOND
    assert stage.brain.claimed_ids() == []


def test_equal_questions_are_asked_once_and_the_answer_holds_for_a_second():
    stage = Asked(6)
    (ask,) = of(do.CheckConditions, stage.claimed(1, 2, 3))
    assert given(stage.answer(ask)) == [1, 2, 3]
    assert given(stage.claimed(4)) == [4]
    stage.now += 2 * SECOND
    (again,) = of(do.CheckConditions, stage.claimed(5))

    report = stage.answer(again, ways=())
    more = stage.claimed(6)

    assert [
        answer.shared for report in of(do.ReportNotReady, report) for answer in report.answers
    ] == [False]
    assert [
        answer.shared for report in of(do.ReportNotReady, more) for answer in report.answers
    ] == [True]


def test_an_answer_that_says_when_to_check_again_holds_no_longer_than_that():
    stage = Asked()
    (ask,) = of(do.CheckConditions, stage.claimed(1))
    stage.answer(ask, ways=(), wait=200 * MS)

    stage.now += 199 * MS
    assert of(do.CheckConditions, stage.claimed(2)) == []
    stage.now += MS
    assert len(of(do.CheckConditions, stage.claimed(3))) == 1


@pytest.mark.parametrize(("slots", "asked"), [(1, 1), (4, 1), (20, 2), (40, 4)])
def test_a_tenth_of_the_workers_is_asked_at_a_time(slots, asked):
    stage = Asked(slots)
    actions = stage.claimed(1, 2, 3, 4, 5, 6, j1=b"1", j2=b"2", j3=b"3", j4=b"4", j5=b"5", j6=b"6")
    assert len(of(do.CheckConditions, actions)) == asked
    (first, *_) = of(do.CheckConditions, actions)
    assert len(of(do.CheckConditions, stage.answer(first, ways=()))) == 1


def test_plain_jobs_go_on_beside_a_question():
    stage = Asked(2)
    stage.claimed(1)
    assert given(stage.brain.on_claimed([a_job(2)], CLAIM, stage.now)) == [2]


def test_a_condition_without_an_answer_within_a_second_is_killed_and_counts_as_raised():
    stage = Asked()
    (ask,) = of(do.CheckConditions, stage.claimed(1))
    assert of(do.SignalWorker, stage.tick(900 * MS)) == []
    assert of(do.SignalWorker, stage.tick(200 * MS)) == [do.SignalWorker(ask.slot, signal.SIGKILL)]

    gone = stage.brain.on_worker_ended(ask.slot, signal.SIGKILL, 0, 0, IDLE, stage.now)

    (report,) = of(do.ReportNotReady, gone)
    assert report.answers[0].error == "no answer within 1 s"
    assert report.answers[0].ending.crashes == 0


def test_a_worker_that_dies_of_a_question_takes_no_attempt_with_it():
    stage = Asked()
    (ask,) = of(do.CheckConditions, stage.claimed(1))
    gone = stage.brain.on_worker_ended(ask.slot, 3 << 8, 0, 0, IDLE, stage.now)
    (report,) = of(do.ReportNotReady, gone)
    assert report.answers[0].error == "its worker ended with 3"
    assert of(do.WriteEndings, gone) == []


def test_a_guard_that_dies_is_no_answer():
    stage = Asked()
    stage.claimed(1)
    gone = stage.brain.on_guard_died({}, stage.now)
    assert of(do.ReportNotReady, gone) == []
    assert stage.brain.claimed_ids() == [1]


def test_a_job_that_is_cancelled_while_it_is_asked_ends_with_the_answer():
    stage = Asked()
    (ask,) = of(do.CheckConditions, stage.claimed(1))
    stage.brain.on_cancel(1, "cancel", "enough", stage.now)
    (done,) = of(do.WriteEndings, stage.answer(ask, ways=()))
    assert [(end.id, end.state) for end in done.ended] == [(1, "cancelled")]


def test_a_condition_that_this_node_does_not_know_is_not_judged():
    stage = Asked()
    (report,) = of(do.ReportNotReady, stage.claimed(1, conditions=("closed",)))
    assert report.answers[0].unknown == "closed"


def test_a_drain_gives_back_what_is_not_asked_yet():
    stage = Asked()
    (ask,) = of(do.CheckConditions, stage.claimed(1, 2, j1=b"1", j2=b"2"))
    (back,) = of(do.WriteEndings, stage.brain.on_drain(stage.now))
    assert [end.id for end in back.ended] == [2]
    (last,) = of(do.WriteEndings, stage.answer(ask))
    assert [(end.id, end.state) for end in last.ended] == [(1, "waiting")]
