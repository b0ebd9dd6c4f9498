"""Job: the handle of one requested run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

import msgspec

from genba.client.async_methods import async_method
from genba.client.connection import ClientConnection
from genba.client.job_options import update_options
from genba.client.message import encode
from genba.client.waiting import looks_once, wait_timeout
from genba.domain.duration import Duration, Micros, to_datetime
from genba.domain.states import FINAL, State
from genba.domain.untrusted_json import UNREADABLE, read_json
from genba.domain.verdict import LOWEST_PRIORITY
from genba.enqueue.arguments import Arguments
from genba.enqueue.call import JobHandle
from genba.errors import (
    BadOption,
    JobCancelled,
    JobFailed,
    JobGone,
    JobNotFound,
    JobTimedOut,
    WaitTimeout,
)
from genba.options.parse import parse_job_id, parse_reason, parse_text
from genba.reports.explain import Explanation, explain
from genba.storage.records import AttemptRecord, JobRecord

R = TypeVar("R")


class Progress(float):
    """How far a job is, in percent, with the values that it reported."""

    done: float
    total: float
    note: str | None

    @classmethod
    def of(cls, text: str | None, state: str) -> Progress:
        done, total, note = read_json(
            text, tuple[float, float, str], (0.0, 100.0, UNREADABLE if text else "")
        )
        percent = 100.0 if state == State.SUCCEEDED else done / total * 100 if total else 0.0
        if state in FINAL and state != State.SUCCEEDED:
            percent = min(percent, 99.9)
        progress = cls(percent)
        progress.done, progress.total, progress.note = done, total, note or None
        return progress


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a job that has ended, and what ended it."""

    number: int
    cause: str
    claimed: datetime | None
    started: datetime | None
    ended: datetime
    node: int | None
    pid: int | None
    cpu: float | None  # seconds
    peak_memory: int | None  # bytes
    error: dict[str, Any] | None
    log: str | None

    @classmethod
    def of(cls, row: AttemptRecord) -> Attempt:
        return cls(
            number=row.attempt,
            cause=row.cause,
            claimed=_datetime(row.claimed_at),
            started=_datetime(row.started_at),
            ended=to_datetime(row.ended_at),
            node=row.node,
            pid=row.pid,
            cpu=row.cpu / 1_000_000 if row.cpu is not None else None,
            peak_memory=row.peak * 1024 if row.peak is not None else None,
            error=_error(row.error),
            log=row.log,
        )


def _datetime(micros: Micros | None) -> datetime | None:
    return to_datetime(micros) if micros is not None else None


def _error(written: str | None) -> dict[str, Any] | None:
    if not written:
        return None
    stored = read_json(written, dict[str, Any], {"type": UNREADABLE})
    error: dict[str, Any] = {"type": "?", "message": "", **stored}
    return error if isinstance(error.get("traceback", ""), str) else {**error, "traceback": ""}


