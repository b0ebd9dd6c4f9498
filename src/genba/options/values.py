"""Small values that users put into options: limits, rates, dependencies, and "ask again later"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal, TypeAlias

from genba.domain.duration import SECOND, Duration, Micros, duration
from genba.errors import BadOption

DependencyOutcome: TypeAlias = Literal["success", "finished", "failure"]

_CONDITIONS: tuple[DependencyOutcome, ...] = ("success", "finished", "failure")
_LONGEST_BUCKET = 200
_OURS = ("max_running ", "rate ", "limit_to ")
_MOST = 2**31 - 1
_RATE = re.compile(r"\s*([0-9]{1,10})\s*/\s*(\S.*?)\s*")
_ONE_UNIT = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `n` jobs of a bucket run at a time in the cluster; the rest wait.  With 0 none runs.

    `{name}` in the bucket stands for the job's argument of that name.  With `ordered` (and n = 1) the jobs run one
    at a time in the order in which they were enqueued.
    """

    bucket: str
    n: int
    ordered: bool = False

    def __post_init__(self) -> None:
        _check_bucket(self.bucket)
        _check_count("n of a limit", self.n, least=0)
        if not isinstance(self.ordered, bool):
            raise BadOption(f"ordered must be True or False, not {self.ordered!r}")
        if self.ordered and self.n != 1:
            raise BadOption(f"an ordered limit runs one job at a time: n must be 1, not {self.n}")


@dataclass(frozen=True, slots=True)
class Rate:
    """At most so many starts per bucket in so much time: "10/s", "100/m" or "5/30s" (bucket None: per task).

    `burst` is how many may start at once after a quiet time; by default the count of the rate.
    """

    bucket: str | None
    rate: str
    burst: int | None = None

    def __post_init__(self) -> None:
        _parse_rate(self.rate)
        if self.bucket is not None:
            _check_bucket(self.bucket)
        if self.burst is not None:
            _check_count("burst of a rate", self.burst)

    @property
    def n(self) -> int:
        return _parse_rate(self.rate)[0]

    @property
    def per(self) -> Micros:
        return _parse_rate(self.rate)[1]


@dataclass(frozen=True, slots=True)
class Dep:
    """Another job that must have succeeded, failed, or just finished first.

    `job` is a handle, an id, or a call of the same batch.
    """

    job: Any
    on: DependencyOutcome = "success"

    def __post_init__(self) -> None:
        if self.job is None or isinstance(self.job, bool | float | str | bytes | Dep):
            raise BadOption(
                f"a dependency is a job, its id, or a call of the same batch, not {self.job!r}"
            )
        if self.on not in _CONDITIONS:
            raise BadOption(f"a dependency is on one of {', '.join(_CONDITIONS)}, not {self.on!r}")


@dataclass(frozen=True, slots=True)
class Wait:
    """A condition's answer "not now, ask again after this time"."""

    duration: Duration

    def __post_init__(self) -> None:
        if duration(self.duration) == 0:
            raise BadOption("a wait must be longer than nothing; return True or False instead")

    @property
    def micros(self) -> Micros:
        return duration(self.duration)


def _check_bucket(bucket: object) -> None:
    if not isinstance(bucket, str) or not 1 <= len(bucket) <= _LONGEST_BUCKET or "\0" in bucket:
        raise BadOption(f"a bucket is a text of 1 to {_LONGEST_BUCKET} characters, not {bucket!r}")
    if bucket.startswith(_OURS):
        raise BadOption(
            f"bucket {bucket!r}: names that begin with {bucket.split()[0] + ' '!r} are those of tasks"
        )
    try:
        parts = list(Formatter().parse(bucket))
    except ValueError as error:
        raise BadOption(f"bucket {bucket!r}: {error}") from None
    for _, name, form, conversion in parts:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise BadOption(
                f"bucket {bucket!r}: between braces stands the name of an argument, and nothing else"
            )


def _check_count(what: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise BadOption(f"the {what} must be a whole number of at least {least}, not {value!r}")


def _parse_rate(rate: object) -> tuple[int, Micros]:
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if match is None:
        raise BadOption(f'a rate is written "10/s", "100/m" or "5/30s", not {rate!r}')
    count, unit = int(match[1]), match[2]
    _check_count("count of a rate", count)
    per = duration(f"1{unit}" if _ONE_UNIT.fullmatch(unit) else unit)
    if not 0 < per <= 366 * 86_400 * SECOND:
        raise BadOption(f"rate {rate!r}: the time must be longer than nothing and at most a year")
    return count, per
