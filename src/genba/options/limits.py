"""Which limits hold for a job: from what the code says, or a definition that a node has left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import msgspec

from genba.domain.limits import LimitRule, SlotNeeds, needs_of, placeholders
from genba.errors import BadOption, BadTask
from genba.options.table import Options, Policy
from genba.options.values import Limit, Rate

MAX_RUNNING_PREFIX, RATE_PREFIX = (
    "max_running ",
    "rate ",
)  # before the names of buckets that are a task's own


def rules_of(task: str, options: Options, policy: Policy) -> tuple[LimitRule, ...]:
    """The limits of one job of a task."""
    rules = [_rule(task, limit) for limit in options.limits]
    if policy.rate is not None:
        rules.append(_rule(task, policy.rate))
    most = 1 if policy.exclusive else policy.max_running
    if most is not None:
        rules.append(LimitRule(MAX_RUNNING_PREFIX + task, most))
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
    """The slots that a call needs; `values`, its arguments by name, are asked for only if a bucket speaks of them."""
    return needs_of(rules, values() if any("{" in rule.template for rule in rules) else {})


def describe(rules: Iterable[LimitRule]) -> list[list[Any]]:
    """For the definition that nodes persist."""
    return [list(rule) for rule in rules]


def rules_from_json(definition: Mapping[str, Any]) -> tuple[LimitRule, ...]:
    return tuple(msgspec.convert(definition.get("limits", ()), list[LimitRule]))


def check_arguments(task: str, rules: Iterable[LimitRule], signature: Signature) -> None:
    """BadTask for a template that names what the task does not take."""
    known = signature.parameters
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for rule in rules:
        for name in placeholders(rule.template):
            if name not in known:
                raise BadTask(
                    f"task {task!r}: bucket {rule.template!r} needs an argument {name!r}, and it has none"
                )


class BucketTemplates:
    """What an app has said of its templates: one meaning each."""

    def __init__(self) -> None:
        self._meant: dict[str, tuple[LimitRule, str]] = {}

    def add(self, task: str, rules: Iterable[LimitRule]) -> None:
        for rule in rules:
            other, by = self._meant.setdefault(rule.template, (rule, task))
            if other != rule:
                text = f"{_words(rule)}, but task {by!r} says {_words(other)}; n is the template's"
                raise BadTask(f"task {task!r}: {text}")

    def check(self, rules: Iterable[LimitRule]) -> None:
        """Of one call; what a task says of itself, an operator may have changed."""
        for rule in rules:
            if rule.template.startswith((MAX_RUNNING_PREFIX, RATE_PREFIX)):
                continue
            other, by = self._meant.get(rule.template, (rule, ""))
            if other != rule:
                raise BadOption(
                    f"limits: {_words(rule)}, but task {by!r} says {_words(other)}; n is the template's"
                )


def _words(rule: LimitRule) -> str:
    n = f"{rule.n} per {rule.per / 1_000_000:g} s" if rule.per is not None else str(rule.n)
    return f"bucket {rule.template!r} has {n}{' in order' if rule.ordered else ''}"
