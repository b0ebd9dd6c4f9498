"""Evaluates the conditions of a job, before it starts."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from genba import wire
from genba.options.conditions import Candidate, Conditions, Readiness, arity, evaluate
from genba.options.snapshot import OptionsSnapshot
from genba.options.table import DEFAULT_OPTIONS, changed_options


class ConditionChecker:
    def __init__(
        self,
        conditions: Conditions,
        loop: Callable[[], asyncio.AbstractEventLoop],
        by_name: Callable[[str, bytes], dict[str, Any]],
    ) -> None:
        self._conditions = conditions
        self._loop = loop
        self._by_name = by_name
        self.name = "?"  # of the condition that is being evaluated

    def check(self, job: wire.JobMessage, names: Sequence[str]) -> Readiness:
        """What these conditions say of the job, all of them together."""
        self._named = {self._conditions.named[name]: name for name in names}
        return evaluate(
            [(name, fn) for fn, name in self._named.items()], self._candidate(job), self._call
        )

    def _call(self, fn: Callable[..., Any], job: Candidate) -> Any:
        self.name = self._named.get(fn, self.name)
        answer = fn(job) if arity(fn) else fn()
        return self._loop().run_until_complete(answer) if inspect.iscoroutine(answer) else answer

    def _candidate(self, job: wire.JobMessage) -> Candidate:
        options, retries, crashes, _ = job.extra or (None, 0, 0, None)
        return Candidate(
            id=job.id,
            task=job.task,
            args=self._by_name(job.task, job.args),
            options=changed_options(OptionsSnapshot.read(options.encode()).onto(DEFAULT_OPTIONS))
            if options
            else {},
            attempt=job.attempt,
            retries=retries,
            crashes=crashes,
        )
