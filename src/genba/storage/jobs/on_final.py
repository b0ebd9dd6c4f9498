"""`on_final`: when a job has come to its end, a small job tells its task so, from the same commit on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from genba.domain.retry import Retry
from genba.options.table import Snapshot
from genba.storage.engines.database import Tx
from genba.storage.records import JobId, NewJob

TRIES = Snapshot(retry=Retry(times=10, delay="1s", backoff=2, cap="5m").to_json())


def hooks_of(tx: Tx, namespace: str, ids: Sequence[JobId]) -> list[NewJob]:
    """The jobs that tell of these ends; none for most."""
    told = []
    for id, queue, priority, written in tx.batch(
        "with_hook", [(id,) for id in ids], namespace=namespace
    ):
        options = Snapshot.read(written.encode())
        hook = options.on_final
        if hook is not None:
            args = msgspec.json.encode({"job": id})
            own = msgspec.json.encode(msgspec.structs.replace(TRIES, trace=options.trace)).decode()
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
