"""Retry rules: how often, and after which wait, a job is tried again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from genba.domain.duration import Duration, Micros, duration, format_duration
from genba.errors import BadOption

ExceptionKind = type[BaseException] | str  # a class, or the name of one

_MAX_TIMES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry `times` times (-1: without end), each wait `backoff` times the last one, up to `cap`.

    `delay` and `cap` accept any form of a duration and are kept as text.  `on` and `never` select
    the exceptions that are retried: classes, or names such as "ValueError" and
    "httpx.TimeoutException"; subclasses are included.  Without `on` all exceptions are retried; an
    exception in both is not.
    """

    times: int = 0
    delay: Duration = "10s"
    backoff: float = 2.0
    cap: Duration = "1h"
    on: Iterable[ExceptionKind] = ()
    never: Iterable[ExceptionKind] = ()
    _delay: Micros = field(init=False, repr=False, compare=False)
    _cap: Micros = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_times(self.times)
        _check_backoff(self.backoff)
        delay, cap = duration(self.delay), duration(self.cap)
        # As text, equal rules compare equal however they were written, and `replace` does not take
        # microseconds for seconds.
        numbers = (
            ("backoff", float(self.backoff)),
            ("delay", format_duration(delay)),
            ("cap", format_duration(cap)),
        )
        kinds = (("on", _names("on", self.on)), ("never", _names("never", self.never)))
        for name, value in (*numbers, *kinds, ("_delay", delay), ("_cap", cap)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: int | Retry | Mapping[str, Any] | None) -> Retry:
        """Return the rule for the option `retry=value`; an int n is n retries."""
        if value is None:
            return cls()
        if isinstance(value, Retry):
            return value
        if isinstance(value, Mapping):
            return cls.from_json(value)
        if not isinstance(value, int):
            raise BadOption(
                "retry must be a number of retries, a Retry or a mapping of its fields, "
                f"got {value!r}"
            )
        return cls(times=value)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Retry:
        """Return the rule that `to_json` wrote, or that a mapping of the fields describes."""
        unknown = [name for name in value if name not in _FIELDS]
        if unknown:
            raise BadOption(f"unknown retry fields {unknown!r}; allowed: {', '.join(_FIELDS)}")
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """Return a dict of plain values.

        It has all numbers, so that a later change of a default does not change stored jobs.
        """
        numbers = {name: getattr(self, name) for name in _FIELDS if name not in _KINDS}
        return numbers | {name: list(getattr(self, name)) for name in _KINDS if getattr(self, name)}

    def allows(self, retries_done: int) -> bool:
        """Return whether one more retry is left after `retries_done`."""
        return self.times == -1 or retries_done < self.times

    def covers(self, error: type[BaseException]) -> bool:
        """Return whether an exception of this class is retried."""
        kinds = [kind for kind in error.__mro__ if kind is not object]
        if any(_matches(str(name), kind) for name in self.never for kind in kinds):
            return False
        return not self.on or any(_matches(str(name), kind) for name in self.on for kind in kinds)

    def wait(self, retries_done: int, jitter: float) -> Micros:
        """Return the wait before the next retry, in [d, 1.5 d] by a `jitter` in [0, 1)."""
        try:
            wait = int(min(self._cap, self._delay * self.backoff**retries_done))
        except OverflowError:
            wait = self._cap if self._delay else 0
        return wait + int(wait * jitter / 2)


_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Retry) if f.init)
_KINDS = ("on", "never")


def _names(field: str, value: object) -> tuple[str, ...]:
    """Return the names of exception classes."""
    kinds = (value,) if isinstance(value, str | type) else value
    if not isinstance(kinds, Iterable):
        raise BadOption(f"retry {field} must be exception classes or their names, got {value!r}")
    return tuple(dict.fromkeys(_name(field, kind) for kind in kinds))


def _name(field: str, kind: object) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return (
            kind.__qualname__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}"
        )
    if isinstance(kind, str) and all(part.isidentifier() for part in kind.split(".")):
        return kind
    raise BadOption(f"retry {field} must be exception classes or their names, got {kind!r}")


def _matches(name: str, kind: type) -> bool:
    """Return whether a name or a dotted path stands for this class.

    A path may name a package above the module that defines the class, as users import it.
    """
    if name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
        return True
    package, _, last = name.rpartition(".")
    return (
        bool(package) and last == kind.__name__ and f"{kind.__module__}.".startswith(f"{package}.")
    )


def _check_times(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= _MAX_TIMES:
        raise BadOption(
            f"retry times must be -1 (without end), 0 or a number of retries, got {value!r}"
        )


def _check_backoff(value: object) -> None:
    # The comparison is false for NaN, and for an int that no float can hold.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 1 <= value <= sys.float_info.max
    ):
        raise BadOption(f"retry backoff must be a finite number of at least 1, got {value!r}")
