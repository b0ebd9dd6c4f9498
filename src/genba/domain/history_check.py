"""History, played again: from what was told of each job, the states that it can be in now.

An event does not always tell the whole: a change of its moment may make a job scheduled or waiting, a retry waits or is
due at once.  So what is known of a job is the set of states that its history allows, as bits of a number; two bytes for
each job, however many there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from genba.domain.states import FINAL, State


class FaultKind(StrEnum):
    """What can be wrong."""

    LOST = "lost"  # a job, or what is told of it, is gone
    TWICE = "finished twice"
    MOVE = "illegal move"
    LIMIT = "limit exceeded"
    TOGETHER = "two attempts at once"
    DAMAGED = "damaged row"


class Fault(NamedTuple):
    kind: FaultKind
    which: str  # "job 7", "bucket gpu"
    words: str

    def __str__(self) -> str:
        return f"{self.which}: {self.kind}: {self.words}"


_BIT = {state: 1 << place for place, state in enumerate(State)}
_GONE = 1 << len(_BIT)  # deleted by somebody
_SILENT = _GONE << 1  # its task tells of final states only
_SEEN = _GONE << 2  # its row is there


def _bits(*states: State) -> int:
    return sum(_BIT[state] for state in states)


_FINAL = _bits(*FINAL)
_ALL = _bits(*State)
_OPEN = _ALL & ~_FINAL
_UNSTARTED = _bits(State.BLOCKED, State.SCHEDULED, State.WAITING, State.HELD)
_AGAIN = _bits(State.SCHEDULED, State.WAITING)
_ENDS = frozenset(map(str, FINAL))
_NEW = frozenset({"waiting", "scheduled", "blocked"})
_CLAIMED = _bits(State.WAITING, State.RUNNING)  # a claim is told only when it has lasted
_BY_HAND = _CLAIMED | _bits(State.SCHEDULED, State.HELD)  # `job run --here` takes those too


# What happened: in which states it may happen, and which may follow.  The claim of a short job is told with its end.
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
        "deleted": (_ALL & ~_BIT[State.RUNNING], _GONE),
    }
)
_PAGE = 4096


class HistoryCheck:
    """`complete`: no event was ever pruned, so that every job must have been told of from its beginning."""

    def __init__(self, complete: bool) -> None:
        self._complete = complete
        self._pages: dict[int, array[int]] = {}

    def tell(self, job: int, kind: str) -> Fault | None:
        """One event after the other, in their order; what is wrong with it."""
        page = self._page(job)
        place = job % _PAGE
        before = page[place]
        if kind == "updated":
            if before & _AGAIN:
                page[place] = before | _AGAIN
            return None if not before or before & _UNSTARTED else _move(job, before, kind)
        if kind not in STEPS:
            return None
        allowed, after = STEPS[kind]
        silent = before & _SILENT
        fault = None
        if not before:
            silent = 0 if kind in _NEW else _SILENT
            if self._complete and kind not in _NEW and kind not in _ENDS:
                fault = Fault(FaultKind.MOVE, f"job {job}", f"it was {kind} before it was enqueued")
        elif before & _GONE:
            fault = Fault(FaultKind.MOVE, f"job {job}", f"it was {kind} after it had been deleted")
        elif not before & allowed and not (silent and before & _OPEN and allowed & _OPEN):
            finished = kind in _ENDS and not before & _OPEN
            again = Fault(
                FaultKind.TWICE,
                f"job {job}",
                f"it ended {kind} after it had ended {_words(before)}",
            )
            fault = again if finished else _move(job, before, kind)
        page[place] = after | silent
        return fault

    def row(self, job: int, state: str, *, silent: bool) -> Fault | None:
        """Its row is there, and says this; what is wrong with it."""
        is_now = _BIT.get(State(state), 0)  # an unknown one is told of elsewhere
        page = self._page(job)
        known = page[job % _PAGE]
        page[job % _PAGE] = known | _SEEN
        if not known:
            quiet = silent or not self._complete or not is_now
            return (
                None
                if quiet
                else Fault(
                    FaultKind.MOVE, f"job {job}", f"it is {state}, and nobody has told of it"
                )
            )
        if known & _GONE:
            return Fault(FaultKind.MOVE, f"job {job}", f"it is {state}, though it was deleted")
        claimed = is_now == _BIT[State.RUNNING] and known & _BY_HAND
        untold = (silent or known & _SILENT) and known & _OPEN and is_now & _OPEN
        if not is_now or known & is_now or claimed or untold:
            return None
        return Fault(
            FaultKind.MOVE, f"job {job}", f"it is {state}, and its history says {_words(known)}"
        )

    def lost(self) -> Iterator[Fault]:
        """Jobs that were told of, have neither ended nor been deleted, and have no row."""
        for number, page in sorted(self._pages.items()):
            for place, known in enumerate(page):
                if known & _OPEN and not known & (_SEEN | _FINAL):
                    job = number * _PAGE + place
                    yield Fault(
                        FaultKind.LOST, f"job {job}", f"it is gone, and it was {_words(known)}"
                    )

    def _page(self, job: int) -> array[int]:
        page = self._pages.get(job // _PAGE)
        if page is None:
            page = self._pages[job // _PAGE] = array("H", bytes(2 * _PAGE))
        return page


def _move(job: int, before: int, kind: str) -> Fault:
    return Fault(FaultKind.MOVE, f"job {job}", f"it was {kind} when it was {_words(before)}")


def _words(bits: int) -> str:
    return " or ".join(state for state, bit in _BIT.items() if bits & bit)
