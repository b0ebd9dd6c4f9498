"""The states of a job, the moves between them, and what can end an attempt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType

from genba.errors import BadOption


class State(StrEnum):
    BLOCKED = "blocked"  # waits for other jobs
    SCHEDULED = "scheduled"  # waits for a moment in the future
    WAITING = "waiting"  # may start now, or is parked
    RUNNING = "running"  # belongs to one attempt of one node
    HELD = "held"  # needs a person, and has a reason
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"

    @classmethod
    def _missing_(cls, value: object) -> State | None:
        """What somebody has written into a row by hand is shown as it is, and is none of the states."""
        if not isinstance(value, str):
            return None
        made = str.__new__(cls, value)
        made._name_, made._value_ = "UNKNOWN", value
        return made


FINAL: frozenset[State] = frozenset(
    {State.SUCCEEDED, State.FAILED, State.TIMED_OUT, State.CANCELLED}
)
OPEN: frozenset[State] = frozenset(State) - FINAL


class Cause(StrEnum):
    """What ended an attempt; "signal 9" and "exit 3" come with a number and are causes too."""

    RETURNED = "returned"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    STALL = "stall"
    CANCELLED = "cancelled"
    KILLED = "killed"
    OUT_OF_MEMORY = "out of memory"
    CPU_LIMIT = "cpu limit"
    PAUSE = "pause in a write"  # it was stopped while nobody else could write to the database
    NODE_LOST = "node lost"
    LEASE_LOST = "lease lost"
    COLLATERAL = "collateral"
    MAYBE_RAN = "maybe_ran"
    DRAIN = "drain"
    NOT_READY = "not ready"  # its conditions do not hold: it was not tried at all


def default_stop_reason(how: str) -> str:
    """The reason of a job that was stopped by a "cancel" or a "kill" for which nobody has given one."""
    return Cause.KILLED if how == "kill" else Cause.CANCELLED


# Where resume and requeue lead; the facts (dependencies, due time) choose among them.
_BACK = frozenset({State.BLOCKED, State.SCHEDULED, State.WAITING})

MOVES: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.BLOCKED: frozenset({State.SCHEDULED, State.WAITING, State.HELD, State.CANCELLED}),
        # Blocked: the run of an interval lets one that a person has triggered go first.
        State.SCHEDULED: frozenset({State.WAITING, State.BLOCKED, State.HELD, State.CANCELLED}),
        State.WAITING: frozenset({State.RUNNING, State.SCHEDULED, State.HELD, State.CANCELLED}),
        State.RUNNING: frozenset({State.WAITING, State.SCHEDULED, State.HELD}) | FINAL,
        State.HELD: _BACK | {State.CANCELLED},
        **dict.fromkeys(FINAL, _BACK),
    }
)


def may_move(old: State, new: State) -> bool:
    """Whether a job in `old` may become `new`; staying where it is is no move."""
    return new in MOVES[old]


PANIC = "panic"  # so begin the reasons of held jobs whose own code went wrong
_PANICKED = "panicked"

_NAMES: Mapping[str, frozenset[State]] = MappingProxyType(
    {
        **{state.value: frozenset({state}) for state in State},
        "open": OPEN,
        "final": FINAL,
        "any": frozenset(State),
        "postponed": frozenset({State.SCHEDULED}),
        _PANICKED: frozenset({State.HELD}),  # of these only some: `panics_only`
        "processing": frozenset({State.RUNNING}),
        "working": frozenset({State.RUNNING}),
        "done": frozenset({State.SUCCEEDED}),
        "complete_success": frozenset({State.SUCCEEDED}),
        "complete_failed": frozenset({State.FAILED}),
    }
)


def parse_states(value: str | Iterable[str]) -> frozenset[State]:
    """The states that one name, or several together, stand for; no name at all stands for no state."""
    given: object = value  # whatever it is, one message refuses it
    names = given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    return frozenset(state for name in names for state in _named(name))


def panics_only(names: Collection[str]) -> bool:
    """Whether these names mean some held jobs, and only those that panicked."""
    return _PANICKED in names and State.HELD not in parse_states(
        name for name in names if name != _PANICKED
    )


def _named(name: object) -> frozenset[State]:
    states = _NAMES.get(name) if isinstance(name, str) else None
    if states is None:
        raise BadOption(f"unknown state {name!r}; allowed: {', '.join(_NAMES)}")
    return states
