"""Readiness chains: `ready().limit_to(5, bucket).check(fn).any(…)`; a chain is AND, `any` is OR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from genba.errors import BadOption


@dataclass(frozen=True, slots=True)
class LimitTo:
    """At most `n` running jobs of this task, or of this bucket of it."""

    n: int
    bucket: Any = None


@dataclass(frozen=True, slots=True)
class Check:
    """A question with the answer yes, no, or Wait."""

    fn: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of these chains must hold."""

    chains: tuple[Ready, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Terms that must all hold, asked from left to right; the empty chain is ready."""

    terms: tuple[LimitTo | Check | AnyOf, ...] = ()

    def limit_to(self, n: int, bucket: Any = None) -> Ready:
        if type(n) is not int or n < 0:
            raise BadOption(f"limit_to takes a whole number of at least 0, not {n!r}")
        return replace(self, terms=(*self.terms, LimitTo(n, bucket)))

    def check(self, fn: Callable[..., Any]) -> Ready:
        if not callable(fn):
            raise BadOption(f"check takes a function, not {fn!r}")
        return replace(self, terms=(*self.terms, Check(fn)))

    def any(self, *chains: Ready) -> Ready:
        if not chains or not all(isinstance(chain, Ready) for chain in chains):
            raise BadOption("any takes one or more chains that begin with ready()")
        return replace(self, terms=(*self.terms, AnyOf(chains)))


def ready() -> Ready:
    """An empty chain, which is ready."""
    return Ready()