class Job(JobHandle, Generic[R]):
    """One requested run.  Its attributes are as last seen; `refresh()` reads them again."""

    __slots__ = ("__weakref__", "_arguments", "_connection", "_record", "created")

    def __init__(
        self,
        connection: ClientConnection,
        id: int,
        *,
        created: bool = False,
        arguments: Arguments | None = None,
        record: JobRecord | None = None,
    ) -> None:
        self._connection = connection
        self.id = id
        self.created = created
        self._arguments = arguments
        self._record = record

    def __repr__(self) -> str:
        seen = f" {self._record.task} {self._record.state}" if self._record else ""
        return f"<Job {self.id}{seen}>"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Job) and other.id == self.id and other._connection is self._connection
        )

    def __hash__(self) -> int:
        return hash(self.id)

    # as last seen

    @property
    def record(self) -> JobRecord:
        if self._record is None:
            self.refresh()
        assert self._record is not None
        return self._record

    @property
    def state(self) -> State:
        return State(self.record.state)

    @property
    def task(self) -> str:
        return self.record.task

    @property
    def queue(self) -> str:
        return self.record.queue

    @property
    def priority(self) -> int:
        """The priority that counts: one less for each crash since the last resume or requeue."""
        return max(LOWEST_PRIORITY, self.record.priority - self.record.crashes)

    @property
    def key(self) -> str | None:
        return self.record.key

    @property
    def tags(self) -> list[str]:
        return read_json(self.record.tags, list[str], [UNREADABLE] if self.record.tags else [])

    @property
    def args(self) -> dict[str, Any]:
        """The arguments by name, as plain JSON values."""
        return self._connection.by_name(self.record.task, self.record.args)

    @property
    def reason(self) -> str | None:
        """Why it is held, cancelled or failed."""
        return self.record.reason

    @property
    def error(self) -> dict[str, Any] | None:
        """The last error: type, message, traceback, causes."""
        return _error(self.record.error)

    @property
    def progress(self) -> Progress:
        return Progress.of(self.record.progress, self.record.state)

    @property
    def due(self) -> datetime:
        return to_datetime(self.record.due_at)

    @property
    def enqueued(self) -> datetime:
        return to_datetime(self.record.created_at)

    @property
    def claimed(self) -> datetime | None:
        """When its node claimed it; None unless it is running."""
        return _datetime(self.record.claimed_at)

    @property
    def finished(self) -> datetime | None:
        return _datetime(self.record.finished_at)

    @property
    def retries(self) -> int:
        return self.record.retries

    @property
    def crashes(self) -> int:
        return self.record.crashes

    @property
    def attempts(self) -> list[Attempt]:
        """All attempts that have ended, the first one first."""
        return [Attempt.of(row) for row in self._connection.store.attempts_of(self.id)]

    def refresh(self) -> Job[R]:
        """Read it again; JobGone if it was deleted meanwhile."""
        record = self._connection.store.job(self.id)
        if record is None:
            raise JobGone(f"job {self.id} is gone: it was pruned, deleted, or never committed")
        self._record = record
        return self

    arefresh = async_method(refresh)

    def explain(self) -> Explanation:
        """Explain why it is not running, and what it waits for."""
        return explain_record(self._connection, self.refresh().record)

    aexplain = async_method(explain)

    # waiting

    def wait(self, timeout: Duration | None = None, throw: bool = False) -> Job[R]:
        """Wait until it is final; WaitTimeout if that takes longer.

        How it ended makes no difference, unless `throw` is true.  `timeout=0` looks once.
        """
        if looks_once(timeout) and self._connection.test is None:
            return self._look(timeout, throw)
        wait_for(self._connection, [self], timeout, "all", throw)
        return self.refresh()

    def _look(self, timeout: Duration | None, throw: bool) -> Job[R]:
        """Read it once, with its result; WaitTimeout if it is not final."""
        state = self.refresh().state
        if state not in FINAL:
            raise _explained(self._connection, wait_timeout([self.id], 1, timeout), self.record)
        if throw and state != State.SUCCEEDED:
            raise self.failure()
        return self

    async def await_(self, timeout: Duration | None = None, throw: bool = False) -> Job[R]:
        if looks_once(timeout) and self._connection.test is None:
            return await self._connection.threads(self._look, timeout, throw)
        await await_for(self._connection, [self], timeout, "all", throw)
        return await self.arefresh()

    def result(self, timeout: Duration | None = None) -> R:
        """Wait, and return the result; JobFailed, JobTimedOut or JobCancelled if there is none."""
        return self.wait(timeout)._result()

    async def aresult(self, timeout: Duration | None = None) -> R:
        return (await self.await_(timeout))._result()

    def _result(self) -> R:
        record = self.record
        if record.state != State.SUCCEEDED:
            raise self.failure()
        arguments = self._arguments or self._connection.arguments_of(record.task)
        if arguments is not None:
            return cast("R", arguments.decode_result(record.result))
        return cast("R", msgspec.json.decode(record.result) if record.result is not None else None)

    def failure(self) -> JobFailed | JobCancelled:
        """The exception that says how it ended."""
        record, error = self.record, self.error
        if record.state == State.CANCELLED:
            return JobCancelled(
                f"job {self.id} ({record.task}) was cancelled: {record.reason}", job_id=self.id
            )
        why = f"{error['type']}: {error['message']}" if error else record.reason or record.state
        kind = JobTimedOut if record.state == State.TIMED_OUT else JobFailed
        return kind(
            f"job {self.id} ({record.task}) {record.state}: {why}", job_id=self.id, error=error
        )

    # changing it

    def cancel(self, reason: str | None = None, *, series: bool = False) -> bool:
        """Cancel it, or ask it to stop if it runs; False if it was final already.

        `series` also ends the schedule that made this job, if there is one.
        """
        store, reason = self._connection.store, parse_reason(reason)
        schedule = self.record.schedule_id if series else None
        if schedule is None:
            return store.cancel(self.id, reason)
        was_open = self.refresh().state not in FINAL
        store.schedules.end_series(schedule, self.id)
        return store.cancel(self.id, reason) or was_open

    acancel = async_method(cancel)

    def kill(self, reason: str | None = None) -> bool:
        """Cancel it without giving a running one time to end by itself."""
        return self._connection.store.cancel(self.id, parse_reason(reason), "kill")

    akill = async_method(kill)

    def hold(self, reason: str) -> bool:
        """Keep it from starting until `resume`; False if it has started or ended."""
        return self._connection.store.hold(self.id, parse_text("reason", reason))

    ahold = async_method(hold)

    def resume(self) -> bool:
        """Let a held job go on; False if it was not held."""
        return self._connection.store.resume(self.id)

    aresume = async_method(resume)

    def send(self, message: Any) -> None:
        """Send a message to `current_job().inbox()`; IllegalMove if the job is final.

        It is kept until the job takes it.
        """
        self._connection.store.messages.send(self.id, encode(message))

    asend = async_method(send)

    def requeue(self) -> bool:
        """Run a final job again, with a fresh budget; False if it was not final."""
        return self._connection.store.requeue(self.id)

    arequeue = async_method(requeue)

    def update(self, /, **changes: Any) -> bool:
        """Change options of a job that has not started; False if it has, or has ended.

        If a node claims it at the same moment, the database decides which comes first.
        """
        connection = self._connection
        return update_options(connection.store, self.id, changes, connection.settings.zone)

    aupdate = async_method(update)


