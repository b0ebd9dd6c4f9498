"""The snapshot of options that is stored with a job at its enqueue, for nodes and workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import msgspec

from genba.domain.duration import Micros
from genba.domain.retry import Retry
from genba.options.parse import KeepTimes
from genba.options.table import (
    DEFAULT_OPTIONS,
    DEFAULT_POLICY,
    History,
    OnDependencyFailure,
    OnException,
    Options,
    Policy,
)
from genba.options.values import Limit, Rate

# Of a Limit: bucket, n, ordered.  Of a Rate: bucket, rate, burst.
StoredLimit: TypeAlias = tuple[str | None, int | str, bool | int | None]


class OptionsSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=False):
    """The job's options and its task's policy that nodes and workers need, as of the enqueue.

    Only values that differ from the defaults are written, so most jobs have no snapshot.  Therefore
    a released default may change only for jobs that are not yet enqueued, by way of a migration.
    """

    timeout: Micros | None = None
    grace: Micros = DEFAULT_OPTIONS.grace
    stall_timeout: Micros | None = None
    retry: dict[str, Any] = {}
    memory: int | None = None
    cpu: Micros | None = None
    max_crashes: int = DEFAULT_POLICY.max_crashes
    on_exception: OnException = DEFAULT_POLICY.on_exception
    at_most_once: bool = False
    explicit_outcome: bool = False
    dedicated: bool = False
    on_dependency_failure: OnDependencyFailure = DEFAULT_OPTIONS.on_dependency_failure
    unique_for: Micros | None = None
    keep: KeepTimes = DEFAULT_POLICY.keep
    once: bool | Literal["task", "waiting"] = False
    progress_every: Micros = DEFAULT_POLICY.progress_every
    history: History = DEFAULT_POLICY.history
    on_final: str | None = None
    ready: tuple[str, ...] = ()
    limits: tuple[StoredLimit, ...] | None = None  # None: the limits of its task
    trace: str | None = None  # the traceparent of the code that enqueued the job

    @classmethod
    def of(
        cls, options: Options, policy: Policy, task_limits: Sequence[Limit | Rate] | None = None
    ) -> OptionsSnapshot:
        """Take a snapshot.

        With `task_limits`, limits that differ from those of the task are stored, so that a copy of
        the job has the same limits as the job.
        """
        same_limits = task_limits is None or options.limits == task_limits
        return cls(
            timeout=options.timeout,
            grace=options.grace,
            stall_timeout=options.stall_timeout,
            retry={} if options.retry == DEFAULT_OPTIONS.retry else options.retry.to_json(),
            memory=options.memory,
            cpu=options.cpu,
            max_crashes=policy.max_crashes,
            on_exception=policy.on_exception,
            at_most_once=policy.at_most_once,
            explicit_outcome=policy.explicit_outcome,
            dedicated=options.dedicated,
            on_dependency_failure=options.on_dependency_failure,
            unique_for=options.unique_for,
            keep=policy.keep,
            once=options.once,
            progress_every=policy.progress_every,
            history=policy.history,
            on_final=policy.on_final,
            ready=options.ready,
            limits=None if same_limits else tuple(map(_stored_limit, options.limits)),
        )

    @classmethod
    def read(cls, stored: bytes | None) -> OptionsSnapshot:
        """Decode what `encode_snapshot` wrote; fields of a newer version are ignored."""
        return _DEFAULT_SNAPSHOT if stored is None else _decode(stored)

    def onto(self, options: Options) -> Options:
        """Return `options` with those of the job."""
        return replace(
            options,
            retry=self.retry_rule(),
            timeout=self.timeout,
            grace=self.grace,
            stall_timeout=self.stall_timeout,
            memory=self.memory,
            cpu=self.cpu,
            on_dependency_failure=self.on_dependency_failure,
            dedicated=self.dedicated,
            ready=self.ready,
            limits=self.limits_or(options.limits),
            once=self.once,
            unique_for=self.unique_for,
        )

    def limits_or(self, task_limits: tuple[Limit | Rate, ...]) -> tuple[Limit | Rate, ...]:
        """Return the limits of the job, or those of its task if they are the same."""
        if self.limits is None:
            return task_limits
        return tuple(map(_read_limit, self.limits))

    def retry_rule(self) -> Retry:
        """Return the job's retry rule."""
        return Retry.from_json(self.retry) if self.retry else DEFAULT_OPTIONS.retry


_DEFAULT_SNAPSHOT = OptionsSnapshot()
_decode = msgspec.json.Decoder(OptionsSnapshot).decode


def encode_snapshot(
    options: Options,
    policy: Policy,
    task_limits: Sequence[Limit | Rate] | None = None,
    trace: str | None = None,
) -> bytes | None:
    """Encode the options that are stored with a job; None if all are defaults and without trace."""
    snapshot = OptionsSnapshot.of(options, policy, task_limits)
    if trace is not None:
        snapshot = msgspec.structs.replace(snapshot, trace=trace)
    encoded = msgspec.json.encode(snapshot)
    return None if encoded == b"{}" else encoded


def _stored_limit(limit: Limit | Rate) -> StoredLimit:
    if isinstance(limit, Limit):
        return limit.bucket, limit.n, limit.ordered
    return limit.bucket, limit.rate, limit.burst


def _read_limit(stored: StoredLimit) -> Limit | Rate:
    bucket, count, more = stored
    if isinstance(count, int):
        return Limit(str(bucket), count, bool(more))
    return Rate(bucket, count, more)
