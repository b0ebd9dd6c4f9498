"""`on_final`: when a job has come to its end, a small job tells its task so, from the same commit on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from genba.domain.retry import Retry
from genba.options.snapshot import OptionsSnapshot
from genba.storage.engines.database import Transaction
from genba.storage.records import JobId, NewJob

ON_FINAL_OPTIONS = OptionsSnapshot(retry=Retry(times=10, delay="1s", backoff=2, cap="5m").to_json())


def on_final_jobs(tx: Transaction, namespace: str, ids: Sequence[JobId]) -> list[NewJob]:
    """The jobs that tell of these ends; none for most."""
    told = []
    for id, queue, priority, written in tx.batch(
        "jobs_with_hook", [(id,) for id in ids], namespace=namespace
    ):
        options = OptionsSnapshot.read(written.encode())
        hook = options.on_final
        if hook is not None:
            args = msgspec.json.encode({"job": id})
            own = msgspec.json.encode(
                msgspec.structs.replace(ON_FINAL_OPTIONS, trace=options.trace)
            ).decode()
            told.append(
                NewJob(
                    task=hook,
                    args=args,
                    namespace=namespace,
                    queue=queue,
                    priority=priority,
                    options=own,
                )
            )
    return told
