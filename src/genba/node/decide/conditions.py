"""Conditions before a job starts: whom they are asked of, for how long, and what the answer means.

A probe is no attempt: a worker is asked, has a second, and a tenth of the workers at most are asked at a time.  What
was heard holds for a second, for all jobs that ask the same.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from genba.domain.states import Cause
from genba.domain.verdict import AttemptEnd
from genba.node.decide.actions import (
    Action,
    CheckConditions,
    ReportConditionsHold,
    ReportNotReady,
    SignalWorker,
    TakeLimitSlots,
    WriteEndings,
)
from genba.node.decide.endings import headline, text_of, without_attempt
from genba.node.decide.state import SECOND, NodeState
from genba.node.decide.worker_state import ClaimedJob, RunningCheck, WorkerState
from genba.storage.jobs.conditions import ConditionAnswer, SlotRequest, check_key
from genba.storage.records import JobId, Micros

TIME = 1 * SECOND
FRESH = 1 * SECOND


class ConditionChecks:
    def __init__(self, floor: NodeState) -> None:
        self._floor = floor
        self.known: frozenset[str] = frozenset()  # the conditions of this node's app
        self._serial = 0
        self._heard: dict[
            str, tuple[Micros, ConditionAnswer | None]
        ] = {}  # by question, and since when; None: yes

    def ask(self, actions: list[Action], now: Micros) -> None:
        """Those that may start if their conditions hold: by what was heard just now, or by asking a free worker."""
        self._heard = {key: heard for key, heard in self._heard.items() if now - heard[0] < FRESH}
        asked = {hand.probe.key for hand in self._floor.hands.values() if hand.probe}
        answers: list[ConditionAnswer] = []
        left: list[ClaimedJob] = []
        while self._floor.unasked:
            held = self._floor.unasked.popleft()
            key = _question(held)
            unknown = next((name for name in held.options.ready if name not in self.known), None)
            if unknown is not None:
                answers.append(self._no(held, key, now, unknown=unknown))
            elif key in self._heard:
                answer = self._heard[key][1]
                if answer is None:
                    self._let_start(held)
                else:
                    answers.append(
                        self._no(held, key, now, wait=answer.wait, said=answer.said, shared=True)
                    )
            elif key in asked or not self._ask(actions, held, key, len(asked), now):
                left.append(held)
            else:
                asked.add(key)
        self._floor.unasked.extend(left)
        if answers:
            actions.append(ReportNotReady(answers))

    def _ask(
        self, actions: list[Action], held: ClaimedJob, key: str, asked: int, now: Micros
    ) -> bool:
        hand = self._floor.free() if asked < self._floor.probes else None
        if hand is None:
            return False
        self._serial += 1
        hand.probe = RunningCheck(held, key, self._serial, now)
        hand.outstanding += 1
        hand.alone = hand.worked = True
        actions.append(CheckConditions(hand.slot, self._serial, held.travel(), held.options.ready))
        return True

    def on_answer(self, hand: WorkerState, answer: Sequence[Any], now: Micros) -> list[Action]:
        """[serial, ways, wait, said, error], as the worker tells it."""
        serial, ways, wait, said, error = answer
        if hand.probe is None or hand.probe.serial != serial:
            return []
        if error is None and [] in ways:
            return self._yes(hand, now)
        if error is None and ways:
            return self._take(hand, ways, now)
        return self._end(hand, now, wait=wait, said=said, error=headline(text_of(error)))

    def _yes(self, hand: WorkerState, now: Micros) -> list[Action]:
        probe = self._leave(hand, now)
        self._heard[probe.key] = (now, None)
        self._let_start(probe.held)
        return [ReportConditionsHold(probe.key)]

    def _take(self, hand: WorkerState, ways: Sequence[Any], now: Micros) -> list[Action]:
        """Yes, if it can have slots; nobody else can use that answer."""
        probe = self._leave(hand, now)
        held = probe.held
        if held.job.id in self._floor.cancelled:
            return [WriteEndings([self._floor.unstarted(held, Cause.CANCELLED, now)])]
        self._floor.taking[held.job.id] = held
        wanted = tuple(tuple((name, n) for name, n in way) for way in ways)
        return [TakeLimitSlots([SlotRequest(self._no(held, probe.key, now), wanted)])]

    def on_slots(self, ours: Sequence[JobId], lost: Sequence[JobId], now: Micros) -> list[Action]:
        """Those that have slots may start; others who ask the same may find some, too."""
        for id in lost:
            self._floor.taking.pop(id, None)
            self._floor.cancelled.pop(id, None)
        back = [self._floor.taking.pop(id) for id in ours if id in self._floor.taking]
        for held in back:
            held.asked = True
            held.job = held.job._replace(
                buckets=held.job.buckets or "[]"
            )  # its end has slots to free
        cancelled = self._floor.put_back(back, now)
        opened: list[Action] = [
            ReportConditionsHold(key) for key in dict.fromkeys(map(_question, back))
        ]
        return [WriteEndings(cancelled), *opened] if cancelled else opened

    def on_death(self, hand: WorkerState, status: int | None, now: Micros) -> list[Action]:
        """The worker that was asked is dead: by the question, for all we know."""
        assert hand.probe is not None
        if hand.probe.late:
            error = f"no answer within {TIME // SECOND} s"
        elif status is not None and os.WIFSIGNALED(status):
            error = f"its worker was killed by signal {os.WTERMSIG(status)}"
        else:
            error = (
                "its worker ended"
                if status is None
                else f"its worker ended with {os.WEXITSTATUS(status)}"
            )
        return self._end(hand, now, said=", ".join(hand.probe.held.options.ready), error=error)

    def on_guard_died(self, hand: WorkerState, now: Micros) -> None:
        """Nobody's fault: it is asked again."""
        probe = self._leave(hand, now)
        self._floor.unasked.appendleft(probe.held)

    def _end(
        self,
        hand: WorkerState,
        now: Micros,
        *,
        wait: Micros | None = None,
        said: str | None = None,
        error: str | None = None,
    ) -> list[Action]:
        probe = self._leave(hand, now)
        if probe.held.job.id in self._floor.cancelled:
            return [WriteEndings([self._floor.unstarted(probe.held, Cause.CANCELLED, now)])]
        answer = self._no(probe.held, probe.key, now, wait=wait, said=said, error=error)
        self._heard[probe.key] = (now, answer)
        return [ReportNotReady([answer])]

    def _leave(self, hand: WorkerState, now: Micros) -> RunningCheck:
        probe, hand.probe = hand.probe, None
        assert probe is not None
        hand.outstanding -= 1
        hand.alone = False
        hand.idle_since = now
        return probe

    def _let_start(self, held: ClaimedJob) -> None:
        held.asked = True
        self._floor.pile_of(held).append(held)

    def _no(self, held: ClaimedJob, key: str, now: Micros, **told: Any) -> ConditionAnswer:
        end = AttemptEnd(cause=Cause.NOT_READY, started=False)
        return ConditionAnswer(
            ending=replace(without_attempt(self._floor.ending(held, end, now)), quiet=True),
            key=key,
            task=held.job.task,
            conditions=held.options.ready,
            **told,
        )

    def watch(self, actions: list[Action], now: Micros) -> None:
        """Who does not answer in time is ended."""
        for hand in self._floor.hands.values():
            probe = hand.probe
            if probe is not None and now - probe.since >= TIME:
                probe.late = True
                actions.append(SignalWorker(hand.slot, signal.SIGKILL))


def _question(held: ClaimedJob) -> str:
    job = held.job
    return check_key(job.task, held.options.ready, job.args, job.options)
