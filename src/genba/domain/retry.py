"""How often, and how soon, a job is tried again."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from genba.domain.duration import Duration, Micros, duration, format_duration
from genba.errors import BadOption

Named = type[BaseException] | str

_MOST_TIMES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Retry:
    """`times` retries after the first try (-1: endless), each wait `backoff` times the one before, up to `cap`.

    `delay` and `cap` may be given in any form of a duration and read back as text.  `on` and `never` say which
    exceptions are worth another try: classes, or names such as "ValueError" and "httpx.TimeoutException", which stand
    for their subclasses too.  Without `on` all are; what is in both is not.
    """

    times: int = 0
    delay: Duration = "10s"
    backoff: float = 2.0
    cap: Duration = "1h"
    on: Iterable[Named] = ()
    never: Iterable[Named] = ()
    _delay: Micros = field(init=False, repr=False, compare=False)
    _cap: Micros = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_times(self.times)
        _check_backoff(self.backoff)
        delay, cap = duration(self.delay), duration(self.cap)
        # As text, equal rules are equal however they were written, and `replace` does not take micros for seconds.
        normal = (
            ("backoff", float(self.backoff)),
            ("delay", format_duration(delay)),
            ("cap", format_duration(cap)),
        )
        kinds = (("on", _names("on", self.on)), ("never", _names("never", self.never)))
        for name, value in (*normal, *kinds, ("_delay", delay), ("_cap", cap)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: int | Retry | Mapping[str, Any] | None) -> Retry:
        """The rule that the option `retry=value` means; an int n is n retries."""
        if value is None:
            return cls()
        if isinstance(value, Retry):
            return value
        if isinstance(value, Mapping):
            return cls.from_json(value)
        if not isinstance(value, int):
            raise BadOption(
                f"retry must be a number of retries, a Retry or a mapping of its fields, not {value!r}"
            )
        return cls(times=value)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Retry:
        """The rule that `to_json` wrote, or any mapping of the fields."""
        unknown = [name for name in value if name not in _FIELDS]
        if unknown:
            raise BadOption(f"unknown retry fields {unknown!r}; allowed: {', '.join(_FIELDS)}")
        return cls(**value)

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values; all numbers, so that a later change of a default changes no stored job."""
        plain = {name: getattr(self, name) for name in _FIELDS if name not in _KINDS}
        return plain | {name: list(getattr(self, name)) for name in _KINDS if getattr(self, name)}

    def allows(self, retries_done: int) -> bool:
        """Whether one more retry is left after `retries_done`."""
        return self.times == -1 or retries_done < self.times

    def covers(self, error: type[BaseException]) -> bool:
        """Whether an exception of this class is worth a retry."""
        kinds = [kind for kind in error.__mro__ if kind is not object]
        if any(_matches(str(name), kind) for name in self.never for kind in kinds):
            return False
        return not self.on or any(_matches(str(name), kind) for name in self.on for kind in kinds)

    def wait(self, retries_done: int, jitter: float) -> Micros:
        """The wait before the next retry, spread over [d, 1.5 d] by a `jitter` in [0, 1)."""
        try:
            plain = int(min(self._cap, self._delay * self.backoff**retries_done))
        except OverflowError:
            plain = self._cap if self._delay else 0
        return plain + int(plain * jitter / 2)


_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Retry) if f.init)
_KINDS = ("on", "never")


def _names(field: str, given: object) -> tuple[str, ...]:
    """Classes as the names that find them again."""
    several = (given,) if isinstance(given, str | type) else given
    if not isinstance(several, Iterable):
        raise BadOption(f"retry {field} must be exception classes or their names, not {given!r}")
    return tuple(dict.fromkeys(_name(field, one) for one in several))


def _name(field: str, one: object) -> str:
    if isinstance(one, type) and issubclass(one, BaseException):
        return (
            one.__qualname__
            if one.__module__ == "builtins"
            else f"{one.__module__}.{one.__qualname__}"
        )
    if isinstance(one, str) and all(part.isidentifier() for part in one.split(".")):
        return one
    raise BadOption(f"retry {field}: {one!r} is neither an exception class nor the name of one")


def _matches(name: str, kind: type) -> bool:
    """A simple name, or a path; a package stands for the modules below it, where its classes are often defined."""
    if name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
        return True
    package, _, last = name.rpartition(".")
    return (
        bool(package) and last == kind.__name__ and f"{kind.__module__}.".startswith(f"{package}.")
    )


def _check_times(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= _MOST_TIMES:
        raise BadOption(
            f"retry times must be -1 (endless), 0 or a number of retries, not {value!r}"
        )


def _check_backoff(value: object) -> None:
    # The comparison is false for NaN, and for an int that no float can hold.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 1 <= value <= sys.float_info.max
    ):
        raise BadOption(f"retry backoff must be a finite number of at least 1, not {value!r}")
