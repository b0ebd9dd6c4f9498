"""Imports the app that TARGET names, or explains in one message why that failed."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from genba.errors import BadOption, GenbaError
from genba.worker.reload import is_own

_GENBA = f"{os.path.dirname(os.path.dirname(__file__))}/"

App = Any  # an object with hello(); the zygote needs nothing else


def load(target: str) -> App:
    """Import the app of `module:attribute`; without attribute, the only one in the module."""
    here = os.getcwd()
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    name, _, attribute = target.partition(":")
    module = importlib.import_module(name)
    return _named_app(module, attribute) if attribute else _only_app(module)


def _named_app(module: Any, attribute: str) -> App:
    value, path = module, module.__name__
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise BadOption(f"{path} has no {part!r}; {_advice(module, attribute)}")
        value, path = getattr(value, part), f"{path}.{part}"
    if not _is_app(value):
        kind = "the class" if isinstance(value, type) else "of type"
        name = value.__name__ if isinstance(value, type) else type(value).__name__
        raise BadOption(f"{path} is {kind} {name}, not a Genba app; {_advice(module, attribute)}")
    return value


def _only_app(module: Any) -> App:
    match list(_apps(module)):
        case [(_, app)]:
            return app
        case []:
            raise BadOption(f"{module.__name__} has no Genba app; {_advice(module, 'app')}")
        case _:
            raise BadOption(f"{module.__name__} has several Genba apps; {_advice(module, 'app')}")


def _apps(module: Any) -> Iterator[tuple[str, App]]:
    """Give each app once, under its first name."""
    yield from {
        id(value): (name, value) for name, value in reversed(vars(module).items()) if _is_app(value)
    }.values()


def _advice(module: Any, attribute: str) -> str:
    choice = sorted(f"{module.__name__}:{name}" for name, _ in _apps(module))
    return f"name {' or '.join(choice)}" if choice else f"make one there: {attribute} = Genba(...)"


def _is_app(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "hello", None))


@dataclass(frozen=True, slots=True)
class ImportFailure:
    """Why the import failed: one message, and the lines of the user's code that led there."""

    message: str
    frames: str = ""


def explain(target: str, error: BaseException) -> ImportFailure:
    """Describe the error for the author of the app; frames of genba only with GENBA_TRACEBACK=1."""
    seen = traceback.TracebackException.from_exception(error)
    theirs = [frame for frame in seen.stack if not _is_ours(frame.filename)]
    end = _end(error, seen)
    reason = str(error) if isinstance(error, GenbaError) else end.strip()
    advice = _advice_at(error, theirs)
    if not theirs and isinstance(error, ModuleNotFoundError) and _is_part(error.name, target):
        reason = f"there is no module {error.name!r} in {os.getcwd()} or on the Python path"
        advice = "; name it as `import` does, and start in the folder that has it"
    message = f"cannot import {target}: {reason}{advice}"
    if os.environ.get("GENBA_TRACEBACK") == "1" or _is_our_fault(error, seen, theirs):
        return ImportFailure(message, "".join(seen.format()))
    if not theirs and not isinstance(error, SyntaxError):
        return ImportFailure(message)
    _hide_ours(seen)
    return ImportFailure(message, "".join(seen.format()).removesuffix(end))


def _end(error: BaseException, seen: traceback.TracebackException) -> str:
    """Return the end of Python's own report: type and text."""
    lines = list(seen.format_exception_only())
    if isinstance(error, SyntaxError):  # its first lines show the place, and belong to the frames
        lines = [line for line in lines if not line.startswith(" ")]
    return "".join(lines)


def _advice_at(error: BaseException, theirs: list[traceback.FrameSummary]) -> str:
    """Name the line to correct: the last one of the user's code, not of an installed package."""
    places = [(frame.filename, frame.lineno) for frame in theirs]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    own = [place for place in places if is_own(place[0])] or places
    if not own:
        return ""
    install = "install it, or " if isinstance(error, ModuleNotFoundError) else ""
    return f"; {install}correct {own[-1][0]}, line {own[-1][1]}"


def _is_part(module: str | None, target: str) -> bool:
    name = target.partition(":")[0]
    return module is not None and f"{name}.".startswith(f"{module}.")


def _is_our_fault(
    error: BaseException, seen: traceback.TracebackException, theirs: list[Any]
) -> bool:
    """Return whether genba alone raised it, and not on purpose."""
    return (
        not theirs
        and not isinstance(error, GenbaError)
        and seen.stack[-1].filename.startswith(_GENBA)
    )


def _hide_ours(seen: traceback.TracebackException) -> None:
    """Remove the frames of genba, also from the causes, unless genba itself raised the error."""
    chain = [cause for cause in (seen.__cause__, seen.__context__) if cause is not None]
    if seen.stack and seen.stack[-1].filename.startswith(_GENBA):
        seen.__cause__ = seen.__context__ = None
        chain = []
    seen.stack = traceback.StackSummary.from_list(
        [frame for frame in seen.stack if not _is_ours(frame.filename)]
    )
    for cause in chain:
        _hide_ours(cause)


def _is_ours(filename: str) -> bool:
    return filename.startswith((_GENBA, "<frozen importlib")) or filename == importlib.__file__
