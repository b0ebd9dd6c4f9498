"""Job: the handle a client holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast, overload

import msgspec

from genba.client.async_methods import handle_twin
from genba.client.message import encode
from genba.client.task import Call, Task
from genba.domain.duration import Duration, to_datetime
from genba.domain.states import FINAL, State
from genba.domain.untrusted_json import UNREADABLE, read_json
from genba.domain.verdict import LOWEST_PRIORITY
from genba.errors import BadOption, JobCancelled, JobFailed, JobGone, JobTimedOut
from genba.options.parse import parse_reason, parse_text
from genba.options.snapshot import OptionsSnapshot
from genba.options.table import DEFAULT_OPTIONS, JOB_OPTIONS, Options, changed_options
from genba.options.values import Limit, Rate
from genba.storage.records import AttemptRecord, JobRecord

if TYPE_CHECKING:
    from genba.client.client import Client
    from genba.enqueue.arguments import Arguments
    from genba.reports.explain import Explanation

R = TypeVar("R")


class Progress(float):
    """How far a job is, in percent; it knows what it was told."""

    done: float
    total: float
    note: str | None

    @classmethod
    def of(cls, text: str | None, state: str) -> Progress:
        done, total, note = read_json(
            text, tuple[float, float, str], (0.0, 100.0, UNREADABLE if text else "")
        )
        percent = 100.0 if state == State.SUCCEEDED else done / total * 100 if total else 0.0
        if state != State.SUCCEEDED:
            percent = min(percent, 99.9) if state in FINAL else percent
        made = cls(percent)
        made.done, made.total, made.note = done, total, note or None
        return made


class GroupProgress(float):
    """How much of a group has ended, in percent; it knows how many jobs are in which state."""

    done: int
    total: int
    states: Mapping[str, int]

    @classmethod
    def of(cls, states: Mapping[str, int], total: int) -> GroupProgress:
        done = sum(count for state, count in states.items() if state in FINAL)
        made = cls(done / total * 100 if total else 100.0)
        made.done, made.total, made.states = done, total, dict(states)
        return made


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
    cpu: float | None
    peak_memory: int | None
    error: dict[str, Any] | None
    log: str | None

    @classmethod
    def of(cls, row: AttemptRecord) -> Attempt:
        return cls(
            number=row.attempt,
            cause=row.cause,
            claimed=to_datetime(row.claimed_at) if row.claimed_at is not None else None,
            started=to_datetime(row.started_at) if row.started_at is not None else None,
            ended=to_datetime(row.ended_at),
            node=row.node,
            pid=row.pid,
            cpu=row.cpu / 1_000_000 if row.cpu is not None else None,
            peak_memory=row.peak * 1024 if row.peak is not None else None,
            error=_error(row.error),
            log=row.log,
        )


def _error(written: str | None) -> dict[str, Any] | None:
    if not written:
        return None
    told = read_json(written, dict[str, Any], {"type": UNREADABLE})
    whole: dict[str, Any] = {"type": "?", "message": "", **told}
    return whole if isinstance(whole.get("traceback", ""), str) else {**whole, "traceback": ""}


class Job(Generic[R]):
    """One requested run.  What it tells is what was last seen; `refresh()` looks again."""

    __slots__ = ("__weakref__", "_app", "_arguments", "_record", "created", "id")

    def __init__(
        self,
        app: Client,
        id: int,
        *,
        created: bool = False,
        arguments: Arguments | None = None,
        record: JobRecord | None = None,
    ) -> None:
        self._app = app
        self.id = id
        self.created = created
        self._arguments = arguments
        self._record = record

    def __repr__(self) -> str:
        seen = f" {self._record.task} {self._record.state}" if self._record else ""
        return f"<Job {self.id}{seen}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id and other._app is self._app

    def __hash__(self) -> int:
        return hash(self.id)

    # what was last seen

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
        """What counts in its queue: one less than was given for each crash since it was last resumed or requeued."""
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
        return self._app.by_name(self.record.task, self.record.args)

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
        """Since when a node has it, while it runs."""
        return to_datetime(self.record.claimed_at) if self.record.claimed_at is not None else None

    @property
    def finished(self) -> datetime | None:
        return to_datetime(self.record.finished_at) if self.record.finished_at is not None else None

    @property
    def retries(self) -> int:
        return self.record.retries

    @property
    def crashes(self) -> int:
        return self.record.crashes

    @property
    def attempts(self) -> list[Attempt]:
        """Every try that has ended, the first one first."""
        return [Attempt.of(row) for row in self._app.store.attempts(self.id)]

    def refresh(self) -> Job[R]:
        """Look again; JobGone if it was deleted meanwhile."""
        record = self._app.store.job(self.id)
        if record is None:
            raise JobGone(
                f"job {self.id} is not there any more: it was pruned, deleted, or never committed"
            )
        self._record = record
        return self

    arefresh = handle_twin(refresh)

    def explain(self) -> Explanation:
        """Why it is not running, who is in its way."""
        return self._app.explain(self.refresh())

    aexplain = handle_twin(explain)

    # waiting

    def wait(self, timeout: Duration | None = None, throw: bool = False) -> Job[R]:
        """Until it is final, however it ends, unless `throw` is said; WaitTimeout if that takes longer."""
        self._app.wait(self, timeout=timeout, throw=throw)
        return self.refresh()

    async def await_(self, timeout: Duration | None = None, throw: bool = False) -> Job[R]:
        await self._app.await_(self, timeout=timeout, throw=throw)
        return await self.arefresh()

    def result(self, timeout: Duration | None = None) -> R:
        """What it returned, once it has; JobFailed, JobTimedOut or JobCancelled if it did not."""
        return self.wait(timeout)._outcome()

    async def aresult(self, timeout: Duration | None = None) -> R:
        return (await self.await_(timeout))._outcome()

    def _outcome(self) -> R:
        record = self.record
        if record.state == State.SUCCEEDED:
            arguments = self._arguments or self._app.arguments_of(record.task)
            if arguments is not None:
                return cast("R", arguments.decode_result(record.result))
            return cast(
                "R", msgspec.json.decode(record.result) if record.result is not None else None
            )
        raise self.failure()

    def failure(self) -> JobFailed | JobCancelled:
        """The exception that tells how it ended."""
        record, error = self.record, self.error
        if record.state == State.CANCELLED:
            return JobCancelled(
                f"job {self.id} ({record.task}) was cancelled: {record.reason}", job_id=self.id
            )
        told = f"{error['type']}: {error['message']}" if error else record.reason or record.state
        kind = JobTimedOut if record.state == State.TIMED_OUT else JobFailed
        return kind(
            f"job {self.id} ({record.task}) {record.state}: {told}", job_id=self.id, error=error
        )

    # steering

    def cancel(self, reason: str | None = None, *, series: bool = False) -> bool:
        """Cancel it, or ask it to stop if it runs; False if it was final already.

        `series` ends the schedule too that made this job, if one did.
        """
        reason = parse_reason(reason)
        schedule = self.record.schedule_id if series else None
        if schedule is None:
            return self._app.store.cancel(self.id, reason)
        was_open = self.refresh().state not in FINAL
        self._app.store.schedules.end_series(schedule, self.id)
        return self._app.store.cancel(self.id, reason) or was_open

    acancel = handle_twin(cancel)

    def kill(self, reason: str | None = None) -> bool:
        """As cancel, but a running one gets no time to end by itself."""
        return self._app.store.cancel(self.id, parse_reason(reason), "kill")

    akill = handle_twin(kill)

    def hold(self, reason: str) -> bool:
        """Keep it from starting until `resume`; False if it has started or ended."""
        return self._app.store.hold(self.id, parse_text("reason", reason))

    ahold = handle_twin(hold)

    def resume(self) -> bool:
        """Let a held job go on; False if it was not held."""
        return self._app.store.resume(self.id)

    aresume = handle_twin(resume)

    def send(self, message: Any) -> None:
        """A message for `current_job().inbox()`, kept until the job takes it; IllegalMove if the job is final."""
        self._app.store.messages.send(self.id, encode(message))

    asend = handle_twin(send)

    def requeue(self) -> bool:
        """Run a final job again, with a fresh budget; False if it was not final."""
        return self._app.store.requeue(self.id)

    arequeue = handle_twin(requeue)

    def update(self, /, **changes: Any) -> bool:
        """Other options for a job that has not started; False if it has, or has ended.

        If a node claims it at the same moment the database decides who was first.
        """
        return self._app.update(self.id, changes)

    aupdate = handle_twin(update)


def copy_of(task: Task[..., Any, Any], record: JobRecord, changes: Mapping[str, Any]) -> Call[Any]:
    """A call like the one that this job came from, but for `changes`.

    A change is an argument that the task names, or else an option, or else goes to the task's `**kwargs`.
    """
    args, kwargs = task.arguments.decode(record.args)
    bound = task.arguments.signature.bind(*args, **kwargs)
    known = task.arguments.signature.parameters
    more = next((name for name, one in known.items() if one.kind is Parameter.VAR_KEYWORD), None)
    given = {name: value for name, value in changes.items() if name in known and name != more}
    others = {name: value for name, value in changes.items() if name not in given}
    bound.arguments.update(given)
    if more is not None:
        own = {name: others.pop(name) for name in list(others) if name not in JOB_OPTIONS}
        bound.arguments[more] = {**bound.arguments.get(more, {}), **own}
    options = replace(
        _options(record, task.options), at=None, expires=None, after=(), on_conflict="return"
    )
    payload = task.arguments.encode(bound.args, bound.kwargs)
    return Call(task.name, payload, Options.build(others, options), task.policy, task.arguments)


def options_of(record: JobRecord, limits: tuple[Limit | Rate, ...]) -> dict[str, Any]:
    """What `current_job().options` tells; `limits` are those of the task."""
    options = _options(record, replace(DEFAULT_OPTIONS, limits=limits))
    expires = None if record.expires_at is None else to_datetime(record.expires_at)
    return {
        "queue": record.queue,
        "priority": record.priority,
        **changed_options(replace(options, expires=expires)),
    }


def _options(record: JobRecord, base: Options) -> Options:
    return replace(
        OptionsSnapshot.read(record.options.encode() if record.options else None).onto(base),
        queue=record.queue,
        priority=record.priority,
        key=record.key,
        tags=tuple(read_json(record.tags, list[str], [])),
        parent=record.parent_id,
    )


Jobs: TypeAlias = "Job[Any] | Iterable[Jobs]"


def each_job(given: object) -> Iterator[Job[Any]]:
    """The jobs of a job, a group, or any iterable of such."""
    if isinstance(given, Job):
        yield given
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        for one in given:
            yield from each_job(one)
    else:
        raise BadOption(f"wait takes jobs, a group or any iterable of them, not {given!r:.80}")


class Group(Sequence[Job[R]]):
    """The jobs of one `enqueue_many`, in its order."""

    def __init__(self, app: Client, jobs: Sequence[Job[R]]) -> None:
        self._app = app
        self._jobs = jobs

    @overload
    def __getitem__(self, index: int) -> Job[R]: ...

    @overload
    def __getitem__(self, index: slice) -> Group[R]: ...

    def __getitem__(self, index: int | slice) -> Job[R] | Group[R]:
        return (
            Group(self._app, self._jobs[index]) if isinstance(index, slice) else self._jobs[index]
        )

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job[R]]:
        return iter(self._jobs)

    def __repr__(self) -> str:
        return f"<Group of {len(self)} jobs>"

    @property
    def progress(self) -> GroupProgress:
        """How many of them have ended, and how, as it is now."""
        return GroupProgress.of(
            Counter(self._app.store.states([job.id for job in self]).values()), len(self)
        )

    def cancel(self, reason: str | None = None) -> int:
        """Cancel all that have not ended, running ones are asked to stop; how many there were."""
        return self._app.store.cancel_all([job.id for job in self], parse_reason(reason))

    acancel = handle_twin(cancel)

    def requeue(self) -> int:
        """Go on from what failed: that runs again, and what was given up because of it waits for it again."""
        return self._app.store.requeue_failed([job.id for job in self])

    arequeue = handle_twin(requeue)

    def wait(
        self, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> Group[R]:
        """Until all (or "any") are final."""
        self._app.wait(self, timeout=timeout, until=until, throw=throw)
        return self

    async def await_(
        self, timeout: Duration | None = None, until: str = "all", throw: bool = False
    ) -> Group[R]:
        await self._app.await_(self, timeout=timeout, until=until, throw=throw)
        return self
