"""Conditions before a job starts.

Which worker checks them, for how long, and what the answer means.

A check is no attempt.  At most a tenth of the workers check at a time.  An answer holds for a
second, for all jobs with the same conditions, task, arguments and options.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from genba.domain.duration import SECOND
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
from genba.node.decide.results import headline, text_of
from genba.node.decide.state import NodeState, without_attempt
from genba.node.decide.worker_state import ClaimedJob, ConditionCheck, WorkerState
from genba.node.timing import CONDITION_CHECK_US
from genba.storage.jobs.conditions import ConditionAnswer, SlotRequest, check_key
from genba.storage.records import JobId, Micros

ANSWER_HOLDS_US = SECOND


class ConditionChecks:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self.known: frozenset[str] = frozenset()  # the conditions of this node's app
        self._serial = 0
        # By key: how long the answer holds, and what to do until then (None: start the job).
        self._answers: dict[str, tuple[Micros, ConditionAnswer | None]] = {}

    def check(self, actions: list[Action], now: Micros) -> None:
        """Decide about unchecked jobs by a recent answer, or have a free worker check."""
        self._answers = {
            key: (until, answer) for key, (until, answer) in self._answers.items() if now < until
        }
        checking = {w.check.key for w in self._state.by_slot.values() if w.check}
        not_ready: list[ConditionAnswer] = []
        left: list[ClaimedJob] = []
        while self._state.unchecked:
            claimed = self._state.unchecked.popleft()
            key = _key(claimed)
            unknown = next((n for n in claimed.options.ready if n not in self.known), None)
            if unknown is not None:
                not_ready.append(self._not_ready(claimed, key, now, unknown=unknown))
            elif key in self._answers:
                not_ready += self._as_answered(claimed, key, now)
            elif key in checking or not self._start(actions, claimed, key, len(checking), now):
                left.append(claimed)
            else:
                checking.add(key)
        self._state.unchecked.extend(left)
        if not_ready:
            actions.append(ReportNotReady(not_ready))

    def _as_answered(self, claimed: ClaimedJob, key: str, now: Micros) -> list[ConditionAnswer]:
        """Apply a recent answer to another job; gives what to write."""
        answer = self._answers[key][1]
        if answer is None:
            self._let_start(claimed)
            return []
        return [self._not_ready(claimed, key, now, wait=answer.wait, said=answer.said, shared=True)]

    def _start(
        self, actions: list[Action], claimed: ClaimedJob, key: str, checking: int, now: Micros
    ) -> bool:
        """Have a free worker check; False if there is none."""
        worker = self._state.free_worker() if checking < self._state.max_checks else None
        if worker is None:
            return False
        self._serial += 1
        worker.check = ConditionCheck(claimed, key, self._serial, now)
        worker.outstanding += 1
        worker.exclusive = worker.worked = True
        ready = claimed.options.ready
        actions.append(CheckConditions(worker.slot, self._serial, claimed.message(), ready))
        return True

    def on_checked(self, worker: WorkerState, answer: Sequence[Any], now: Micros) -> list[Action]:
        """Take [serial, ways, wait, said, error] from a worker.

        `ways` are the sets of limit slots with each of which the conditions hold; the empty set
        needs none.
        """
        serial, ways, wait, said, error = answer
        if worker.check is None or worker.check.serial != serial:
            return []
        if error is None and [] in ways:
            return self._hold(worker, now)
        if error is None and ways:
            return self._take_slots(worker, ways, now)
        return self._fail(worker, now, wait=wait, said=said, error=headline(text_of(error)))

    def _hold(self, worker: WorkerState, now: Micros) -> list[Action]:
        """Let the job start: its conditions hold."""
        check = self._end_check(worker, now)
        self._answers[check.key] = (now + ANSWER_HOLDS_US, None)
        self._let_start(check.claimed)
        return [ReportConditionsHold(check.key)]

    def _take_slots(self, worker: WorkerState, ways: Sequence[Any], now: Micros) -> list[Action]:
        """Let the job start if it gets slots; that answer is of no use to other jobs."""
        check = self._end_check(worker, now)
        claimed = check.claimed
        if claimed.job.id in self._state.cancelled:
            return [WriteEndings([self._state.ending_unstarted(claimed, Cause.CANCELLED, now)])]
        self._state.taking_slots[claimed.job.id] = claimed
        wanted = tuple(tuple((name, n) for name, n in way) for way in ways)
        return [TakeLimitSlots([SlotRequest(self._not_ready(claimed, check.key, now), wanted)])]

    def on_limit_slots(
        self, ours: Sequence[JobId], lost: Sequence[JobId], now: Micros
    ) -> list[Action]:
        """Let jobs that got slots start; other jobs with the same conditions may find some too."""
        for id in lost:
            self._state.taking_slots.pop(id, None)
            self._state.cancelled.pop(id, None)
        taking = self._state.taking_slots
        jobs = [taking.pop(id) for id in ours if id in taking]
        for claimed in jobs:
            claimed.checked = True
            # With a value, as its end has slots to free.
            claimed.job = claimed.job._replace(buckets=claimed.job.buckets or "[]")
        cancelled = self._state.put_back(jobs, now)
        hold: list[Action] = [ReportConditionsHold(key) for key in dict.fromkeys(map(_key, jobs))]
        return [WriteEndings(cancelled), *hold] if cancelled else hold

    def on_death(self, worker: WorkerState, status: int | None, now: Micros) -> list[Action]:
        """Put the death of a worker down to the conditions that it checked."""
        assert worker.check is not None
        if worker.check.late:
            error = f"no answer within {CONDITION_CHECK_US // SECOND} s"
        elif status is None:
            error = "its worker ended"
        elif os.WIFSIGNALED(status):
            error = f"its worker was killed by signal {os.WTERMSIG(status)}"
        else:
            error = f"its worker ended with {os.WEXITSTATUS(status)}"
        said = ", ".join(worker.check.claimed.options.ready)
        return self._fail(worker, now, said=said, error=error)

    def on_guard_died(self, worker: WorkerState, now: Micros) -> None:
        """Check again: the worker died with the guard, not of its check."""
        check = self._end_check(worker, now)
        self._state.unchecked.appendleft(check.claimed)

    def _fail(
        self,
        worker: WorkerState,
        now: Micros,
        *,
        wait: Micros | None = None,
        said: str | None = None,
        error: str | None = None,
    ) -> list[Action]:
        """Send the job back: its conditions do not hold, or could not be checked."""
        check = self._end_check(worker, now)
        claimed = check.claimed
        if claimed.job.id in self._state.cancelled:
            return [WriteEndings([self._state.ending_unstarted(claimed, Cause.CANCELLED, now)])]
        answer = self._not_ready(claimed, check.key, now, wait=wait, said=said, error=error)
        holds = ANSWER_HOLDS_US if wait is None else min(wait, ANSWER_HOLDS_US)
        self._answers[check.key] = (now + holds, answer)
        return [ReportNotReady([answer])]

    def _end_check(self, worker: WorkerState, now: Micros) -> ConditionCheck:
        check, worker.check = worker.check, None
        assert check is not None
        worker.outstanding -= 1
        worker.exclusive = False
        worker.idle_since = now
        return check

    def _let_start(self, claimed: ClaimedJob) -> None:
        claimed.checked = True
        self._state.queue_for(claimed).append(claimed)

    def _not_ready(
        self, claimed: ClaimedJob, key: str, now: Micros, **details: Any
    ) -> ConditionAnswer:
        end = AttemptEnd(cause=Cause.NOT_READY, started=False)
        ending = without_attempt(self._state.ending(claimed, end, now))
        return ConditionAnswer(
            ending=replace(ending, quiet=True),
            key=key,
            task=claimed.job.task,
            conditions=claimed.options.ready,
            **details,
        )

    def kill_late(self, actions: list[Action], now: Micros) -> None:
        """Kill workers that do not answer in time."""
        for worker in self._state.by_slot.values():
            check = worker.check
            if check is not None and now - check.since >= CONDITION_CHECK_US:
                check.late = True
                actions.append(SignalWorker(worker.slot, signal.SIGKILL))


def _key(claimed: ClaimedJob) -> str:
    job = claimed.job
    return check_key(job.task, claimed.options.ready, job.args, job.options)
