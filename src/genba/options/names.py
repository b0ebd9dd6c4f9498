"""The names of tasks and conditions: set by the user, or made from module and function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from genba.errors import BadTask
from genba.options.parse import NAME_PATTERN


def task_name(fn: Callable[..., Any], given: str | None) -> str:
    """Return the given name, else "module.function"; BadTask if that cannot be a name."""
    name = given or f"{module_of(fn)}.{getattr(fn, '__qualname__', '').rpartition('<locals>.')[2]}"
    if not NAME_PATTERN.fullmatch(name):
        raise BadTask(
            f"{name!r} is not a valid name: "
            "use a letter or _, then letters, digits, _ . : # - (up to 200)"
        )
    return name


def is_task_name(name: str) -> bool:
    """Return whether a text can be the name of a task."""
    return NAME_PATTERN.fullmatch(name) is not None


def module_of(fn: Callable[..., Any]) -> str:
    """Return the module of `fn`; for a script its file name, by which a node can import it."""
    if fn.__module__ != "__main__":
        return fn.__module__
    file = getattr(sys.modules["__main__"], "__file__", None)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return str(spec.name)
    stem = Path(file).stem if file else ""
    return stem if NAME_PATTERN.fullmatch(stem) else "__main__"
