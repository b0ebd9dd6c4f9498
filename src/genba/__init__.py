"""A distributed task manager: the place where the work is done."""

from genba.client.app import Genba
from genba.client.current_job import RunningJob, current_job
from genba.client.group import Group
from genba.client.job import Job
from genba.client.lock import Lock
from genba.client.message import Subscription
from genba.client.schedule import Schedule, Tick
from genba.client.task import Task
from genba.domain.retry import Retry
from genba.enqueue.call import Call
from genba.errors import (
    BadArguments,
    BadOption,
    BadTask,
    CursorExpired,
    FailJob,
    GenbaError,
    IllegalMove,
    JobCancelled,
    JobFailed,
    JobGone,
    JobNotFound,
    JobTimedOut,
    KeyTaken,
    LeaseLost,
    LockLost,
    LockTimeout,
    PayloadTooLarge,
    RetryJob,
    ScheduleNotFound,
    SchemaTooNew,
    Stopped,
    StoreError,
    StoreUnreachable,
    TaskDisabled,
    TaskFull,
    UnknownTask,
    WaitTimeout,
    WaitWouldDeadlock,
)
from genba.options.conditions import ready
from genba.options.values import Dep, Limit, Rate, Wait

__all__ = [
    "BadArguments",
    "BadOption",
    "BadTask",
    "Call",
    "CursorExpired",
    "Dep",
    "FailJob",
    "Genba",
    "GenbaError",
    "Group",
    "IllegalMove",
    "Job",
    "JobCancelled",
    "JobFailed",
    "JobGone",
    "JobNotFound",
    "JobTimedOut",
    "KeyTaken",
    "LeaseLost",
    "Limit",
    "Lock",
    "LockLost",
    "LockTimeout",
    "PayloadTooLarge",
    "Rate",
    "Retry",
    "RetryJob",
    "RunningJob",
    "Schedule",
    "ScheduleNotFound",
    "SchemaTooNew",
    "Stopped",
    "StoreError",
    "StoreUnreachable",
    "Subscription",
    "Task",
    "TaskDisabled",
    "TaskFull",
    "Tick",
    "UnknownTask",
    "Wait",
    "WaitTimeout",
    "WaitWouldDeadlock",
    "current_job",
    "ready",
]
