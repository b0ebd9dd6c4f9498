"""A call: a task with its arguments and options, which is not enqueued yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from genba.domain import graph
from genba.enqueue.arguments import Arguments
from genba.options.table import Options, Policy

R = TypeVar("R")


class JobHandle:
    """The handle of a job that is enqueued: what `after=` may name besides a call."""

    __slots__ = ("id",)

    id: int


class Call(Generic[R]):
    """One run to be enqueued by `enqueue_many`: the task, its arguments, its options."""

    __slots__ = ("args", "arguments", "options", "policy", "said", "task")

    def __init__(
        self,
        task: str,
        args: bytes,
        options: Options,
        policy: Policy,
        arguments: Arguments | None = None,
        said: frozenset[str] = frozenset(),
    ) -> None:
        self.task = task
        self.args = args
        self.options = options
        self.policy = policy
        self.arguments = arguments
        # The options that the call itself gives; operators do not override these.
        self.said = said

    def __repr__(self) -> str:
        return f"<Call {self.task} {self.args[:60].decode(errors='replace')}>"


def parents_first(calls: Sequence[Call[Any]]) -> tuple[Sequence[Call[Any]], Sequence[int] | None]:
    """Sort calls behind those that they wait for, with the new places; None: no change."""
    if not any(call.options.after for call in calls):
        return calls, None
    places = {id(call): i for i, call in enumerate(calls)}
    order = graph.parents_first([_waits_for(call, places) for call in calls])
    moved_to = dict(zip(order, range(len(order)), strict=True))
    return [calls[i] for i in order], [moved_to[i] for i in range(len(order))]


def _waits_for(call: Call[Any], places: Mapping[int, int]) -> list[int]:
    return [places[id(dep.job)] for dep in call.options.after if id(dep.job) in places]
