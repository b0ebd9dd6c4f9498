"""Write what a running job says about itself: checkpoints, its own end, its own transaction.

Every write shows the fence of the attempt, and none is made for an attempt that is over.
"""

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

# How long a job's own transaction may be open where it blocks all other writers.
OWN_TRANSACTION_SECONDS = 5.0


Outcome = tuple[OutcomeRequest, AttemptReport, float]  # the float is the jitter of a retry


class OwnWrites:
    def __init__(
        self, database: Database, events: Events, end: EndJobs, after_end: Callable[[], None]
    ) -> None:
        self._db = database
        self._events = events
        self._end = end
        self._after_end = after_end  # outside of the transaction that ends the job

    def save(self, fence: Fence, checkpoint: bytes, within: OwnTransaction | None = None) -> None:
        """Save a checkpoint, durable when it returns (`within` the job's own transaction.

        When that commits).
        """
        with self._db.single_write() if within is None else within.own_statements() as tx:
            if tx.one("save_checkpoint", saved=checkpoint, **_fenced(fence)) is None:
                raise _lost(fence)

    def end(
        self, fence: Fence, request: OutcomeRequest, report: AttemptReport, jitter: float
    ) -> None:
        """End this attempt as the job requests; durable when it returns."""
        try:
            with self._db.transaction() as tx:
                row, node = self._own(tx, fence)
                self._end(tx, node, [_ending(row, request, report, tx.now(), jitter)])
        except AnswerLost:
            if not self.ended(fence):
                raise
        self._after_end()

    def ended(self, fence: Fence) -> bool:
        """Tell whether this attempt has ended."""
        with self._db.statement() as tx:
            return tx.one("attempt_has_ended", id=fence[0], attempt=fence[1]) is not None

    def transaction(self, fence: Fence, outcome: Callable[[], Outcome]) -> OwnTransaction:
        """Make a transaction that ends the attempt as `outcome` says when the block is left."""
        return OwnTransaction(self, fence, outcome)

    def afterwards(self, fence: Fence, error: str | None, log: str | None) -> None:
        """Write what came after the end: an exception changes nothing, but is recorded."""
        with self._db.transaction() as tx:
            if log is not None:
                tx.run("save_log", log=log, id=fence[0], attempt=fence[1])
            if error is not None:
                decoded = msgspec.json.decode(error)
                self._events.add(tx, "error_after_end", [fence[0]], attempt=fence[1], error=decoded)

    def _own(self, tx: Transaction, fence: Fence) -> tuple[Orphan, int | None]:
        """Lock and read our row; LeaseLost if it is not ours any more."""
        row = tx.one("own_job", **_fenced(fence))
        if row is None:
            raise _lost(fence)
        return Orphan(*row[:-1]), row[-1]

    # for OwnTransaction

    def open(self, fence: Fence) -> tuple[JobTransaction, Orphan, int | None]:
        transaction = self._db.job_transaction(OWN_TRANSACTION_SECONDS)
        try:
            with transaction.own_statements() as tx:
                row, node = self._own(tx, fence)
            if row.cancel_requested is not None:
                raise Stopped("this job was asked to stop")
        except BaseException:  # a stop must not leave it open either; raised again
            transaction.rollback()
            raise
        return transaction, row, node

    def close(
        self,
        transaction: JobTransaction,
        row: Orphan,
        node: int | None,
        outcome: Outcome,
    ) -> None:
        request, report, jitter = outcome
        try:
            transaction.reclaim()
            with transaction.own_statements() as tx:
                tx.run("restore_planner")
                self._end(tx, node, [_ending(row, request, report, tx.now(), jitter)])
        except BaseException:  # a stop must not leave it open either; raised again
            transaction.rollback()
            raise
        try:
            transaction.commit()
        except AnswerLost:
            if not self.ended((row.id, row.attempt, row.claim)):
                raise
        self._after_end()


class OwnTransaction:
    """`with` gives the driver's connection.

    Leaving the block without an error ends the job in the same commit.
    """

    def __init__(
        self,
        own_writes: OwnWrites,
        fence: Fence,
        outcome: Callable[[], Outcome],
    ) -> None:
        self._own_writes = own_writes
        self._fence = fence
        self._outcome = outcome
        self._open: tuple[JobTransaction, Orphan, int | None] | None = None

    def own_statements(self) -> AbstractContextManager[Transaction]:
        """Open a frame for our own writes while the transaction is open."""
        assert self._open is not None
        return self._open[0].own_statements()

    def __enter__(self) -> Any:
        try:
            with defer_stop:
                self._open = self._own_writes.open(self._fence)
            return self._open[0].connection
        except BaseException as error:
            # A stop came in the meantime, so the block is not entered; raised again.
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
        transaction, row, node = self._open
        self._open = None
        if error is None:
            self._own_writes.close(transaction, row, node, self._outcome())
            return
        transaction.rollback()
        if isinstance(error, Exception) and transaction.expired:
            # Instead of the driver's message about its closed connection.
            raise StoreError(transaction.expired) from error


def _ending(
    row: Orphan, request: OutcomeRequest, report: AttemptReport, now: Micros, jitter: float
) -> Ending:
    end = AttemptEnd(
        cause=Cause.RETURNED,
        started=True,
        wants=request.wants,
        reason=request.reason,
        retry_at=request.at,
        retry_in=request.delay,
        free_retry=request.free,
        cancel_requested=row.cancel_requested is not None,
    )
    ending = build_ending(
        row, row.claim, read_options(row.options) or DEFAULT_OPTIONS, end, now, jitter
    )
    cancelled = ending.state == State.CANCELLED
    return replace(
        ending,
        # A cancelled job's row has the reason already.
        reason=None if cancelled else ending.reason,
        clones=request.clones,
        result=request.result if ending.state == State.SUCCEEDED else None,
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
        f"job {fence[0]}: attempt {fence[1]} no longer owns the job, "
        "so what it writes does not count"
    )
