"""current_job(): what code inside a running job can read and request."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import msgspec

from genba.client.job_services import Inbox, OwnJobWrites
from genba.domain.duration import Duration, duration
from genba.domain.outcome import AttemptReport, OutcomeRequest
from genba.enqueue.arguments import encode_checkpoint
from genba.errors import BadOption, GenbaError, IllegalMove, Stopped, WaitWouldDeadlock
from genba.options.snapshot import OptionsSnapshot
from genba.signal_safe import defer_stop
from genba.wire import NOTE_LIMIT, JobMessage, SharedMemory

_current: ContextVar[Callable[[], RunningJob] | None] = ContextVar("genba_job", default=None)
# In a worker that runs one job at a time: seen by its threads too, as a ContextVar is not.
_only: list[Callable[[], RunningJob] | None] = [None]

_NO_RESULT = object()  # `succeed()` without one: the return value of the function is the result
_LONGEST_REASON = 8192


class JobHost(Protocol):
    """What a running job needs of its worker."""

    @property
    def memory(self) -> SharedMemory: ...

    def inside(self) -> OwnJobWrites: ...

    def deps(self, job_id: int) -> dict[int, Any]: ...

    def options(self, job_id: int) -> dict[str, Any]: ...

    def moment(self, value: Any) -> int: ...

    def clone(self, job_id: int, changes: dict[str, Any]) -> bytes: ...

    def encode_result(self, task: str, value: Any) -> tuple[bytes | None, str | None]: ...

    def by_name(self, task: str, payload: bytes) -> dict[str, Any]: ...

    def report(self, progress: str | None) -> AttemptReport: ...

    def log(self, text: str) -> None: ...

    def inbox(self, job: RunningJob) -> Inbox: ...

    def threads(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Run a blocking call in a thread, for the async methods."""
        ...

    def stopping(self) -> None:
        """Take note that the job knows it must stop, before the node could say so."""
        ...


class RequestedOutcome:
    """The outcome that a job has requested: applied at its return, or at once by `apply()`."""

    __slots__ = ("_job", "request")

    def __init__(self, request: OutcomeRequest, job: RunningJob) -> None:
        self.request = request
        self._job = job

    def __repr__(self) -> str:
        return f"<Outcome {self.request.wants}>"

    def apply(self) -> None:
        """End the job now; it is durable when this returns, whatever the code does after it.

        IllegalMove if an outcome is applied already, or a later request has replaced this one.
        """
        self._job._apply(self)

    async def aapply(self) -> None:
        await self._job._host.threads(self.apply)


