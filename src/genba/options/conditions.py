"""Readiness: what a condition may answer, and what the answers of several come to.

`ready().limit_to(5, bucket).check(fn).any(…)`: a chain is AND, `any` is OR.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from genba.client.task import is_task_name, task_name
from genba.domain.duration import Micros
from genba.errors import BadOption, BadTask
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
    """A question with the answer yes, no, or Wait."""

    fn: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of these chains must hold."""

    chains: tuple[Ready, ...]


Term = LimitTo | CheckTerm | AnyOf


@dataclass(frozen=True, slots=True)
class Ready:
    """Terms that must all hold, asked from left to right; the empty chain is ready."""

    terms: tuple[Term, ...] = ()

    def limit_to(self, n: int, bucket: Any = None) -> Ready:
        if type(n) is not int or n < 0:
            raise BadOption(f"limit_to takes a whole number of at least 0, not {n!r}")
        return replace(self, terms=(*self.terms, LimitTo(n, bucket)))

    def check(self, fn: Callable[..., Any]) -> Ready:
        if not callable(fn):
            raise BadOption(f"check takes a function, not {fn!r}")
        return replace(self, terms=(*self.terms, CheckTerm(fn)))

    def any(self, *chains: Ready) -> Ready:
        if not chains or not all(isinstance(chain, Ready) for chain in chains):
            raise BadOption("any takes one or more chains that begin with ready()")
        return replace(self, terms=(*self.terms, AnyOf(chains)))


def ready() -> Ready:
    """An empty chain, which is ready."""
    return Ready()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that may start if its conditions hold: what they are given."""

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
    """What the answers come to.

    `ways`: each is a way to be ready, by having these slots; without any it is not ready.  No slot is taken before
    all questions are answered, so none has to be given back for a branch that did not hold.
    """

    ways: tuple[Slots, ...] = ((),)
    wait: Micros | None = None  # not ready: when to ask again; None: by and by
    said: str | None = None  # who said no

    def __bool__(self) -> bool:
        return bool(self.ways)


YES = Readiness()
Call = Callable[[Callable[..., Any], Candidate], Any]


def ask(
    conditions: Sequence[tuple[str, Callable[..., Any]]], job: Candidate, call: Call
) -> Readiness:
    """All of these must hold; `call` runs a function for the job.  Whatever they raise is raised."""
    verdict = YES
    for name, fn in conditions:
        verdict = _both(verdict, _read(name, call(fn, job), job, call))
        if not verdict:
            break
    return verdict


def _read(name: str, answer: Any, job: Candidate, call: Call) -> Readiness:
    match answer:
        case bool():
            return YES if answer else Readiness(ways=(), said=name)
        case Wait():
            return Readiness(ways=(), wait=answer.micros, said=name)
        case Ready():
            return _chain(name, answer, job, call)
    raise TypeError(
        f"{name}: a condition answers True, False, Wait(…) or a chain of ready(), not {answer!r:.200}"
    )


def _chain(name: str, chain: Ready, job: Candidate, call: Call) -> Readiness:
    verdict = YES
    for term in chain.terms:
        verdict = _both(verdict, _term(name, term, job, call))
        if not verdict:
            break
    return verdict


def _term(name: str, term: Term, job: Candidate, call: Call) -> Readiness:
    match term:
        case LimitTo(n, bucket):
            return Readiness(
                ways=(((condition_bucket(job.task, bucket), n),),) if n else (), said=name
            )
        case CheckTerm(fn):
            return _read(name, call(fn, job), job, call)
        case AnyOf(chains):
            verdicts = []
            for chain in chains:
                verdicts.append(_chain(name, chain, job, call))
                if () in verdicts[-1].ways:
                    return YES
            return _either(verdicts)


def _both(one: Readiness, other: Readiness) -> Readiness:
    if not one or not other:
        return other if one else one
    return Readiness(
        ways=tuple(tuple(dict([*a, *b]).items()) for a in one.ways for b in other.ways)
    )


def _either(verdicts: Sequence[Readiness]) -> Readiness:
    """Any of them; if none, the first to change its mind says when to ask again."""
    ways = tuple(dict.fromkeys(way for verdict in verdicts for way in verdict.ways))
    if ways:
        return Readiness(ways=ways)
    waits = [verdict.wait for verdict in verdicts]
    soonest = None if None in waits else min(wait for wait in waits if wait is not None)
    return Readiness(ways=(), wait=soonest, said=verdicts[0].said)


def condition_bucket(task: str, bucket: Any) -> str:
    """The name of a bucket of `limit_to`: of the task alone, or of the task and a value."""
    if bucket is None:
        return task
    try:
        return f"{task}:{bucket if isinstance(bucket, str) else _sorted.encode(bucket).decode()}"
    except (TypeError, msgspec.MsgspecError):
        raise TypeError(
            f"limit_to: a bucket is a text or a plain JSON value, not {bucket!r:.200}"
        ) from None


class Conditions:
    """The conditions of an app, by name."""

    def __init__(self) -> None:
        self.named: dict[str, Callable[..., Any]] = {}

    def add(self, fn: F, name: str | None = None) -> F:
        if not callable(fn):
            raise BadTask(f"a condition is a function, not {fn!r}")
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
        """With names only: functions are registered, "#method" is one of the task's own class."""
        names = [
            self._of_task(one, f"{task}#ready-{i}", task, owner, make)
            for i, one in enumerate(options.ready, 1)
        ]
        return replace(options, ready=tuple(dict.fromkeys(names)))

    def _of_task(
        self, one: Any, derived: str, task: str, owner: Any, make: Callable[[type], Any]
    ) -> str:
        if callable(one):
            name = self._name_of(one) or (None if _has_name(one) else derived)
            if name is not None and not is_task_name(name):
                raise BadTask(
                    f"{task}: {one!r} in ready has no name: register it by @app.condition(name=…)"
                )
            self.add(one, name)
            return name or task_name(one, None)
        if not one.startswith("#"):
            return str(one)
        method = getattr(owner, one[1:], None)
        if not inspect.isclass(owner) or not callable(method):
            raise BadTask(
                f"{task}: {one!r} in ready is a method of the task's own class, and there is none"
            )
        self.named[f"{task}{one}"] = lambda job: getattr(make(owner), one[1:])(job)
        return f"{task}{one}"

    def of_call(self, options: Options, *, known: bool) -> Options:
        """With names only; BadOption for one that is not there, if the code of the task is (`known`)."""
        if not options.ready:
            return options
        names = tuple(self._name_of(one) or one for one in options.ready)
        for one in names:
            if not isinstance(one, str):
                raise BadOption(
                    f"ready: {one!r} is no registered condition; decorate it with @app.condition"
                )
        if known:
            self.check(names)
        return replace(options, ready=names)

    def check(self, names: Sequence[str], where: str = "") -> None:
        """BadOption for the first that is not there."""
        for name in names:
            if name not in self.named:
                close = get_close_matches(name, self.named)
                meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
                raise BadOption(f"{where}ready: there is no condition {name!r}{meant}")

    def _name_of(self, fn: Any) -> str | None:
        return next((name for name, known in self.named.items() if known is fn), None)


def _has_name(fn: Callable[..., Any]) -> bool:
    """A function or a class has one of its own; a lambda, a partial or an instance has none that others could find."""
    return getattr(fn, "__name__", "<lambda>") != "<lambda>"


def arity(fn: Callable[..., Any]) -> int:
    """1 if it wants to be given the job, 0 if it takes nothing; BadOption for anything else."""
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
    raise BadOption(f"{getattr(fn, '__qualname__', fn)}: a condition takes the job, or nothing")
