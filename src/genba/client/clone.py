"""A copy of a job: the call that it came from, with changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

from genba.client.job_options import stored_options
from genba.client.task import Task
from genba.enqueue.call import Call
from genba.options.table import JOB_OPTIONS, Options
from genba.storage.records import JobRecord


def copy_of(task: Task[..., Any, Any], record: JobRecord, changes: Mapping[str, Any]) -> Call[Any]:
    """Build the call that this job came from, with `changes`.

    A change is an argument that the task names, or else an option, or else goes to the task's
    `**kwargs`.
    """
    args, kwargs = task.arguments.decode(record.args)
    bound = task.arguments.signature.bind(*args, **kwargs)
    parameters = task.arguments.signature.parameters
    variadic = next((n for n, p in parameters.items() if p.kind is Parameter.VAR_KEYWORD), None)
    named = {n: value for n, value in changes.items() if n in parameters and n != variadic}
    options = {name: value for name, value in changes.items() if name not in named}
    bound.arguments.update(named)
    if variadic is not None:
        others = {name: options.pop(name) for name in list(options) if name not in JOB_OPTIONS}
        bound.arguments[variadic] = {**bound.arguments.get(variadic, {}), **others}
    base = replace(
        stored_options(record, task.options), at=None, expires=None, after=(), on_conflict="return"
    )
    payload = task.arguments.encode(bound.args, bound.kwargs)
    return Call(task.name, payload, Options.build(options, base), task.policy, task.arguments)
