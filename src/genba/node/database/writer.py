"""A thread that claims jobs and writes how they ended: the loop never waits for the database."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from genba.errors import StoreError, StoreUnreachable
from genba.node.database.awaited import can_end
from genba.node.database.events import (
    AwaitedJobsChecked,
    AwaitedJobsClaimed,
    DedicatedJobsClaimed,
    EndingsWritten,
    JobsClaimed,
    LimitSlotsTaken,
    SlotsFreed,
    StartsMarked,
    SuccessesRefused,
    WorkAvailable,
)
from genba.node.database.lost_claims import LostClaims
from genba.node.database.pending_writes import LARGEST, MANY, Event, PendingWrites, Progress, Start
from genba.node.decide.actions import CheckAwaited, ClaimAwaited
from genba.node.watch.counters import Counters
from genba.storage.jobs.conditions import ConditionAnswer, SlotRequest
from genba.storage.records import Claimed, Ending, Success
from genba.storage.store import Store

log = logging.getLogger("genba.node")

FLOW = 32  # attempts in the last commit, after which more are expected soon
GATHER_SECONDS = 0.004  # how long it waits for them
# After a claim that found nothing it claims once more: an insert that missed the flag is committed
# by then.
CLAIM_AGAIN_SECONDS = 0.05
FIRST_PAUSE_SECONDS = 0.1  # between tries while the database is away; doubled each time
LONGEST_PAUSE_SECONDS = 2.0


class Writer(threading.Thread):
    def __init__(
        self,
        name: str,
        store: Store,
        node: int,
        tasks: Sequence[str],
        lost_claims: LostClaims,
        post: Callable[[Any], None],
        counters: Counters | None = None,
    ) -> None:
        super().__init__(name=f"genba-{name}", daemon=True)
        self._store = store
        self._node = node
        self._tasks = tasks
        self._lost_claims = lost_claims
        self._post = post
        self._counters = counters
        self._pending = PendingWrites()
        self._changed = threading.Condition()
        self._ended = False
        self._busy = False
        self._flagged_idle = False  # the database knows that this node wants to be woken
        self._just_flagged = False
        self._trouble = False
        self._in_flow = False  # the last commit had so many successes that more come soon

    # what to do

    @contextmanager
    def _adding(self) -> Iterator[PendingWrites]:
        with self._changed:
            yield self._pending
            self._changed.notify()

    def write_successes(self, successes: Sequence[Success], patience: float = 0) -> None:
        """Write successes; the commit may wait `patience` seconds for more."""
        with self._adding() as pending:
            before = pending.patience if pending.successes else patience
            pending.patience = min(before, patience)
            pending.successes += successes

    def write_endings(self, endings: Sequence[Ending]) -> None:
        with self._adding() as pending:
            pending.endings += endings

    def mark_started(self, starts: Sequence[Start], first: bool = False) -> None:
        """Write that jobs have started; with `first`, before they do."""
        with self._adding() as pending:
            if first:
                pending.starts_first += starts
            else:
                pending.starts += starts

    def write_progress(self, progress: Sequence[Progress]) -> None:
        with self._adding() as pending:
            pending.progress += progress

    def write_events(self, events: Sequence[Event]) -> None:
        with self._adding() as pending:
            pending.events += events

    def report_not_ready(self, answers: Sequence[ConditionAnswer]) -> None:
        with self._adding() as pending:
            pending.not_ready += answers

    def report_conditions_hold(self, key: str) -> None:
        with self._adding() as pending:
            pending.conditions_hold.append(key)

    def take_slots(self, wanted: Sequence[SlotRequest]) -> None:
        """Take slots of limits for jobs that may start with them."""
        with self._adding() as pending:
            pending.slots_wanted += wanted

    def claim(self, wants: dict[str, int], only: Sequence[str] | None = None) -> None:
        """Claim so many jobs of each queue; `only` of these tasks, if given."""
        with self._adding() as pending:
            pending.wants, pending.only = wants, only

    def claim_dedicated(self, queues: Sequence[str], count: int) -> None:
        with self._adding() as pending:
            pending.dedicated = pending.dedicated or (queues, count)

    def look_at_awaited(self, look: ClaimAwaited | CheckAwaited) -> None:
        with self._adding() as pending:
            pending.awaited.append(look)

    def write_draining(self) -> None:
        with self._adding() as pending:
            pending.draining = True

    def write_pool(self, slots: int, pool_settings: dict[str, Any]) -> None:
        with self._adding() as pending:
            pending.resized = (slots, pool_settings)

    # what the node knows of it

    def set_tasks(self, tasks: Sequence[str]) -> None:
        """Claim these tasks from the next claim on."""
        self._tasks = tasks

    def on_wakeup(self) -> None:
        """Note that the process that woke this node has cleared the node's flag."""
        self._flagged_idle = False

    def load(self) -> int:
        """Give how many attempts are ahead of what would be added now.

        None, if those wait for more.
        """
        ahead = 0 if self._pending.patience else len(self._pending.successes)
        return ahead + (LARGEST if self._busy else 0)

    @property
    def all_written(self) -> bool:
        """Whether nothing about jobs is left to write."""
        with self._changed:
            return not self._pending.about_jobs and not self._busy

    def finish(self, within: float) -> None:
        """Write what is there, and end."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self.join(within)

    # the thread

    def run(self) -> None:
        with suppress(StoreError):  # the first write meets the same error, and reports it
            self._store.claims.warm_up(self._node)
        while (pending := self._next()) is not None:
            self._work(pending)

    def _next(self) -> PendingWrites | None:
        """Wait for something to do; None at the end."""
        with self._changed:
            while not self._pending and not self._ended:
                self._busy = False
                if not self._changed.wait(CLAIM_AGAIN_SECONDS if self._just_flagged else None):
                    self._just_flagged = False
                    self._post(WorkAvailable())
            if not self._pending:
                return None
            if self._in_flow:
                # In full flow a commit should be for hundreds of jobs, not for dozens.
                self._changed.wait_for(self._has_enough, GATHER_SECONDS)
            elif self._pending.can_wait:
                self._changed.wait_for(self._must_write, self._pending.patience)
            pending, self._pending = self._pending.split()
            self._in_flow = len(pending.successes) >= FLOW
            self._busy = pending.about_jobs
            return pending

    def _has_enough(self) -> bool:
        """Whether to commit now; a claim does not wait, as its workers will soon have no jobs."""
        pending = self._pending
        return self._ended or bool(pending.wants) or len(pending.successes) >= MANY

    def _must_write(self) -> bool:
        return self._ended or not self._pending.can_wait

    def _work(self, pending: PendingWrites) -> None:
        """Try until all is done: nothing may be lost because the database was away."""
        pause = FIRST_PAUSE_SECONDS
        while not self._try(pending):
            threading.Event().wait(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    def step(self) -> bool:
        """Try once, for callers that drive a writer without its thread.

        False if something is left.
        """
        pending, rest = self._pending.split()
        self._pending = PendingWrites()
        done = self._try(pending)
        left = rest if done else pending
        left.successes += [] if done else rest.successes
        self._pending = left
        return not left

    def _try(self, pending: PendingWrites) -> bool:
        """Write once; False if the database was away and something is left."""
        try:
            self._write(pending)
            if self._trouble:
                log.warning("the database answers again")
            self._trouble = False
            return True
        except StoreUnreachable as error:
            if not self._trouble:
                log.warning("cannot write to the database: %s; trying again", error)
            self._trouble = True
        except StoreError:
            log.exception("the database refuses what this node writes; writing one job at a time")
            try:
                self._one_by_one(pending)
            except StoreUnreachable:
                # All of it is tried once more: what is written already is refused as not this
                # node's.
                self._trouble = True
        if pending.wants:
            pending.wants = {}
            self._post(JobsClaimed([], 0, failed=True))
        if pending.dedicated:
            pending.dedicated = None
            self._post(DedicatedJobsClaimed([], 0))
        for look in pending.awaited:
            claims = isinstance(look, ClaimAwaited)
            self._post(AwaitedJobsClaimed([], 0) if claims else AwaitedJobsChecked(True))
        pending.awaited = []
        return not pending

    def _one_by_one(self, pending: PendingWrites) -> None:
        """End each job alone, since one of them cannot be stored.

        That one ends without its details.
        """
        answers = [*pending.not_ready, *(wanted.answer for wanted in pending.slots_wanted)]
        released = [answer.ending for answer in answers]
        successes = [success.as_ending() for success in pending.successes]
        for ending in [*pending.endings, *released, *successes]:
            try:
                self._store.end(self._node, [ending])
            except StoreUnreachable:
                raise
            except StoreError as error:
                text = str(error).encode("ascii", "replace").decode().replace("\0", "?")[:500]
                bare = replace(ending, error=None, progress=None, log=None, result=None)
                reason = f"how it ended could not be stored: {text}"
                self._store.end(self._node, [replace(bare, reason=reason)])
        pending.endings, pending.successes = [], []
        lost = [wanted.answer.ending.id for wanted in pending.slots_wanted]
        self._post(LimitSlotsTaken([], lost))
        pending.not_ready, pending.conditions_hold, pending.slots_wanted = [], [], []
        pending.starts, pending.progress, pending.events = [], [], []
        pending.resized, pending.draining = None, False

    # the writes, each in its own transaction

    def _write(self, pending: PendingWrites) -> None:
        """Write all parts, those first for which workers wait."""
        if pending.starts_first:
            self._write_starts_first(pending)
        if pending.successes or pending.wants:
            with self._claiming() as claim:
                self._exchange(claim, pending)
        if pending.endings:
            self._write_endings(pending)
        if pending.not_ready or pending.slots_wanted or pending.conditions_hold:
            self._write_conditions(pending)
        if pending.starts:
            self._store.mark_started(pending.starts, late=True)
            pending.starts = []
        if pending.progress:
            self._store.record_progress(pending.progress)
            pending.progress = []
        if pending.dedicated:
            self._claim_dedicated(pending, pending.dedicated)
        while pending.awaited:
            self._look_at_awaited(pending.awaited[0])
            pending.awaited.pop(0)
        self._write_about_node(pending)

    def _write_starts_first(self, pending: PendingWrites) -> None:
        ours = self._store.mark_started(pending.starts_first)
        ids = [start[0] for start in pending.starts_first]
        pending.starts_first = []
        lost = [id for id in ids if id not in ours]
        self._post(StartsMarked([id for id in ids if id in ours], lost))

    def _write_endings(self, pending: PendingWrites) -> None:
        self._store.end(self._node, pending.endings)
        again = any(ending.put_off for ending in pending.endings)
        pending.endings = []
        self._post(EndingsWritten(again))
        self._report_freed_slots()

    def _write_conditions(self, pending: PendingWrites) -> None:
        if pending.not_ready:
            self._store.conditions.record_answers(self._node, pending.not_ready)
            pending.not_ready = []
            self._post(EndingsWritten(again=True))
        if pending.slots_wanted:
            ours = self._store.conditions.take_slots(self._node, pending.slots_wanted)
            ids = [wanted.answer.ending.id for wanted in pending.slots_wanted]
            pending.slots_wanted = []
            lost = [id for id in ids if id not in ours]
            self._post(LimitSlotsTaken([id for id in ids if id in ours], lost))
        if pending.conditions_hold:
            for key in dict.fromkeys(pending.conditions_hold):
                self._store.conditions.open(key)
            pending.conditions_hold = []
            self._post(WorkAvailable())

    def _claim_dedicated(
        self, pending: PendingWrites, dedicated: tuple[Sequence[str], int]
    ) -> None:
        with self._claiming() as claim:
            queues, count = dedicated
            jobs = self._store.claims.claim_dedicated(self._node, claim, queues, self._tasks, count)
            pending.dedicated = None
            self._post(DedicatedJobsClaimed(jobs, claim))

    def _look_at_awaited(self, look: ClaimAwaited | CheckAwaited) -> None:
        if isinstance(look, CheckAwaited):
            self._post(AwaitedJobsChecked(can_end(self._store, self._node, look)))
            return
        with self._claiming() as claim:
            queues, ids = look.queues, look.ids
            jobs = self._store.claims.claim_awaited(self._node, claim, queues, self._tasks, ids)
            self._post(AwaitedJobsClaimed(jobs, claim))

    def _write_about_node(self, pending: PendingWrites) -> None:
        if pending.draining:
            self._store.nodes.drain(self._node)
            pending.draining = False
        if pending.resized is not None:
            self._store.nodes.resize(self._node, *pending.resized)
            pending.resized = None
        if pending.events:
            self._store.nodes.tell(self._node, pending.events)
            pending.events = []

    def _report_freed_slots(self) -> None:
        """Wake this node and others if ended jobs have freed slots of limits.

        This node too: another writer may have claimed at the same time.
        """
        if self._store.limits.queues.granted:
            self._post(SlotsFreed())
            self._store.wake_for_granted()

    # claims

    @contextmanager
    def _claiming(self) -> Iterator[int]:
        """Give a new claim id.

        If the claim fails without an answer, maintenance looks for its jobs.
        """
        claim = secrets.randbits(63)
        try:
            yield claim
        except StoreError:
            self._lost_claims.note(claim)
            raise

    def _exchange(self, claim: int, pending: PendingWrites) -> None:
        """Write successes and claim jobs, in one transaction if there are both."""
        began = time.perf_counter()
        tasks = pending.only or self._tasks
        jobs: list[Claimed] = []
        if pending.successes:
            successes, node = pending.successes, self._node
            matched, jobs = self._store.claims.finish_and_claim(
                node, claim, successes, pending.wants, tasks
            )
            refused: list[Success] = []
            if len(matched) != len(successes):
                refused = [success for success in successes if success.id not in matched]
            pending.successes = []
            self._post(SuccessesRefused(refused) if refused else EndingsWritten())
            self._report_freed_slots()
        elif pending.wants:
            jobs = self._claim(claim, pending.wants, tasks)
        if pending.wants:
            if self._counters is not None:
                self._counters.count_claim(time.perf_counter() - began, len(jobs))
            pending.wants = {}
            self._post(JobsClaimed(jobs, claim))

    def _claim(self, claim: int, wants: dict[str, int], tasks: Sequence[str]) -> list[Claimed]:
        """Claim; if there is nothing, set the flag first and claim once more, and again soon.

        A job that came in between has not seen the flag, so that its producer woke no node.
        """
        jobs = self._store.claim(self._node, claim, wants, tasks)
        if not jobs and not self._flagged_idle:
            self._flag_idle()
            self._just_flagged = self._store.parallel_writers > 1
            jobs = self._store.claim(self._node, claim, wants, tasks)
        return jobs

    def _flag_idle(self) -> None:
        """Ask to be woken.

        It is noted here first: a wake-up may come before the call returns.
        """
        self._flagged_idle = True
        try:
            self._store.nodes.hungry(self._node, True)
        except BaseException:  # whether the flag is set is not known; raised again
            self._flagged_idle = False
            raise
