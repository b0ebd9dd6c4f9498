"""Conditions: the answers that they may give, and how several answers are combined.

`ready().limit_to(5, bucket).check(fn).any(…)`: a chain is AND, `any` is OR.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from genba.domain.duration import Micros
from genba.errors import BadOption, BadTask
from genba.options.names import is_task_name, task_name
from genba.options.table import Options
from genba.options.values import Wait

F = TypeVar("F", bound=Callable[..., Any])

_sorted = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class LimitTo:
    """At most `n` running jobs of this task, or of this bucket of it."""

    n: int
    bucket: Any = None


@dataclass(frozen=True, slots=True)
class CheckTerm:
    """A function that returns True, False, Wait or a chain."""

    fn: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of these chains must hold."""

    chains: tuple[Ready, ...]


Term = LimitTo | CheckTerm | AnyOf


@dataclass(frozen=True, slots=True)
class Ready:
    """Terms that must all hold, evaluated from left to right; the empty chain is ready."""

    terms: tuple[Term, ...] = ()

    def limit_to(self, n: int, bucket: Any = None) -> Ready:
        if type(n) is not int or n < 0:
            raise BadOption(f"n of limit_to must be a whole number of at least 0, got {n!r}")
        return replace(self, terms=(*self.terms, LimitTo(n, bucket)))

    def check(self, fn: Callable[..., Any]) -> Ready:
        if not callable(fn):
            raise BadOption(f"check takes a function, got {fn!r}")
        return replace(self, terms=(*self.terms, CheckTerm(fn)))

    def any(self, *chains: Ready) -> Ready:
        if not chains or not all(isinstance(chain, Ready) for chain in chains):
            raise BadOption(
                f"any takes one or more chains that begin with ready(), got {chains!r:.200}"
            )
        return replace(self, terms=(*self.terms, AnyOf(chains)))


