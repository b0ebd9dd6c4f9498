"""Every exception that a user can catch.

GenbaError
├── JobFailed            the job failed; carries the remote error
│   └── JobTimedOut      ... because it ran out of time
├── JobCancelled         the job was cancelled
├── JobNotFound          no job has this id or key
│   └── JobGone          ... because it has been pruned or deleted
├── ScheduleNotFound     no schedule has this name (also a LookupError)
├── WaitTimeout          the wait ended before the job did (also a TimeoutError)
├── WaitWouldDeadlock    a job waited for a job that could never start
├── BadArguments         arguments that do not fit the task, or cannot be stored (also a TypeError)
│   └── PayloadTooLarge  ... because they are too large
├── BadOption            an unknown, ill-typed or contradictory option (also a ValueError)
├── BadTask              a task that cannot be registered (also a ValueError)
├── UnknownTask          a task that this app does not know (also a LookupError)
├── TaskDisabled         an operator has disabled the task
├── TaskFull             `max_waiting` jobs of the task wait already
├── KeyTaken             an open job has this key already, and `on_conflict="raise"`
├── IllegalMove          the job's state does not allow the action
├── LeaseLost            this attempt is no longer the owner of its job
├── LockTimeout, LockLost
├── CursorExpired        the events after this cursor have been pruned
├── RetryJob, FailJob    raised by a job to say how it ends
└── StoreError           the database refused or failed
    ├── StoreUnreachable ... because it could not be reached, or not in time
    └── SchemaTooNew     ... because a newer genba has upgraded it

Stopped is a BaseException: it ends a job that is being stopped, and `except Exception` must not
catch it.
"""

from __future__ import annotations

from typing import Any


class GenbaError(Exception):
    """The root of all errors that genba raises."""


class JobFailed(GenbaError):
    """The awaited job failed; `str()` has the remote error, `traceback` the remote traceback."""

    def __init__(
        self, message: str, *, job_id: int | None = None, error: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.error = error or {}

    @property
    def type(self) -> str | None:
        """The class name of the exception in the worker."""
        return self.error.get("type")

    @property
    def traceback(self) -> str | None:
        return self.error.get("traceback")


class JobTimedOut(JobFailed):
    """The awaited job ran out of time and of retries."""


class JobCancelled(GenbaError):
    """The awaited job was cancelled; the message has the reason."""

    def __init__(self, message: str, *, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobNotFound(GenbaError, LookupError):
    """No job has this id or key."""


class JobGone(JobNotFound):
    """The job has been pruned or deleted."""


class ScheduleNotFound(GenbaError, LookupError):
    """No schedule has this name."""


class WaitTimeout(GenbaError, TimeoutError):
    """The wait ended before the job was final.

    `job_id` is the first job that is not final, and `explanation` the Explanation of
    `job.explain()` for it; None if that could not be found out.
    """

    def __init__(self, message: str, *, job_id: int | None = None, explanation: Any = None) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.explanation = explanation


class WaitWouldDeadlock(GenbaError):
    """A job waited for a job that could not start before the first one ends."""


class BadArguments(GenbaError, TypeError):
    """Arguments that do not fit the task's signature or cannot be stored without loss."""


class PayloadTooLarge(BadArguments):
    """The arguments, stored, are larger than the limit."""


class BadOption(GenbaError, ValueError):
    """An unknown, ill-typed or contradictory option."""


class BadTask(GenbaError, ValueError):
    """A task that cannot be registered: a bad or taken name, or something that cannot be called."""


class UnknownTask(GenbaError, LookupError):
    """This app has no task with that name."""


class TaskDisabled(GenbaError):
    """An operator has disabled this task."""


class TaskFull(GenbaError):
    """`max_waiting` jobs of this task wait already."""


class KeyTaken(GenbaError):
    """An open job has this key, or this identity, already."""

    def __init__(self, message: str, *, job_id: int | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class IllegalMove(GenbaError):
    """The job's present state does not allow the action."""


class LeaseLost(GenbaError):
    """This attempt does not own its job any more; the store ignores all that it writes."""


class LockTimeout(GenbaError, TimeoutError):
    """The lock was not free before the wait ended."""


class LockLost(GenbaError):
    """This process does not hold the lock any more."""


class CursorExpired(GenbaError):
    """Events that this cursor has not seen were pruned."""


class StoreError(GenbaError):
    """The database refused or failed."""


class StoreUnreachable(StoreError):
    """The database could not be reached, or did not answer in time."""


class SchemaTooNew(StoreError):
    """A newer genba has upgraded this database; this one must not touch it."""


class RetryJob(GenbaError):
    """Raise it in a job to end this attempt and retry, if the retry budget allows it."""

    def __init__(self, reason: str = "", *, delay: Any = None, at: Any = None) -> None:
        super().__init__(reason)
        self.delay = delay
        self.at = at


class FailJob(GenbaError):
    """Raise it in a job to fail without a retry, whatever the retry budget says."""


class Stopped(BaseException):
    """Raised in the main thread of a job that is being stopped."""
