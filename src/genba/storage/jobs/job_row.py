"""The row of a new job: its columns, and their values."""

from __future__ import annotations

from typing import Any

import msgspec

from genba.domain.duration import Micros
from genba.domain.limits import ORDERED, bucket_to_wait_for, write_needs
from genba.domain.rank import boost
from genba.storage.limits.queueing import PARKED_ON_LIMIT
from genba.storage.records import EXACT_MOMENT, JobId, NewJob

COLUMNS = (  # noqa: SIM905  twenty quoted names would hide their order
    "id created_at due_at due_from rank state expires_at unique_until parent_id priority open_deps "
    "once_waiting namespace queue task key key_hash tags options args"
).split()
STATE, OPTIONS = COLUMNS.index("state"), COLUMNS.index("options")
LIMIT_COLUMNS = ("buckets", "parked_on", "capped")  # only of jobs that have a limit
INSERT_COLUMNS = (*COLUMNS, *LIMIT_COLUMNS)  # all columns that an insert may name
_json = msgspec.json.Encoder()


def job_row(
    job: NewJob,
    id: JobId,
    parents: int,
    now: Micros,
    limited: bool,
    namespace: str,
    age_step: Micros,
) -> tuple[Any, ...]:
    """Build a row in the order of the columns.

    A plain tuple, because there may be ten thousand.
    """
    due, since = now + job.delay, None
    if job.due_at is not None and job.due_at > now:
        due, since = job.due_at, EXACT_MOMENT
    state = "blocked" if parents else "scheduled" if due > now else "waiting"
    limit_values: tuple[Any, ...] = ()
    rank = due - boost(job.priority, age_step)
    if limited:
        bucket = bucket_to_wait_for(job.needs)
        rank = now if bucket is not None and bucket.kind == ORDERED else rank
        limit_values = (
            write_needs(job.needs) if job.needs else None,
            PARKED_ON_LIMIT + bucket.name if bucket is not None and state == "waiting" else None,
            1 if job.capped else None,
        )
    return (
        id,
        now,
        due,
        since,
        rank,
        state,
        job.expires_at if job.expires_in is None else now + job.expires_in,
        None if job.unique_for is None else now + job.unique_for,
        job.parent_id,
        job.priority,
        parents,
        job.once_waiting,
        namespace,
        job.queue,
        job.task,
        job.key,
        job.identity,
        _json.encode(job.tags).decode() if job.tags else None,
        job.options,
        job.args,
        *limit_values,
    )
