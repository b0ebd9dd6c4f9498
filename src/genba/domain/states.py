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
        """Show an unknown state in a row as it is; it equals none of the states."""
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_, unknown._value_ = "UNKNOWN", value
        return unknown


FINAL: frozenset[State] = frozenset(
    {State.SUCCEEDED, State.FAILED, State.TIMED_OUT, State.CANCELLED}
)
OPEN: frozenset[State] = frozenset(State) - FINAL


class Cause(StrEnum):
    """The event that ended an attempt; "signal 9" and "exit 3" are causes with a number."""

    RETURNED = "returned"
    EXCEPTION = "exception"
    TIMEOUT = "timeout"
    STALL = "stall"
    CANCELLED = "cancelled"
    KILLED = "killed"
    OUT_OF_MEMORY = "out of memory"
    CPU_LIMIT = "cpu limit"
    PAUSE = "pause in a write"  # the process was paused while it blocked all writes to the database
    NODE_LOST = "node lost"
    LEASE_LOST = "lease lost"
    COLLATERAL = "collateral"
    MAYBE_RAN = "maybe_ran"
    DRAIN = "drain"
    NOT_READY = "not ready"  # a condition did not hold, so the attempt did not start


def default_stop_reason(how: str) -> str:
    """Return the reason to record for a "cancel" or a "kill" that came without a reason."""
    return Cause.KILLED if how == "kill" else Cause.CANCELLED


# Resume and requeue lead to one of these; dependencies and due time decide which.
_BACK = frozenset({State.BLOCKED, State.SCHEDULED, State.WAITING})

MOVES: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.BLOCKED: frozenset({State.SCHEDULED, State.WAITING, State.HELD, State.CANCELLED}),
        # Blocked: the run of an interval waits for one that a person has triggered.
        State.SCHEDULED: frozenset({State.WAITING, State.BLOCKED, State.HELD, State.CANCELLED}),
        State.WAITING: frozenset({State.RUNNING, State.SCHEDULED, State.HELD, State.CANCELLED}),
        State.RUNNING: frozenset({State.WAITING, State.SCHEDULED, State.HELD}) | FINAL,
        State.HELD: _BACK | {State.CANCELLED},
        **dict.fromkeys(FINAL, _BACK),
    }
)


PANIC = "panic"  # the reason of a held job begins with this if its own code failed
_PANICKED = "panicked"

_NAMES: Mapping[str, frozenset[State]] = MappingProxyType(
    {
        **{state.value: frozenset({state}) for state in State},
        "open": OPEN,
        "final": FINAL,
        "any": frozenset(State),
        "postponed": frozenset({State.SCHEDULED}),
        _PANICKED: frozenset({State.HELD}),  # only some of these: `panics_only`
        "processing": frozenset({State.RUNNING}),
        "working": frozenset({State.RUNNING}),
        "done": frozenset({State.SUCCEEDED}),
        "complete_success": frozenset({State.SUCCEEDED}),
        "complete_failed": frozenset({State.FAILED}),
    }
)


def parse_states(value: str | Iterable[str]) -> frozenset[State]:
    """Return the states that one or several names stand for; no name stands for no state."""
    untyped: object = value  # a value of a wrong type gets the same message as an unknown name
    names = (
        untyped if isinstance(untyped, Iterable) and not isinstance(untyped, str) else (untyped,)
    )
    return frozenset(state for name in names for state in _named(name))


def panics_only(names: Collection[str]) -> bool:
    """Return whether these names include held jobs, but only those that panicked."""
    return _PANICKED in names and State.HELD not in parse_states(
        name for name in names if name != _PANICKED
    )


def _named(name: object) -> frozenset[State]:
    states = _NAMES.get(name) if isinstance(name, str) else None
    if states is None:
        raise BadOption(f"unknown state {name!r}; allowed: {', '.join(_NAMES)}")
    return states