class RunningJob:
    """The job that this code is part of."""

    def __init__(self, job: JobMessage, place: int, host: JobHost) -> None:
        self._job = job
        self._place = place
        self._host = host
        self._memory = host.memory
        self._extra = job.extra or (None, 0, 0, None)
        self._saved: bytes | None = self._extra[3]
        self._progress: tuple[float, float, bytes] | None = None
        self._requested: RequestedOutcome | None = None
        self._options: dict[str, Any] | None = None
        self._applied = False
        self.clones: list[bytes] = []
        self._open: OwnTransaction | None = None
        self._inbox: Inbox | None = None
        self._waits: list[Callable[[], Iterable[int]]] = []  # the jobs that each wait is for

    @property
    def id(self) -> int:
        return self._job.id

    @property
    def attempt(self) -> int:
        """1 for the first try."""
        return self._job.attempt

    @property
    def task(self) -> str:
        return self._job.task

    @property
    def args(self) -> dict[str, Any]:
        """The arguments by name, as plain JSON values."""
        return self._host.by_name(self._job.task, self._job.args)

    @property
    def options(self) -> dict[str, Any]:
        """Its queue and priority, and the options that are not the defaults, as `using` takes them.

        Times are seconds.  The first use reads the job from the database.
        """
        if self._options is None:
            self._options = self._host.options(self._job.id)
        return dict(self._options)

    async def aoptions(self) -> dict[str, Any]:
        """Return `options`, without blocking the event loop for the database."""
        options: dict[str, Any] = await self._host.threads(lambda: self.options)
        return options

    @property
    def traceparent(self) -> str | None:
        """The trace of this job as a W3C header, for requests of your own; None without a trace."""
        return OptionsSnapshot.read(self._extra[0].encode()).trace if self._extra[0] else None

    @property
    def retries(self) -> int:
        """The number of retries that the budget has lost."""
        return int(self._extra[1])

    @property
    def crashes(self) -> int:
        """The number of attempts at this job that crashed."""
        return int(self._extra[2])

    @property
    def fence(self) -> tuple[int, int, int]:
        """(id, attempt, claim): no two attempts ever have the same."""
        return self._job.id, self._job.attempt, self._job.claim

    @property
    def deps(self) -> dict[int, Any]:
        """The results of the jobs that this one waited for, by id."""
        return self._host.deps(self._job.id)

    async def adeps(self) -> dict[int, Any]:
        """Return `deps`, without blocking the event loop for the database."""
        results: dict[int, Any] = await self._host.threads(self._host.deps, self._job.id)
        return results

    @property
    def should_stop(self) -> bool:
        """Whether to stop soon: on a request, a drain of the node, or when the task is disabled."""
        return self._memory.should_stop(self._place)

    @property
    def cancel_requested(self) -> bool:
        """Whether this very job was asked to stop."""
        return self._memory.asked_to_stop() == self._place

    def progress(self, done: float, total: float = 100, note: str | None = None) -> None:
        """Report how far it is; this is cheap enough for every turn of a loop."""
        if not 0 <= done <= total < math.inf:
            raise ValueError(f"progress must lie between 0 and {total}, not {done!r}")
        text = b"" if note is None else note.encode(errors="replace")[:NOTE_LIMIT]
        self._progress = done, total, text
        self._memory.write_progress(self._place, done, total, text)

    def heartbeat(self) -> None:
        """Show that it is alive, without a change of the progress."""
        self._memory.beat()

    def log(self, *words: object) -> None:
        """Write a line with the time to the log of this attempt, as `print` and `logging` do."""
        self._host.log(" ".join(map(str, words)))

    # checkpoints

    def save(self, value: Any) -> None:
        """Save a checkpoint of plain JSON values, for `saved` of the next attempt at this job.

        It is durable when this returns; inside `transaction()`, with its commit.
        LeaseLost if this attempt is over.
        """
        checkpoint = encode_checkpoint(value)
        within = self._open.own if self._open else None
        self._host.inside().save(self.fence, checkpoint, within)
        self._saved = checkpoint

    async def asave(self, value: Any) -> None:
        await self._host.threads(self.save, value)

    @property
    def saved(self) -> Any:
        """The last checkpoint of this job, or None."""
        return None if self._saved is None else msgspec.json.decode(self._saved)["saved"]

    # messages

    def inbox(self, timeout: Duration | None = None) -> Any:
        """Wait for the next message of `job.send` to this job; the oldest comes first.

        None when the time is over, or when the job should stop.  A message is kept until it is
        received: the next attempt gets those that this one has not taken.  Inside `transaction()`
        it does not wait, and a message is received with the commit.
        """
        return self._mail().get(timeout)

    async def ainbox(self, timeout: Duration | None = None) -> Any:
        return await self._mail().aget(timeout)

    def _mail(self) -> Inbox:
        self._inbox = self._inbox or self._host.inbox(self)
        return self._inbox

    # a copy

    def clone(self, **changes: Any) -> None:
        """Request a copy of this job, which is enqueued with its success, and only then.

        `changes` are arguments of the task by name, or else job options as in `using`, or else
        arguments for the task's own `**kwargs`.  The copy is due at once, unless it says otherwise.
        `max_waiting` does not refuse it.
        """
        self._refuse_after_apply()
        self.clones.append(self._host.clone(self._job.id, changes))

    async def aclone(self, **changes: Any) -> None:
        await self._host.threads(self.clone, **changes)

    # requests for an outcome

    def succeed(self, result: Any = _NO_RESULT) -> RequestedOutcome:
        """Request success with this result; an exception after any request wins over it."""
        if result is _NO_RESULT:
            return self._request(OutcomeRequest(wants="succeed"))
        payload, why = self._host.encode_result(self._job.task, result)
        reason = f"the result could not be kept: {why}" if why else None
        return self._request(
            OutcomeRequest(wants="succeed", result=payload or b"null", reason=reason)
        )

    def fail(self, reason: str) -> RequestedOutcome:
        """Request to fail for good, whatever the retry budget says."""
        return self._request(OutcomeRequest(wants="fail", reason=_clean(reason)))

    def hold(self, reason: str) -> RequestedOutcome:
        """Request to be held until a person resumes it."""
        return self._request(OutcomeRequest(wants="hold", reason=_clean(reason)))

    def retry(
        self, at: Any = None, *, delay: Any = None, free: bool = True, reason: str | None = None
    ) -> RequestedOutcome:
        """Request another attempt, by default by the retry rule; `free` leaves the budget."""
        if at is not None and delay is not None:
            raise BadOption("at and delay exclude each other; give one of them")
        request = OutcomeRequest(
            wants="retry",
            reason=_clean(reason) if reason else None,
            at=None if at is None else self._host.moment(at),
            delay=None if delay is None else duration(delay),
            free=free,
        )
        return self._request(request)

    def _request(self, request: OutcomeRequest) -> RequestedOutcome:
        self._refuse_after_apply()
        self._requested = RequestedOutcome(request, self)
        return self._requested

    @defer_stop
    def _apply(self, outcome: RequestedOutcome) -> None:
        self._refuse_after_apply()
        if outcome is not self._requested:
            raise IllegalMove(f"job {self.id}: a later request has replaced this one")
        if self._open:
            raise IllegalMove(
                f"job {self.id}: inside transaction() the end of the block applies the outcome"
            )
        self._host.inside().end(self.fence, *self._ending())
        self._applied = True

    def _refuse_after_apply(self) -> None:
        if self._applied:
            raise IllegalMove(
                f"job {self.id}: the outcome of attempt {self.attempt} is applied already"
            )

    def _ending(self) -> tuple[OutcomeRequest, AttemptReport, float]:
        request = self._requested.request if self._requested else OutcomeRequest(wants="succeed")
        if request.wants == "succeed" and request.result is None:
            request = OutcomeRequest(wants="succeed", result=b"null", reason=request.reason)
        if request.wants == "succeed" and self.clones:
            request = replace(request, clones=tuple(self.clones))
        spread = random.random()  # noqa: S311  spreads retries
        return request, self._host.report(self.progress_json), spread

    def transaction(self) -> OwnTransaction:
        """Commit your writes, new jobs and the end of this job together: `with … as conn:`.

        It covers what the block writes on conn and enqueues with `conn=conn`; an exception in the
        block undoes all of it.  The job succeeds with the result of `succeed(…)`, or ends as it has
        requested, and code after the block cannot change that.  LeaseLost if this attempt is over.
        On SQLite the block may take 5 s, because all other writers wait.  `async with` opens and
        commits in a thread; what the block itself does on conn blocks.
        """
        return OwnTransaction(self)

    # for locks and messages

    @property
    def in_transaction(self) -> bool:
        return self._open is not None

    @property
    def own_transaction(self) -> Any:
        return self._open.own if self._open else None

    def lock(self) -> None:
        """Mark in the shared memory that this attempt takes locks."""
        self._memory.lock(self._place)

    # while it waits for other jobs

    @contextmanager
    def lending(self, awaited: Callable[[], Iterable[int]]) -> Iterator[None]:
        """Lend the slot of this job to other jobs of the node, until its last wait is over."""
        if not self._waits:
            self._memory.allow_wait()
        self._waits.append(awaited)
        self.write_awaited()
        self._memory.wait(self._place)
        try:
            yield
        finally:
            self._waits.remove(awaited)
            if self._waits:
                self.write_awaited()
            else:
                self._memory.wait(None)

    def write_awaited(self) -> None:
        """Show the node the jobs that this one waits for."""
        self._memory.write_awaited(id for awaited in [*self._waits] for id in awaited())

    def check_loan(self) -> None:
        """Raise WaitWouldDeadlock if the node has found that the wait cannot end."""
        if self._memory.refused(self._place):
            raise WaitWouldDeadlock(
                f"job {self.id} waits for other jobs, and so do all jobs of this node: "
                "no worker is left to run those jobs, here or on another node; "
                "give the node more workers, or use after= instead of waiting in a job"
            )

    # for the worker

    @property
    def applied(self) -> bool:
        return self._applied

    @property
    def request(self) -> OutcomeRequest | None:
        return self._requested.request if self._requested else None

    @property
    def progress_json(self) -> str | None:
        """The last progress, as it is stored."""
        if self._progress is None:
            return None
        done, total, text = self._progress
        return msgspec.json.encode(
            (float(done), float(total), text.decode(errors="replace"))
        ).decode()

    def leave(self) -> bool:
        """Close its inbox, and roll back an open transaction; True if there was one."""
        if self._inbox is not None:
            self._inbox.close()
        transaction = self._open
        if transaction is not None:
            with suppress(GenbaError):  # its time limit may have ended it before
                transaction.__exit__(RuntimeError, RuntimeError("left open"), None)
        return transaction is not None


