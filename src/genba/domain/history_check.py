"""Replay the events of each job and compare the states that they allow with the job's row.

An event does not always determine the state: after a change of its due time a job may be scheduled
or waiting, and a retry may wait or be due at once.  So a job's history yields a set of possible
states, stored as bits of a number: two bytes per job.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from genba.domain.states import FINAL, State


class FaultKind(StrEnum):
    """The kinds of contradictions that a check can report."""

    LOST = "lost"  # a job, or a part of its history, is gone
    TWICE = "finished twice"
    MOVE = "illegal move"
    LIMIT = "limit exceeded"
    TOGETHER = "two attempts at once"
    DAMAGED = "damaged row"


class Fault(NamedTuple):
    """One contradiction between a job's history and its row."""

    kind: FaultKind
    which: str  # "job 7", "bucket gpu"
    words: str

    def __str__(self) -> str:
        return f"{self.which}: {self.kind}: {self.words}"


_BIT = {state: 1 << index for index, state in enumerate(State)}
_DELETED = 1 << len(_BIT)
_FINAL_ONLY = _DELETED << 1  # its task records events of final states only (history="final")
_HAS_ROW = _DELETED << 2


def _bits(*states: State) -> int:
    return sum(_BIT[state] for state in states)


_FINAL = _bits(*FINAL)
_ALL = _bits(*State)
_OPEN = _ALL & ~_FINAL
_UNSTARTED = _bits(State.BLOCKED, State.SCHEDULED, State.WAITING, State.HELD)
_AGAIN = _bits(State.SCHEDULED, State.WAITING)
_ENDS = frozenset(map(str, FINAL))
_NEW = frozenset({"waiting", "scheduled", "blocked"})
# The claim of a short job has no event of its own, so a claimed job may still count as waiting.
_CLAIMED = _bits(State.WAITING, State.RUNNING)
_BY_HAND = _CLAIMED | _bits(State.SCHEDULED, State.HELD)  # `job run --here` takes those too


# For each event: the states in which it may happen, and the states that may follow.
STEPS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "waiting": (_bits(State.BLOCKED, State.SCHEDULED, State.WAITING), _BIT[State.WAITING]),
        "scheduled": (_bits(State.BLOCKED, State.SCHEDULED), _BIT[State.SCHEDULED]),
        "blocked": (
            _bits(State.BLOCKED, State.SCHEDULED, State.HELD, State.CANCELLED),
            _BIT[State.BLOCKED],
        ),
        "running": (_BY_HAND, _BIT[State.RUNNING]),
        "succeeded": (_CLAIMED, _BIT[State.SUCCEEDED]),
        "failed": (_CLAIMED, _BIT[State.FAILED]),
        "timed_out": (_CLAIMED, _BIT[State.TIMED_OUT]),
        "cancelled": (_OPEN, _BIT[State.CANCELLED]),
        "held": (_OPEN, _BIT[State.HELD]),
        "released": (_BY_HAND, _AGAIN),
        "retrying": (_CLAIMED, _AGAIN),
        "crashed": (_CLAIMED, _AGAIN),
        "resumed": (_BIT[State.HELD], _bits(State.BLOCKED, State.SCHEDULED, State.WAITING)),
        "requeued": (_FINAL, _bits(State.BLOCKED, State.WAITING)),
        "deleted": (_ALL & ~_BIT[State.RUNNING], _DELETED),
    }
)
_PAGE_JOBS = 4096


class HistoryCheck:
    """The possible states of all jobs, updated event by event.

    `complete` means that no event was ever pruned, so every job must have events from its enqueue
    on.
    """

    def __init__(self, complete: bool) -> None:
        self._complete = complete
        self._pages: dict[int, array[int]] = {}

    def check_event(self, job: int, kind: str) -> Fault | None:
        """Apply the next event of a job; return the fault if its history does not allow it."""
        page = self._page(job)
        index = job % _PAGE_JOBS
        before = page[index]
        if kind == "updated":
            if before & _AGAIN:
                page[index] = before | _AGAIN
            return None if not before or before & _UNSTARTED else _illegal_move(job, before, kind)
        if kind not in STEPS:
            return None
        # A history that does not begin with the enqueue has events of final states only.
        first = 0 if kind in _NEW else _FINAL_ONLY
        page[index] = STEPS[kind][1] | (before & _FINAL_ONLY if before else first)
        return self._event_fault(job, before, kind)

    def _event_fault(self, job: int, before: int, kind: str) -> Fault | None:
        allowed, _ = STEPS[kind]
        if not before:
            if self._complete and kind not in _NEW and kind not in _ENDS:
                return _move(job, f"it was {kind} before it was enqueued")
            return None
        if before & _DELETED:
            return _move(job, f"it was {kind} after it had been deleted")
        # Without events of open states, any open state may have come before this event.
        unrecorded = before & _FINAL_ONLY and before & _OPEN and allowed & _OPEN
        if before & allowed or unrecorded:
            return None
        if kind in _ENDS and not before & _OPEN:
            words = f"it ended {kind} after it had ended {_words(before)}"
            return Fault(FaultKind.TWICE, f"job {job}", words)
        return _illegal_move(job, before, kind)

    def check_row(self, job: int, state: str, *, final_only: bool) -> Fault | None:
        """Compare a job's row with its history; `final_only` if its task has history="final"."""
        is_now = _BIT.get(State(state), 0)  # an unknown state is reported elsewhere
        page = self._page(job)
        known = page[job % _PAGE_JOBS]
        page[job % _PAGE_JOBS] = known | _HAS_ROW
        if not known:
            if final_only or not self._complete or not is_now:
                return None
            return _move(job, f"it is {state}, but has no events")
        if known & _DELETED:
            return _move(job, f"it is {state}, though it was deleted")
        claimed = is_now == _BIT[State.RUNNING] and known & _BY_HAND
        unrecorded = (final_only or known & _FINAL_ONLY) and known & _OPEN and is_now & _OPEN
        if not is_now or known & is_now or claimed or unrecorded:
            return None
        return _move(job, f"it is {state}, but its events say {_words(known)}")

    def lost_jobs(self) -> Iterator[Fault]:
        """Yield a fault for each open job that has events, but no row."""
        for number, page in sorted(self._pages.items()):
            for index, known in enumerate(page):
                if known & _OPEN and not known & (_HAS_ROW | _FINAL):
                    job = number * _PAGE_JOBS + index
                    words = f"it is gone, and it was {_words(known)}"
                    yield Fault(FaultKind.LOST, f"job {job}", words)

    def _page(self, job: int) -> array[int]:
        page = self._pages.get(job // _PAGE_JOBS)
        if page is None:
            page = self._pages[job // _PAGE_JOBS] = array("H", bytes(2 * _PAGE_JOBS))
        return page


def _move(job: int, words: str) -> Fault:
    return Fault(FaultKind.MOVE, f"job {job}", words)


def _illegal_move(job: int, before: int, kind: str) -> Fault:
    return _move(job, f"it was {kind} when it was {_words(before)}")


def _words(bits: int) -> str:
    return " or ".join(state for state, bit in _BIT.items() if bits & bit)
