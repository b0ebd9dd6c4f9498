"""What a running job writes about itself; every write shows its fence, and none is made for an attempt that is over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any

import msgspec

from genba.domain.outcome import AttemptReport, Fence, OutcomeRequest
from genba.domain.states import Cause, State
from genba.domain.verdict import AttemptEnd
from genba.errors import LeaseLost, Stopped, StoreError
from genba.signal_safe import defer_stop
from genba.storage.engines.database import AnswerLost, Database, JobTransaction, Transaction
from genba.storage.events import Events
from genba.storage.jobs.judge import DEFAULT_OPTIONS, build_ending, read_options
from genba.storage.nodes.nodes import EndJobs, Orphan
from genba.storage.records import Ending, Micros

OWN_TRANSACTION_SECONDS = (
    5.0  # seconds that a job's own transaction may be open where it blocks all other writers
)


class OwnWrites:
    def __init__(
        self, database: Database, events: Events, end: EndJobs, after: Callable[[], None]
    ) -> None:
        self._db = database
        self._events = events
        self._end = end
        self._after = after  # what follows the end of a job, outside of its transaction

    def save(self, fence: Fence, checkpoint: bytes, within: OwnTransaction | None = None) -> None:
        """Durable when it returns; `within` the job's own transaction, when that is committed."""
        with self._db.single_write() if within is None else within.own_statements() as tx:
            if tx.one("save_checkpoint", saved=checkpoint, **_fenced(fence)) is None:
                raise _lost(fence)

    def end(self, fence: Fence, wish: OutcomeRequest, report: AttemptReport, jitter: float) -> None:
        """End this attempt as it wishes; durable when it returns."""
        try:
            with self._db.transaction() as tx:
                row, node = self._own(tx, fence)
                self._end(tx, node, [_ending(row, wish, report, tx.now(), jitter)])
        except AnswerLost:
            if not self.ended(fence):
                raise
        self._after()

    def ended(self, fence: Fence) -> bool:
        """Whether this attempt is history."""
        with self._db.statement() as tx:
            return tx.one("attempt_has_ended", id=fence[0], attempt=fence[1]) is not None

    def transaction(
        self, fence: Fence, told: Callable[[], tuple[OutcomeRequest, AttemptReport, float]]
    ) -> OwnTransaction:
        """A transaction that ends the attempt, as `told` says when the block is left."""
        return OwnTransaction(self, fence, told)

    def afterwards(self, fence: Fence, error: str | None, log: str | None) -> None:
        """What came after the end: an exception changes nothing, but is told."""
        with self._db.transaction() as tx:
            if log is not None:
                tx.run("save_log", log=log, id=fence[0], attempt=fence[1])
            if error is not None:
                told = msgspec.json.decode(error)
                self._events.tell(tx, "error_after_end", [fence[0]], attempt=fence[1], error=told)

    def _own(self, tx: Transaction, fence: Fence) -> tuple[Orphan, int | None]:
        """Our row, locked; LeaseLost if it is not ours any more."""
        row = tx.one("own_job", **_fenced(fence))
        if row is None:
            raise _lost(fence)
        return Orphan(*row[:-1]), row[-1]

    # for OwnTransaction

    def open(self, fence: Fence) -> tuple[JobTransaction, Orphan, int | None]:
        joint = self._db.job_transaction(OWN_TRANSACTION_SECONDS)
        try:
            with joint.own_statements() as tx:
                row, node = self._own(tx, fence)
            if row.cancel_requested is not None:
                raise Stopped("this job was asked to stop")
        except BaseException:  # also a stop must not leave it open; raised again
            joint.rollback()
            raise
        return joint, row, node

    def close(
        self,
        joint: JobTransaction,
        row: Orphan,
        node: int | None,
        told: tuple[OutcomeRequest, AttemptReport, float],
    ) -> None:
        wish, report, jitter = told
        try:
            joint.reclaim()
            with joint.own_statements() as tx:
                tx.run("restore_planner")
                self._end(tx, node, [_ending(row, wish, report, tx.now(), jitter)])
        except BaseException:  # also a stop must not leave it open; raised again
            joint.rollback()
            raise
        try:
            joint.commit()
        except AnswerLost:
            if not self.ended((row.id, row.attempt, row.claim)):
                raise
        self._after()


class OwnTransaction:
    """`with` gives the driver's connection; leaving it well ends the job in the same commit."""

    def __init__(
        self,
        inside: OwnWrites,
        fence: Fence,
        told: Callable[[], tuple[OutcomeRequest, AttemptReport, float]],
    ) -> None:
        self._inside = inside
        self._fence = fence
        self._told = told
        self._open: tuple[JobTransaction, Orphan, int | None] | None = None

    def own_statements(self) -> AbstractContextManager[Transaction]:
        """For our own writes while it is open."""
        assert self._open is not None
        return self._open[0].own_statements()

    def __enter__(self) -> Any:
        try:
            with defer_stop:
                self._open = self._inside.open(self._fence)
            return self._open[0].connection
        except (
            BaseException
        ) as error:  # a stop that came meanwhile: the block will not be entered; raised again
            self.__exit__(type(error), error, None)
            raise

    @defer_stop
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open is None:
            return
        joint, row, node = self._open
        self._open = None
        if error is None:
            self._inside.close(joint, row, node, self._told())
            return
        joint.rollback()
        if isinstance(error, Exception) and joint.expired:
            raise StoreError(
                joint.expired
            ) from error  # what the driver says of its closed connection helps nobody


def _ending(
    row: Orphan, wish: OutcomeRequest, report: AttemptReport, now: Micros, jitter: float
) -> Ending:
    end = AttemptEnd(
        cause=Cause.RETURNED,
        started=True,
        wants=wish.wants,
        reason=wish.reason,
        retry_at=wish.at,
        retry_in=wish.delay,
        free_retry=wish.free,
        cancel_requested=row.cancel_requested is not None,
    )
    ending = build_ending(
        row, row.claim, read_options(row.options) or DEFAULT_OPTIONS, end, now, jitter
    )
    cancelled = ending.state == State.CANCELLED
    return replace(
        ending,
        reason=None
        if cancelled
        else ending.reason,  # the row has the words of whoever cancelled it
        clones=wish.clones,
        result=wish.result if ending.state == State.SUCCEEDED else None,
        progress=report.progress,
        log=report.log,
        started=now - report.ran,
        pid=report.pid,
        cpu=report.cpu,
        peak=report.peak,
        locks=True,
    )


def _fenced(fence: Fence) -> dict[str, int]:
    id, attempt, claim = fence
    return {"id": id, "attempt": attempt, "claim": claim}


def _lost(fence: Fence) -> LeaseLost:
    return LeaseLost(
        f"job {fence[0]}: attempt {fence[1]} is not the owner any more, and nothing it writes counts"
    )