def ready() -> Ready:
    """Begin a chain of conditions; the empty chain is ready."""
    return Ready()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that may start if its conditions hold; the argument of a condition."""

    id: int
    task: str
    args: dict[str, Any]
    options: dict[str, Any]
    attempt: int
    retries: int = 0
    crashes: int = 0


Slots = tuple[tuple[str, int], ...]  # (bucket, n): a slot of each is needed


@dataclass(frozen=True, slots=True)
class Readiness:
    """The combined answer of a job's conditions.

    Each of `ways` is a set of slots with which the job is ready; without any way it is not ready.
    No slot is taken before all conditions have answered, so no slot must be returned for a branch
    that did not hold.
    """

    ways: tuple[Slots, ...] = ((),)
    wait: Micros | None = None  # not ready: when to evaluate again; None: at the default interval
    refused_by: str | None = None  # the condition that does not hold

    def __bool__(self) -> bool:
        return bool(self.ways)


YES = Readiness()
CallCondition = Callable[[Callable[..., Any], Candidate], Any]


def evaluate(
    conditions: Sequence[tuple[str, Callable[..., Any]]], job: Candidate, call: CallCondition
) -> Readiness:
    """Evaluate conditions that must all hold; `call` runs a function for the job.

    An exception of a condition is not caught.
    """
    readiness = YES
    for name, fn in conditions:
        readiness = _all_of(readiness, _read(name, call(fn, job), job, call))
        if not readiness:
            break
    return readiness


def _read(name: str, answer: Any, job: Candidate, call: CallCondition) -> Readiness:
    match answer:
        case bool():
            return YES if answer else Readiness(ways=(), refused_by=name)
        case Wait():
            return Readiness(ways=(), wait=answer.micros, refused_by=name)
        case Ready():
            return _chain(name, answer, job, call)
    raise TypeError(
        f"{name}: a condition must return True, False, Wait(…) or a chain of ready(), "
        f"got {answer!r:.200}"
    )


def _chain(name: str, chain: Ready, job: Candidate, call: CallCondition) -> Readiness:
    readiness = YES
    for term in chain.terms:
        readiness = _all_of(readiness, _term(name, term, job, call))
        if not readiness:
            break
    return readiness


def _term(name: str, term: Term, job: Candidate, call: CallCondition) -> Readiness:
    match term:
        case LimitTo(n, bucket):
            return Readiness(
                ways=(((condition_bucket(job.task, bucket), n),),) if n else (), refused_by=name
            )
        case CheckTerm(fn):
            return _read(name, call(fn, job), job, call)
        case AnyOf(chains):
            branches = []
            for chain in chains:
                branches.append(_chain(name, chain, job, call))
                if () in branches[-1].ways:
                    return YES
            return _any_of(branches)


def _all_of(first: Readiness, second: Readiness) -> Readiness:
    if not first or not second:
        return second if first else first
    return Readiness(
        ways=tuple(tuple(dict([*a, *b]).items()) for a in first.ways for b in second.ways)
    )


def _any_of(branches: Sequence[Readiness]) -> Readiness:
    """Combine branches of which one must hold; if none does, wait for the shortest of them."""
    ways = tuple(dict.fromkeys(way for branch in branches for way in branch.ways))
    if ways:
        return Readiness(ways=ways)
    waits = [branch.wait for branch in branches]
    soonest = None if None in waits else min(wait for wait in waits if wait is not None)
    return Readiness(ways=(), wait=soonest, refused_by=branches[0].refused_by)


def condition_bucket(task: str, bucket: Any) -> str:
    """Return the bucket name of `limit_to`: the task alone, or the task and a value."""
    if bucket is None:
        return task
    try:
        return f"{task}:{bucket if isinstance(bucket, str) else _sorted.encode(bucket).decode()}"
    except (TypeError, msgspec.MsgspecError):
        raise TypeError(
            f"limit_to: bucket must be a text or a plain JSON value, got {bucket!r:.200}"
        ) from None


class Conditions:
    """The conditions of an app, by name."""

    def __init__(self) -> None:
        self.named: dict[str, Callable[..., Any]] = {}

    def add(self, fn: F, name: str | None = None) -> F:
        if not callable(fn):
            raise BadTask(f"a condition must be a function, got {fn!r}")
        arity(fn)
        name = task_name(fn, name)
        if self.named.get(name, fn) is not fn:
            raise BadTask(
                f"condition {name!r} is registered already: give one of them another name="
            )
        self.named[name] = fn
        return fn

    def of_task(
        self, options: Options, task: str, owner: Any, make: Callable[[type], Any]
    ) -> Options:
        """Return the options of a task with the names of its conditions only.

        Functions are registered.  "#method" is a method of the task's own class.
        """
        names = [
            self._of_task(condition, f"{task}#ready-{i}", task, owner, make)
            for i, condition in enumerate(options.ready, 1)
        ]
        return replace(options, ready=tuple(dict.fromkeys(names)))

    def _of_task(
        self, condition: Any, derived: str, task: str, owner: Any, make: Callable[[type], Any]
    ) -> str:
        if callable(condition):
            name = self._name_of(condition) or (None if _has_name(condition) else derived)
            if name is not None and not is_task_name(name):
                raise BadTask(
                    f"{task}: {condition!r} in ready has no name; "
                    "register it with @app.condition(name=…)"
                )
            self.add(condition, name)
            return name or task_name(condition, None)
        if not condition.startswith("#"):
            return str(condition)
        method_name = condition[1:]
        if not inspect.isclass(owner) or not callable(getattr(owner, method_name, None)):
            raise BadTask(
                f"{task}: {condition!r} in ready must name a method of the task's own class, "
                "which has no such method"
            )
        self.named[f"{task}{condition}"] = lambda job: getattr(make(owner), method_name)(job)
        return f"{task}{condition}"

    def of_call(self, options: Options, *, known: bool) -> Options:
        """Return the options of a call with the names of its conditions only.

        If this app has the code of the task (`known`), BadOption for a name that is not registered.
        """
        if not options.ready:
            return options
        names = tuple(self._name_of(condition) or condition for condition in options.ready)
        for name in names:
            if not isinstance(name, str):
                raise BadOption(
                    f"ready: {name!r} is not a registered condition; "
                    "decorate it with @app.condition"
                )
        if known:
            self.check(names)
        return replace(options, ready=names)

    def check(self, names: Sequence[str], where: str = "") -> None:
        """Raise BadOption for the first name that is not registered."""
        for name in names:
            if name not in self.named:
                close = get_close_matches(name, self.named)
                hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
                raise BadOption(f"{where}ready: there is no condition {name!r}{hint}")

    def _name_of(self, fn: Any) -> str | None:
        return next((name for name, known in self.named.items() if known is fn), None)


def _has_name(fn: Callable[..., Any]) -> bool:
    """Return whether a callable has a name of its own; lambdas, partials and instances do not."""
    return getattr(fn, "__name__", "<lambda>") != "<lambda>"


def arity(fn: Callable[..., Any]) -> int:
    """Return 1 if a condition takes the job, 0 if it takes nothing; BadOption otherwise."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return 1
    for count in (1, 0):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count
    raise BadOption(
        f"{getattr(fn, '__qualname__', fn)}: a condition takes the job or nothing; "
        "remove its other parameters"
    )
