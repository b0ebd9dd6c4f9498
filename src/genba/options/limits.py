"""The limits of a job: from the code, or from the definition of its task that a node has stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import msgspec

from genba.domain.duration import SECOND
from genba.domain.limits import LimitRule, SlotNeeds, needs_of, placeholders
from genba.errors import BadOption, BadTask
from genba.options.table import Options, Policy
from genba.options.values import Limit, Rate

# The names of a task's own buckets begin with these.
MAX_RUNNING_PREFIX, RATE_PREFIX = "max_running ", "rate "


def rules_of(task: str, options: Options, policy: Policy) -> tuple[LimitRule, ...]:
    """Return the limits of one job of a task."""
    rules = [_rule(task, limit) for limit in options.limits]
    if policy.rate is not None:
        rules.append(_rule(task, policy.rate))
    max_running = 1 if policy.exclusive else policy.max_running
    if max_running is not None:
        rules.append(LimitRule(MAX_RUNNING_PREFIX + task, max_running))
    return tuple(sorted(set(rules)))


def _rule(task: str, limit: Limit | Rate) -> LimitRule:
    if isinstance(limit, Limit):
        return LimitRule(limit.bucket, limit.n, limit.ordered)
    return LimitRule(
        RATE_PREFIX + (task if limit.bucket is None else limit.bucket),
        limit.n,
        False,
        limit.per,
        limit.burst,
    )


def slots_needed(rules: Sequence[LimitRule], values: Callable[[], Mapping[str, Any]]) -> SlotNeeds:
    """Return the slots that a call needs.

    `values` returns its arguments by name; it is called only if a bucket contains one of them.
    """
    return needs_of(rules, values() if any("{" in rule.template for rule in rules) else {})


def rules_to_json(rules: Iterable[LimitRule]) -> list[list[Any]]:
    """Return the rules as plain values, for the definition that nodes store."""
    return [list(rule) for rule in rules]


def rules_from_json(definition: Mapping[str, Any]) -> tuple[LimitRule, ...]:
    """Return the rules of a stored definition."""
    return tuple(msgspec.convert(definition.get("limits", ()), list[LimitRule]))


def check_arguments(task: str, rules: Iterable[LimitRule], signature: Signature) -> None:
    """Raise BadTask if a template contains a name that is not an argument of the task."""
    known = signature.parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for rule in rules:
        for name in placeholders(rule.template):
            if name not in known:
                raise BadTask(
                    f"task {task!r}: bucket {rule.template!r} needs an argument {name!r}, "
                    f"but the task has only ({', '.join(known)})"
                )


class BucketTemplates:
    """The bucket templates of an app; every task must give a template the same limit."""

    def __init__(self) -> None:
        self._declared: dict[str, tuple[LimitRule, str]] = {}

    def add(self, task: str, rules: Iterable[LimitRule]) -> None:
        """Declare the templates of a task; BadTask if another task has given one another limit."""
        for rule in rules:
            other, by = self._declared.setdefault(rule.template, (rule, task))
            if other != rule:
                raise BadTask(f"task {task!r}: {_contradiction(rule, other, by)}")

    def check(self, rules: Iterable[LimitRule]) -> None:
        """Raise BadOption if a call gives a template another limit than its task does.

        A task's own buckets are not checked, because an operator may have changed their limits.
        """
        for rule in rules:
            if rule.template.startswith((MAX_RUNNING_PREFIX, RATE_PREFIX)):
                continue
            other, by = self._declared.get(rule.template, (rule, ""))
            if other != rule:
                raise BadOption(f"limits: {_contradiction(rule, other, by)}")


def _contradiction(rule: LimitRule, other: LimitRule, task: str) -> str:
    return (
        f"{_words(rule)}, but task {task!r} says {_words(other)}; "
        "give the bucket the same limit everywhere"
    )


def _words(rule: LimitRule) -> str:
    n = f"{rule.n} per {rule.per / SECOND:g} s" if rule.per is not None else str(rule.n)
    return f"bucket {rule.template!r} has {n}{' in order' if rule.ordered else ''}"