class OwnTransaction:
    """The transaction of a running job."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self.own: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Any:
        job = self._job
        job._refuse_after_apply()
        if job._open:
            raise IllegalMove(f"job {job.id} has a transaction open already")
        own = self.own = job._host.inside().transaction(job.fence, job._ending)
        job._open = self
        try:
            return own.__enter__()
        except BaseException as error:  # raised again
            self.own = job._open = None
            if isinstance(error, Stopped):
                job._host.stopping()
            raise

    @defer_stop
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        own, self.own, self._job._open = self.own, None, None
        if own is not None:
            own.__exit__(kind, error, trace)
            self._job._applied = error is None

    async def __aenter__(self) -> Any:
        return await self._job._host.threads(self.__enter__)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._job._host.threads(self.__exit__, kind, error, trace)


def _clean(reason: str) -> str:
    """Leave out what a database refuses."""
    return str(reason).encode(errors="replace").decode().replace("\0", "\ufffd")[:_LONGEST_REASON]


def current_job() -> RunningJob:
    """Return the job that is running here; GenbaError if there is none."""
    job = find_job()
    if job is None:
        raise GenbaError("current_job() is for code that runs as a job; here no job is running")
    return job


def find_job() -> RunningJob | None:
    """Return the job that is running here, or None."""
    make = _current.get() or _only[0]
    return None if make is None else make()


def find_memory() -> SharedMemory | None:
    """Return the shared memory of the worker whose job is running here, or None."""
    job = find_job()
    return None if job is None else job._memory


def set_current_job_of_task(make: Callable[[], RunningJob]) -> None:
    """Set the job of this asyncio task, in a worker that runs several jobs at a time."""
    _current.set(make)


def set_current_job(make: Callable[[], RunningJob] | None) -> Callable[[], RunningJob] | None:
    """Set the job, in a worker that runs one at a time, and return the one before.

    `make` is called when code uses the job, which most jobs never do.
    """
    before, _only[0] = _only[0], make
    return before
