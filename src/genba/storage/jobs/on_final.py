"""`on_final`.

When a job is final, a small job calls the hook of its task, from the same commit on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from genba.domain.retry import Retry
from genba.options.snapshot import OptionsSnapshot
from genba.storage.engines.database import Transaction
from genba.storage.records import JobId, NewJob

ON_FINAL_OPTIONS = OptionsSnapshot(retry=Retry(times=10, delay="1s", backoff=2, cap="5m").to_json())


def on_final_jobs(tx: Transaction, namespace: str, ids: Sequence[JobId]) -> list[NewJob]:
    """Make the jobs that call the hooks of these final jobs; most jobs have none."""
    jobs = []
    for id, queue, priority, written in tx.batch(
        "jobs_with_hook", [(id,) for id in ids], namespace=namespace
    ):
        options = OptionsSnapshot.read(written.encode())
        if options.on_final is not None:
            own_options = msgspec.structs.replace(ON_FINAL_OPTIONS, trace=options.trace)
            jobs.append(
                NewJob(
                    task=options.on_final,
                    args=msgspec.json.encode({"job": id}),
                    namespace=namespace,
                    queue=queue,
                    priority=priority,
                    options=msgspec.json.encode(own_options).decode(),
                )
            )
    return jobs
