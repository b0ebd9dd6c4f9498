"""Events: what happened, row by row, written in the transaction that makes it happen.

A row may describe many jobs: `data` has their ids as `jobs`, and what differs between them as lists
in `each`.

Readers never skip what commits late.  On PostgreSQL a transaction may commit after others that took
later numbers, so a reader goes in passes: each pass gives what its snapshot sees and the snapshot
of the pass before did not.  Nothing new can appear below `low`: a transaction that had not begun
when a pass was taken takes numbers above all that the pass saw.
"""

from __future__ import annotations

import base64
import binascii
import getpass
import os
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec

from genba.errors import BadOption, CursorExpired
from genba.storage.engines.database import Database, Transaction
from genba.storage.records import JobId, Micros, is_quiet

PAGE_ROWS = 200  # rows
_json = msgspec.json.Encoder()


class EventRow(NamedTuple):
    """An event as its row says (in the order of the query)."""

    seq: int
    at: Micros
    kind: str
    job_id: JobId | None
    node: int | None
    data: bytes | None


class EventPosition(msgspec.Struct, frozen=True, array_like=True):
    """Where a reader is: after the `index`-th event of row `seq`, in the pass `current`."""

    seq: int = 0
    index: int = -1
    low: int = 0  # everything up to this number was read
    seen: str = ""  # the snapshot of the last pass that is done
    current: str = ""  # the snapshot of the pass that goes on
    # The next `low`, once all transactions with a number below `next_from` have ended.
    next_low: int = 0
    next_from: int = 0
    begun: bool = False

    @property
    def cursor(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    @classmethod
    def of(cls, cursor: str) -> EventPosition:
        try:
            packed = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
            return msgspec.msgpack.decode(packed, type=cls)
        except (TypeError, ValueError, binascii.Error, msgspec.MsgspecError):
            raise BadOption(
                f"after: {cursor!r} is not a cursor of an event: "
                "pass the cursor of an event that you have read"
            ) from None

    def after_row(self, seq: int, index: int) -> EventPosition:
        return msgspec.structs.replace(self, seq=seq, index=index, begun=True)

    def after_pass(self, snapshot: str, top: int) -> EventPosition:
        """Give the position after a pass; `top` is the greatest number that it could see."""
        oldest, newest, *_ = snapshot.split(":")
        low, next_low, next_from = self.low, self.next_low, self.next_from
        if next_from <= int(oldest):
            low, next_low, next_from = max(low, next_low), top, int(newest)
        if int(newest) <= int(oldest):  # no transaction was open
            low = max(low, top)
        return EventPosition(max(self.seq, top), -1, low, snapshot, "", next_low, next_from, True)


class EventPage(NamedTuple):
    """Some rows.

    `after` is the position when all of them are read, `more` says that the pass goes on.
    """

    rows: list[EventRow]
    during: EventPosition
    after: EventPosition
    more: bool


@cache
def current_operator() -> str:
    """Name the user of this process, for the history."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such user on this machine, as in many containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class Events:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace
        self.node: int | None = None  # the node that writes, if it is one

    def add(
        self,
        tx: Transaction,
        kind: str,
        ids: Sequence[JobId] = (),
        *,
        node: int | None = None,
        each: Mapping[str, Sequence[Any]] | None = None,
        **data: Any,
    ) -> None:
        """Write one row for all `ids` (none: an event of no job).

        `each` has one value for each of them.
        """
        if len(ids) == 1 and each:
            data |= {name: values[0] for name, values in each.items() if values[0] is not None}
        elif len(ids) > 1:
            data = {"jobs": ids, "each": each, **data} if each else {"jobs": ids, **data}
        tx.run(
            "insert_event",
            namespace=self._namespace,
            kind=kind,
            job_id=ids[0] if len(ids) == 1 else None,
            node=node if node is not None else self.node,
            data=_json.encode(data) if data else None,
        )

    def add_states(self, tx: Transaction, rows: Sequence[tuple[Any, ...]]) -> None:
        """Write that jobs (id, state, options) have just come into that state."""
        by_state: dict[str, list[JobId]] = {}
        for id, state, options in rows:
            if not is_quiet(options):
                by_state.setdefault(state, []).append(id)
        for state, ids in by_state.items():
            self.add(tx, state, ids)

    def page(self, at: EventPosition, job: JobId | None = None) -> EventPage:
        """Read the next rows after `at`; CursorExpired if some of them were pruned."""
        with self._db.statement() as tx:
            page = tx.all(
                "event_page",
                namespace=self._namespace,
                start=max(at.low + 1, at.seq if at.current else 0),
                seen=at.seen,
                current=at.current,
                job_id=job,
                digits=str(job).encode(),
                limit=PAGE_ROWS,
            )
        snapshot, top, pruned = page[0][:3]
        rows = sorted(EventRow(*row[3:]) for row in page if row[3] is not None)
        if at.begun and pruned is not None and pruned > max(at.seq, at.low):
            raise CursorExpired(
                f"events that this cursor has not seen were pruned, up to number {pruned}: "
                "start again with after=None, read more often, or keep them longer "
                "(keep_events, max_events)"
            )
        during = msgspec.structs.replace(at, current=at.current or snapshot)
        if len(rows) >= PAGE_ROWS:
            return EventPage(rows, during, during.after_row(rows[-1].seq, 1 << 60), True)
        if at.current:  # what this snapshot did not see comes with the next one
            top = rows[-1].seq if rows else at.seq
            return EventPage(
                rows, during, during.after_pass(at.current, top), at.current != snapshot
            )
        return EventPage(rows, during, during.after_pass(snapshot, top or 0), False)

    def end(self) -> EventPosition:
        """Give the position after everything that has happened so far."""
        with self._db.statement() as tx:
            page = tx.all(
                "event_page",
                namespace=self._namespace,
                start=1 << 62,
                seen="",
                current="",
                job_id=None,
                digits=b"",
                limit=1,
            )
        snapshot, top, _ = page[0][:3]
        return EventPosition().after_pass(snapshot, top or 0)

    def tasks_of(self, ids: Sequence[JobId]) -> dict[JobId, str]:
        """Read the tasks of these jobs."""
        with self._db.statement() as tx:
            return {
                row[0]: row[1]
                for row in tx.batch(
                    "tasks_of_jobs", [(id,) for id in ids], namespace=self._namespace
                )
            }

    def prune(self, before: Micros, most: int) -> int:
        """Delete up to a thousand of the oldest that are older than `before` or exceed `most`.

        How many.
        """
        with self._db.transaction() as tx:
            deleted = tx.all("prune_events", before=before, most=most)
            last: dict[str, int] = {}
            for namespace, seq in deleted:
                last[namespace] = max(seq, last.get(namespace, 0))
            for namespace, seq in sorted(last.items()):
                tx.run("set_pruned", namespace=namespace, pruned=seq)
            return len(deleted)