def get_job(
    connection: ClientConnection, id: int | None = None, key: str | None = None
) -> Job[Any]:
    """Return the handle of an existing job; JobNotFound if there is none."""
    if (id is None) == (key is None):
        raise BadOption("job() takes an id, or key=…")
    if key is None:
        record = connection.store.job(parse_job_id("id", id))
    else:
        record = connection.store.job(key=parse_text("key", key))
    if record is None:
        raise JobNotFound(f"there is no job {id if key is None else f'with key {key!r}'}")
    return Job(connection, record.id, record=record)


def explain_record(connection: ClientConnection, record: JobRecord) -> Explanation:
    test = connection.test
    return explain(connection.store, record, None if test is None else test.task_names)


# waiting for several


def wait_for(
    connection: ClientConnection,
    jobs: Sequence[Job[Any]],
    timeout: Duration | None,
    until: str,
    throw: bool,
) -> list[Job[Any]]:
    """Wait until all (or "any") of these are final, and return those that are."""
    ids, waits = [job.id for job in jobs], connection.wait_thread
    if connection.test is not None:
        connection.test.wait(jobs, until)
        return _final_jobs(jobs, connection.store.states(ids) if ids else {}, throw)
    try:
        wait = waits.look if looks_once(timeout) else waits.wait
        ended = wait(ids, until, throw, timeout)
    except WaitTimeout as error:
        raise _explained(connection, error) from None
    return _final_jobs(jobs, ended, throw)


async def await_for(
    connection: ClientConnection,
    jobs: Sequence[Job[Any]],
    timeout: Duration | None,
    until: str,
    throw: bool,
) -> list[Job[Any]]:
    if connection.test is not None or looks_once(timeout):
        return await connection.threads(wait_for, connection, jobs, timeout, until, throw)
    try:
        ended = await connection.wait_thread.await_([job.id for job in jobs], until, throw, timeout)
    except WaitTimeout as error:
        raise await connection.threads(_explained, connection, error) from None
    if throw:
        return await connection.threads(_final_jobs, jobs, ended, throw)
    return _final_jobs(jobs, ended, throw)


def _final_jobs(jobs: Sequence[Job[Any]], states: Mapping[int, str], throw: bool) -> list[Job[Any]]:
    final = [job for job in jobs if states.get(job.id) in FINAL]
    if throw:
        for job in final:
            if states[job.id] != State.SUCCEEDED:
                raise job.refresh().failure()
    return final


def _explained(
    connection: ClientConnection, error: WaitTimeout, record: JobRecord | None = None
) -> WaitTimeout:
    """Add why the first open job is not final; without that reason, return the error as it is."""
    id = error.job_id
    try:
        if record is None and id is not None:
            record = connection.store.job(id)
        if record is None:
            return error
        explanation = explain_record(connection, record)
        return WaitTimeout(f"{error}: {explanation}", job_id=id, explanation=explanation)
    except Exception:  # noqa: BLE001  the timeout must be raised, whatever became of the database
        return error
