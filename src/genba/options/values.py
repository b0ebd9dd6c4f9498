"""The small values that users put into options: `Limit`, `Rate`, `Dep` and `Wait`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal, TypeAlias

from genba.domain.duration import DAY, Duration, Micros, duration
from genba.errors import BadOption

DependencyOutcome: TypeAlias = Literal["success", "finished", "failure"]

_OUTCOMES: tuple[DependencyOutcome, ...] = ("success", "finished", "failure")
_MAX_BUCKET_LENGTH = 200
_RESERVED_PREFIXES = ("max_running ", "rate ", "limit_to ")
_MAX_COUNT = 2**31 - 1
_MAX_RATE_PERIOD: Micros = 366 * DAY
_RATE = re.compile(r"\s*([0-9]{1,10})\s*/\s*(\S.*?)\s*")
_ONE_UNIT = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `n` jobs of a bucket run at a time in the cluster; the rest wait.  With 0 none runs.

    `{name}` in the bucket stands for the job's argument of that name.  With `ordered` (and n = 1)
    the jobs run one at a time in the order in which they were enqueued.
    """

    bucket: str
    n: int
    ordered: bool = False

    def __post_init__(self) -> None:
        _check_bucket(self.bucket)
        _check_count("n of a limit", self.n, minimum=0)
        if not isinstance(self.ordered, bool):
            raise BadOption(f"ordered must be True or False, got {self.ordered!r}")
        if self.ordered and self.n != 1:
            raise BadOption(f"n of an ordered limit must be 1, got {self.n}")


@dataclass(frozen=True, slots=True)
class Rate:
    """At most a number of starts per time and bucket: "10/s", "100/m" or "5/30s".

    Without a bucket the rate is that of the task.  `burst` jobs may start at once after a quiet
    time; the default is the count of the rate.
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
    """Another job that must succeed, fail, or just finish first.

    `job` is a handle, an id, or a call of the same batch.
    """

    job: Any
    on: DependencyOutcome = "success"

    def __post_init__(self) -> None:
        if self.job is None or isinstance(self.job, bool | float | str | bytes | Dep):
            raise BadOption(
                f"a dependency must be a job, its id, or a call of the same batch, got {self.job!r}"
            )
        if self.on not in _OUTCOMES:
            raise BadOption(
                f"on of a dependency must be one of {', '.join(_OUTCOMES)}, got {self.on!r}"
            )


@dataclass(frozen=True, slots=True)
class Wait:
    """A condition's answer "not now, evaluate again after this time"."""

    duration: Duration

    def __post_init__(self) -> None:
        if duration(self.duration) == 0:
            raise BadOption("wait must be positive, got 0; return True or False instead")

    @property
    def micros(self) -> Micros:
        return duration(self.duration)


def _check_bucket(bucket: object) -> None:
    if not isinstance(bucket, str) or not 1 <= len(bucket) <= _MAX_BUCKET_LENGTH or "\0" in bucket:
        raise BadOption(
            f"bucket must be a text of 1 to {_MAX_BUCKET_LENGTH} characters, got {bucket!r}"
        )
    if bucket.startswith(_RESERVED_PREFIXES):
        raise BadOption(
            f"bucket {bucket!r}: names that begin with {bucket.split()[0] + ' '!r} are reserved; "
            "choose another name"
        )
    try:
        parts = list(Formatter().parse(bucket))
    except ValueError as error:
        raise BadOption(f"bucket {bucket!r}: {error}") from None
    for _, name, form, conversion in parts:
        if name is not None and (not name.isidentifier() or form or conversion):
            raise BadOption(f"bucket {bucket!r}: write only the name of an argument between braces")


def _check_count(name: str, value: object, minimum: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_COUNT:
        raise BadOption(f"{name} must be a whole number of at least {minimum}, got {value!r}")


def _parse_rate(rate: object) -> tuple[int, Micros]:
    match = _RATE.fullmatch(rate) if isinstance(rate, str) else None
    if match is None:
        raise BadOption(f'rate must be written as "10/s", "100/m" or "5/30s", got {rate!r}')
    count, unit = int(match[1]), match[2]
    _check_count("count of a rate", count)
    per = duration(f"1{unit}" if _ONE_UNIT.fullmatch(unit) else unit)
    if not 0 < per <= _MAX_RATE_PERIOD:
        raise BadOption(f"rate {rate!r}: the time must be positive and at most a year")
    return count, per
