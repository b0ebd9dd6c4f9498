"""A desk: one thread that writes about running jobs, so that the loop never waits for the database."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from genba.errors import StoreError, StoreUnreachable
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import WorkAvailable
from genba.node.watch.counters import Counters
from genba.storage.jobs.conditions import ConditionAnswer, SlotRequest
from genba.storage.records import Claimed, Ending, JobId, Success
from genba.storage.store import Store

log = logging.getLogger("genba.node")

LARGEST = 2000  # attempts in one transaction
FLOW = 32  # attempts in the last one: more are on their way
MANY = 512  # attempts that are worth a commit while they flow
GATHER = 0.004  # seconds to wait for them
AGAIN = 0.05  # ... until a hungry desk looks once more: an insert that has not seen the flag is committed by then


@dataclass(frozen=True, slots=True)
class JobsClaimed:
    jobs: list[Claimed]
    claim: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class DedicatedJobsClaimed:
    jobs: list[Claimed]
    claim: int


@dataclass(frozen=True, slots=True)
class SuccessesRefused:
    """Successes that the store did not take."""

    lost: list[Success]


@dataclass(frozen=True, slots=True)
class EndingsWritten:
    """Endings are written, or were not ours to write; `again`: some of them come back at a moment."""

    again: bool = False


@dataclass(frozen=True, slots=True)
class SlotsFreed:
    """Jobs that waited for a slot may start now."""


@dataclass(frozen=True, slots=True)
class StartsMarked:
    ours: list[JobId]
    lost: list[JobId]


@dataclass(frozen=True, slots=True)
class LimitSlotsTaken:
    """These have the slots they need; the others stand in line, or were not ours any more."""

    ours: list[JobId]
    lost: list[JobId]


@dataclass(slots=True)
class PendingWrites:
    """What lies on the desk."""

    succeeded: list[Success] = field(default_factory=list)
    patience: float = 0  # seconds that it is worth while to wait for more of them
    ended: list[Ending] = field(default_factory=list)
    marks: list[tuple[JobId, int, int, int]] = field(default_factory=list)
    first: list[tuple[JobId, int, int, int]] = field(default_factory=list)
    notes: list[tuple[JobId, int, int, str]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    answers: list[ConditionAnswer] = field(default_factory=list)
    wanted: list[SlotRequest] = field(
        default_factory=list
    )  # slots, for jobs that may start with them
    opened: list[str] = field(default_factory=list)  # questions whose answer is yes
    resized: tuple[int, dict[str, Any]] | None = (
        None  # the slots that the node has now, and its pool
    )
    draining: bool = False
    wants: dict[str, int] = field(default_factory=dict)
    dedicated: tuple[Sequence[str], int] | None = None  # wanted from these queues, and how many
    only: Sequence[str] | None = None  # tasks; None: all that the node has

    def __bool__(self) -> bool:
        return (
            self.about_jobs
            or bool(self.events or self.opened)
            or self.draining
            or self.resized is not None
        )

    @property
    def can_wait(self) -> bool:
        """More will come, and nobody waits for what is here."""
        urgent = (
            self.ended
            or self.first
            or self.answers
            or self.wanted
            or self.opened
            or self.wants
            or self.dedicated
        )
        return bool(self.patience) and len(self.succeeded) < MANY and not urgent

    @property
    def about_jobs(self) -> bool:
        """What must not be left undone."""
        written = (
            self.succeeded
            or self.ended
            or self.marks
            or self.first
            or self.notes
            or self.answers
            or self.wanted
        )
        return bool(written or self.wants or self.dedicated)


class Writer(threading.Thread):
    def __init__(
        self,
        name: str,
        store: Store,
        node: int,
        tasks: Sequence[str],
        doubts: LostClaims,
        post: Callable[[Any], None],
        meter: Counters | None = None,
    ) -> None:
        super().__init__(name=f"genba-{name}", daemon=True)
        self._store = store
        self._node = node
        self._tasks = tasks
        self._doubts = doubts
        self._post = post
        self._meter = meter
        self._pile = PendingWrites()
        self._cond = threading.Condition()
        self._ended = False
        self._hungry = False
        self._just_hungry = False
        self._trouble = False
        self._many = False

    def add(
        self,
        *,
        succeeded: Sequence[Success] = (),
        patience: float = 0,
        ended: Sequence[Ending] = (),
        marks: Sequence[tuple[JobId, int, int, int]] = (),
        first: Sequence[tuple[JobId, int, int, int]] = (),
        notes: Sequence[tuple[JobId, int, int, str]] = (),
        events: Sequence[tuple[str, dict[str, Any]]] = (),
        answers: Sequence[ConditionAnswer] = (),
        wanted: Sequence[SlotRequest] = (),
        opened: Sequence[str] = (),
        resized: tuple[int, dict[str, Any]] | None = None,
        draining: bool = False,
        wants: dict[str, int] | None = None,
        dedicated: tuple[Sequence[str], int] | None = None,
        only: Sequence[str] | None = None,
    ) -> None:
        with self._cond:
            pile = self._pile
            if succeeded:
                pile.patience = min(pile.patience, patience) if pile.succeeded else patience
                pile.succeeded += succeeded
            pile.ended += ended
            pile.marks += marks
            pile.first += first
            pile.notes += notes
            pile.events += events
            pile.answers += answers
            pile.wanted += wanted
            pile.opened += opened
            pile.resized = resized or pile.resized
            pile.draining = pile.draining or draining
            if wants:
                pile.wants, pile.only = wants, only
            pile.dedicated = pile.dedicated or dedicated
            self._cond.notify()

    def serve(self, tasks: Sequence[str]) -> None:
        """These tasks from the next claim on."""
        self._tasks = tasks

    def rung(self) -> None:
        """Whoever rang has cleared our flag."""
        self._hungry = False

    def load(self) -> int:
        """How much is ahead of what would be added now; nothing, if it would be waited for."""
        ahead = 0 if self._pile.patience else len(self._pile.succeeded)
        return ahead + (LARGEST if self._busy else 0)

    @property
    def clear(self) -> bool:
        """Nothing about jobs is left to write."""
        with self._cond:
            return not self._pile.about_jobs and not self._busy

    def finish(self, within: float) -> None:
        """Write what is there, and end."""
        with self._cond:
            self._ended = True
            self._cond.notify()
        self.join(within)

    _busy = False

    def run(self) -> None:
        with suppress(StoreError):  # whoever has work to do will hear it again
            self._store.claims.warm_up(self._node)
        while True:
            with self._cond:
                while not self._pile and not self._ended:
                    self._busy = False
                    if not self._cond.wait(AGAIN if self._just_hungry else None):
                        self._just_hungry = False
                        self._post(WorkAvailable())
                if not self._pile:
                    return
                if self._many:  # in full flow a commit should pay for hundreds, not for dozens
                    self._cond.wait_for(self._has_enough, GATHER)
                elif self._pile.can_wait:
                    self._cond.wait_for(
                        lambda: self._ended or not self._pile.can_wait, self._pile.patience
                    )
                pile, self._pile = self._take()
                self._many = len(pile.succeeded) >= FLOW
                self._busy = pile.about_jobs
            self._work(pile)

    def _has_enough(self) -> bool:
        """For a commit of its own; who wants work has workers that will soon have none."""
        return self._ended or bool(self._pile.wants) or len(self._pile.succeeded) >= MANY

    def _take(self) -> tuple[PendingWrites, PendingWrites]:
        pile = self._pile
        rest = PendingWrites(succeeded=pile.succeeded[LARGEST:])
        pile.succeeded = pile.succeeded[:LARGEST]
        return pile, rest

    def _work(self, pile: PendingWrites) -> None:
        """Until it is done: nothing that was written down here may be lost because the database was away."""
        pause = 0.1
        while not self._try(pile):
            threading.Event().wait(pause)
            pause = min(2.0, pause * 2)

    def step(self) -> bool:
        """One try at what lies here, for those who drive a desk without its thread; False if something is left."""
        pile, rest = self._take()
        self._pile = PendingWrites()
        done = self._try(pile)
        left = rest if done else pile
        left.succeeded += [] if done else rest.succeeded
        self._pile = left
        return not left

    def _try(self, pile: PendingWrites) -> bool:
        """False if the database was away: then once more."""
        try:
            self._write(pile)
            if self._trouble:
                log.warning("the database answers again")
            self._trouble = False
            return True
        except StoreUnreachable as error:
            if not self._trouble:
                log.warning("cannot write: %s; trying again", error)
            self._trouble = True
        except StoreError:
            log.exception("the database refuses what this node writes; going on one by one")
            try:
                self._one_by_one(pile)
            except StoreUnreachable:
                self._trouble = (
                    True  # all of it once more: what is written already is not ours to write again
                )
        if pile.wants:
            pile.wants = {}
            self._post(JobsClaimed([], 0, failed=True))
        if pile.dedicated:
            pile.dedicated = None
            self._post(DedicatedJobsClaimed([], 0))
        return not pile

    def _one_by_one(self, pile: PendingWrites) -> None:
        """Something in here cannot be stored: the rest must not suffer, and its job must end all the same."""
        answers = [*pile.answers, *(want.answer for want in pile.wanted)]
        back = [answer.ending for answer in answers]
        ended = [*pile.ended, *back, *(one.as_ending() for one in pile.succeeded)]
        for ending in ended:
            try:
                self._store.end(self._node, [ending])
            except StoreUnreachable:
                raise
            except StoreError as error:
                told = str(error).encode("ascii", "replace").decode().replace("\0", "?")[:500]
                bare = replace(ending, error=None, progress=None, log=None, result=None)
                self._store.end(
                    self._node, [replace(bare, reason=f"how it ended could not be stored: {told}")]
                )
        pile.ended, pile.succeeded = [], []
        self._post(LimitSlotsTaken([], [one.answer.ending.id for one in pile.wanted]))
        pile.answers, pile.opened, pile.wanted = [], [], []
        pile.marks, pile.notes, pile.events, pile.resized, pile.draining = [], [], [], None, False

    def _write(self, pile: PendingWrites) -> None:
        if pile.first:
            ours = self._store.mark_started(pile.first)
            ids = [one[0] for one in pile.first]
            pile.first = []
            self._post(
                StartsMarked([id for id in ids if id in ours], [id for id in ids if id not in ours])
            )
        if pile.succeeded or pile.wants:
            self._exchange(pile)
        if pile.ended:
            self._store.end(self._node, pile.ended)
            again = any(ending.put_off for ending in pile.ended)
            pile.ended = []
            self._post(EndingsWritten(again))
            self._hand_on()
        if pile.answers:
            self._store.conditions.record_answers(self._node, pile.answers)
            pile.answers = []
            self._post(EndingsWritten(again=True))
        if pile.wanted:
            got = self._store.conditions.take_slots(self._node, pile.wanted)
            ids = [one.answer.ending.id for one in pile.wanted]
            pile.wanted = []
            self._post(
                LimitSlotsTaken(
                    [id for id in ids if id in got], [id for id in ids if id not in got]
                )
            )
        if pile.opened:
            for key in dict.fromkeys(pile.opened):
                self._store.conditions.open(key)
            pile.opened = []
            self._post(WorkAvailable())
        if pile.marks:
            self._store.mark_started(pile.marks, late=True)
            pile.marks = []
        if pile.notes:
            self._store.record_progress(pile.notes)
            pile.notes = []
        if pile.dedicated:
            with self._claiming() as claim:
                queues, count = pile.dedicated
                jobs = self._store.claims.claim_dedicated(
                    self._node, claim, queues, self._tasks, count
                )
                pile.dedicated = None
                self._post(DedicatedJobsClaimed(jobs, claim))
        if pile.draining:
            self._store.nodes.drain(self._node)
            pile.draining = False
        if pile.resized is not None:
            self._store.nodes.resize(self._node, *pile.resized)
            pile.resized = None
        if pile.events:
            self._store.nodes.tell(self._node, pile.events)
            pile.events = []

    def _hand_on(self) -> None:
        """What has ended may have let others go: here, where another desk claims at the same time, and elsewhere."""
        if self._store.limits.queues.granted:
            self._post(SlotsFreed())
            self._store.wake_for_granted()

    @contextmanager
    def _claiming(self) -> Iterator[int]:
        """A new claim.  If it fails before what it has taken is known, that must be looked for."""
        claim = secrets.randbits(63)
        try:
            yield claim
        except StoreError:
            self._doubts.note(claim)
            raise

    def _exchange(self, pile: PendingWrites) -> None:
        with self._claiming() as claim:
            self._exchange_as(claim, pile)

    def _say_hungry(self) -> None:
        """Whoever rings because of it may be heard before we come back: nothing may be noted down after that."""
        self._hungry = True
        try:
            self._store.nodes.hungry(self._node, True)
        except BaseException:  # nobody knows; raised again
            self._hungry = False
            raise

    def _exchange_as(self, claim: int, pile: PendingWrites) -> None:
        jobs: list[Claimed] = []
        tasks = pile.only or self._tasks
        began = time.perf_counter()
        if pile.succeeded:
            matched, jobs = self._store.claims.finish_and_claim(
                self._node, claim, pile.succeeded, pile.wants, tasks
            )
            lost = (
                []
                if len(matched) == len(pile.succeeded)
                else [s for s in pile.succeeded if s.id not in matched]
            )
            pile.succeeded = []
            self._post(SuccessesRefused(lost) if lost else EndingsWritten())
            self._hand_on()
        elif pile.wants:
            jobs = self._store.claim(self._node, claim, pile.wants, tasks)
            if not jobs and not self._hungry:
                # Say so first, then look once more, and soon again: a job that came in between has not seen the flag.
                self._say_hungry()
                self._just_hungry = self._store.parallel_writers > 1
                jobs = self._store.claim(self._node, claim, pile.wants, tasks)
        if pile.wants:
            if self._meter is not None:
                self._meter.took(time.perf_counter() - began, len(jobs))
            pile.wants = {}
            self._post(JobsClaimed(jobs, claim))
