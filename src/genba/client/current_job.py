"""current_job(): what running code may ask."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

import msgspec

from genba.domain.duration import Duration, duration
from genba.domain.outcome import AttemptReport, Fence, OutcomeRequest
from genba.enqueue.arguments import encode_checkpoint
from genba.errors import BadOption, GenbaError, IllegalMove, Stopped, WaitWouldDeadlock
from genba.options.snapshot import OptionsSnapshot
from genba.signal_safe import defer_stop
from genba.wire import NOTE_LIMIT, JobMessage, SharedMemory

_current: ContextVar[Callable[[], RunningJob] | None] = ContextVar("genba_job", default=None)
_only: list[Callable[[], RunningJob] | None] = [
    None
]  # of a worker that runs one job at a time, for its threads too


_NOTHING = object()  # no result given: what the function returns is the result


class OwnJobWrites(Protocol):
    """The store, as far as a running job may write about itself."""

    def save(self, fence: Fence, checkpoint: bytes, within: Any = None) -> None: ...

    def end(
        self, fence: Fence, wish: OutcomeRequest, report: AttemptReport, jitter: float
    ) -> None: ...

    def transaction(
        self, fence: Fence, told: Callable[[], tuple[OutcomeRequest, AttemptReport, float]]
    ) -> AbstractContextManager[Any]: ...


class Inbox(Protocol):
    """The messages to a running job."""

    def get(self, timeout: Duration | None) -> Any: ...

    async def aget(self, timeout: Duration | None) -> Any: ...

    def close(self) -> None: ...


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
        """For the a-twins: what blocks, in a thread."""
        ...

    def stopping(self) -> None:
        """The job has heard, before the node could tell, that it shall stop."""
        ...


class RequestedOutcome:
    """What a job has asked to end with: so it ends when its function returns, or at once by `apply()`."""

    __slots__ = ("_job", "wish")

    def __init__(self, wish: OutcomeRequest, job: RunningJob) -> None:
        self.wish = wish
        self._job = job

    def __repr__(self) -> str:
        return f"<Outcome {self.wish.wants}>"

    def apply(self) -> None:
        """End the job now; durable when it returns.  Code that goes on after it has nothing more to say.

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
        self._told: tuple[float, float, bytes] | None = None
        self._asked: RequestedOutcome | None = None
        self._options: dict[str, Any] | None = None
        self._applied = False
        self.clones: list[bytes] = []
        self._open: OwnTransaction | None = None
        self._inbox: Inbox | None = None

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
        """Its queue and priority, and the other job options that are not as usual; times in seconds.

        As `using` takes them.  The first look reads the job from the database.
        """
        if self._options is None:
            self._options = self._host.options(self._job.id)
        return dict(self._options)

    async def aoptions(self) -> dict[str, Any]:
        """`options`, for a loop that must not wait for the database."""
        found: dict[str, Any] = await self._host.threads(lambda: self.options)
        return found

    @property
    def traceparent(self) -> str | None:
        """The trace that this job belongs to, as W3C writes it: for a header of your own; None if nobody traces it."""
        return OptionsSnapshot.read(self._extra[0].encode()).trace if self._extra[0] else None

    @property
    def retries(self) -> int:
        """How many retries of the budget are used."""
        return int(self._extra[1])

    @property
    def crashes(self) -> int:
        """How often an attempt at this job died."""
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
        """`deps`, for a loop that must not wait for the database."""
        results: dict[int, Any] = await self._host.threads(self._host.deps, self._job.id)
        return results

    @property
    def should_stop(self) -> bool:
        """True when this job was asked to stop, its node drains, or its task was disabled: finish what is at hand."""
        return self._memory.should_stop(self._place)

    @property
    def cancel_requested(self) -> bool:
        """True when this very job was asked to stop."""
        return self._memory.asked_to_stop() == self._place

    def progress(self, done: float, total: float = 100, note: str | None = None) -> None:
        """Tell how far it is; cheap enough for every turn of a loop."""
        if not 0 <= done <= total < math.inf:
            raise ValueError(f"progress must lie between 0 and {total}, not {done!r}")
        text = b"" if note is None else note.encode(errors="replace")[:NOTE_LIMIT]
        self._told = done, total, text
        self._memory.note(self._place, done, total, text)

    def heartbeat(self) -> None:
        """Say that it is alive, and leave the progress alone."""
        self._memory.beat()

    def log(self, *words: object) -> None:
        """A line for the log of this attempt, with the time; `print` and `logging` go there too."""
        self._host.log(" ".join(map(str, words)))

    # checkpoints

    def save(self, value: Any) -> None:
        """A checkpoint: the next attempt at this job finds it in `saved`, whatever becomes of this one.

        Plain JSON values only.  Durable when it returns; inside `transaction()`, with its commit.
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
        """The next message that `job.send` has sent to this job, oldest first; waits for one.

        None when the time is over, or when the job should stop.  A message is kept until it is received: those that
        this attempt has not taken wait for the next one.  Inside `transaction()` it does not wait, and a message is
        received with the commit.
        """
        return self._mail().get(timeout)

    async def ainbox(self, timeout: Duration | None = None) -> Any:
        return await self._mail().aget(timeout)

    def _mail(self) -> Inbox:
        self._inbox = self._inbox or self._host.inbox(self)
        return self._inbox

    # what comes after it

    def clone(self, **changes: Any) -> None:
        """Ask for a copy of this job, which is enqueued in the transaction of its success, and only then.

        `changes` are arguments of the task by name, or else job options as in `using`, or else what the task's own
        `**kwargs` takes; the copy is due at once, unless it says otherwise.  `max_waiting` does not refuse it.
        """
        self._refuse_after_apply()
        self.clones.append(self._host.clone(self._job.id, changes))

    async def aclone(self, **changes: Any) -> None:
        await self._host.threads(self.clone, **changes)

    # how it shall end

    def succeed(self, result: Any = _NOTHING) -> RequestedOutcome:
        """Ask to end well, with this result; an exception that comes later is stronger, as it is than any request."""
        if result is _NOTHING:
            return self._ask(OutcomeRequest(wants="succeed"))
        payload, lost = self._host.encode_result(self._job.task, result)
        reason = f"the result could not be kept: {lost}" if lost else None
        return self._ask(OutcomeRequest(wants="succeed", result=payload or b"null", reason=reason))

    def fail(self, reason: str) -> RequestedOutcome:
        """Ask to fail for good, whatever the retry budget says."""
        return self._ask(OutcomeRequest(wants="fail", reason=_clean(reason)))

    def hold(self, reason: str) -> RequestedOutcome:
        """Ask to be held until a person resumes it."""
        return self._ask(OutcomeRequest(wants="hold", reason=_clean(reason)))

    def retry(
        self, at: Any = None, *, delay: Any = None, free: bool = True, reason: str | None = None
    ) -> RequestedOutcome:
        """Ask for another attempt; `free` takes nothing from the budget.  Without a time, by the job's retry rule."""
        if at is not None and delay is not None:
            raise BadOption("at and delay exclude each other; give one of them")
        wish = OutcomeRequest(
            wants="retry",
            reason=_clean(reason) if reason else None,
            at=None if at is None else self._host.moment(at),
            delay=None if delay is None else duration(delay),
            free=free,
        )
        return self._ask(wish)

    def _ask(self, wish: OutcomeRequest) -> RequestedOutcome:
        self._refuse_after_apply()
        self._asked = RequestedOutcome(wish, self)
        return self._asked

    @defer_stop
    def _apply(self, outcome: RequestedOutcome) -> None:
        self._refuse_after_apply()
        if outcome is not self._asked:
            raise IllegalMove(f"job {self.id}: a later request has replaced this one")
        if self._open:
            raise IllegalMove(
                f"job {self.id}: inside transaction() the end of the block applies the outcome"
            )
        self._host.inside().end(self.fence, *self._last_words())
        self._applied = True

    def _refuse_after_apply(self) -> None:
        if self._applied:
            raise IllegalMove(
                f"job {self.id}: the outcome of attempt {self.attempt} is applied already"
            )

    def _last_words(self) -> tuple[OutcomeRequest, AttemptReport, float]:
        wish = self._asked.wish if self._asked else OutcomeRequest(wants="succeed")
        if wish.wants == "succeed" and wish.result is None:
            wish = OutcomeRequest(wants="succeed", result=b"null", reason=wish.reason)
        if wish.wants == "succeed" and self.clones:
            wish = replace(wish, clones=tuple(self.clones))
        return wish, self._host.report(self.told), random.random()  # noqa: S311  spreads retries

    def transaction(self) -> OwnTransaction:
        """`with` it as conn: what is written on conn, jobs enqueued with `conn=conn`, and the end of this job are one
        commit; an exception in the block undoes all of it.

        The job succeeds with the result of `succeed(…)`, or ends as it has asked; afterwards nothing changes that.
        LeaseLost if this attempt is over.  On SQLite the block may take 5 s, because nobody else can write meanwhile.
        `async with` opens and commits it in a thread; what the block does on conn blocks.
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
        """Let the node know that this attempt takes locks."""
        self._memory.lock(self._place)

    # for one who waits here for other jobs

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Let the node give this job's slot to others."""
        self._memory.wait(self._place)
        try:
            yield
        finally:
            self._memory.wait(None)

    def check_loan(self) -> None:
        """WaitWouldDeadlock if the node has no slot to lend any more."""
        if self._memory.refused(self._place):
            raise WaitWouldDeadlock(
                f"job {self.id} waits for others, and so do eight more on this node: nobody could run what they wait "
                "for; give it more workers, or use after= instead of waiting in a job"
            )

    # for the worker

    @property
    def applied(self) -> bool:
        return self._applied

    @property
    def wish(self) -> OutcomeRequest | None:
        return self._asked.wish if self._asked else None

    @property
    def told(self) -> str | None:
        """The last progress, as it is stored."""
        if self._told is None:
            return None
        done, total, text = self._told
        return msgspec.json.encode(
            (float(done), float(total), text.decode(errors="replace"))
        ).decode()

    def leave(self) -> bool:
        """Close its inbox, and roll back a transaction that was left open; True if there was one."""
        if self._inbox is not None:
            self._inbox.close()
        left = self._open
        if left is not None:
            with suppress(GenbaError):  # its time may have been over before
                left.__exit__(RuntimeError, RuntimeError("left open"), None)
        return left is not None


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
        own = self.own = job._host.inside().transaction(job.fence, job._last_words)
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
    """Without what a database refuses."""
    return str(reason).encode(errors="replace").decode().replace("\0", "\ufffd")[:8192]


def current_job() -> RunningJob:
    """The job that is running here; GenbaError outside of one."""
    found = find_job()
    if found is None:
        raise GenbaError("current_job() is for code that runs as a job; here none is running")
    return found


def find_job() -> RunningJob | None:
    """The job that is running here, if one is."""
    make = _current.get() or _only[0]
    return None if make is None else make()


def find_memory() -> SharedMemory | None:
    """The shared memory of the job that is running here."""
    job = find_job()
    return None if job is None else job._memory


def set_current_job_of_task(make: Callable[[], RunningJob]) -> None:
    """For a worker that runs several at a time: who to ask for the job of this asyncio task, and of what it starts."""
    _current.set(make)


def set_current_job(make: Callable[[], RunningJob] | None) -> Callable[[], RunningJob] | None:
    """For a worker that runs one job at a time: who to ask for it (made only if asked); gives whom it replaces."""
    before, _only[0] = _only[0], make
    return before
