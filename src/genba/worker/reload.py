"""Which files an app is made of, and whether one of them has changed."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_INSTALLED = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class FileWatch:
    """The files of all imported modules that are not installed packages, as they are now, and `also` these."""

    def __init__(self, also: Iterable[str] = ()) -> None:
        own = {
            module.__file__
            for module in list(sys.modules.values())
            if getattr(module, "__file__", None)
        }
        self._seen = {path: _stamp(path) for path in {*own, *also} if path and is_own(path)}

    def changed(self) -> str | None:
        """One that has changed, come or gone."""
        return next((path for path, stamp in self._seen.items() if _stamp(path) != stamp), None)


def suspects(target: str, error: BaseException) -> set[str]:
    """The files that are to be mended when `target` could not be imported; a module that failed is in no list."""
    found = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    if isinstance(error, SyntaxError) and error.filename:
        found.add(error.filename)
    missing = [error.name] if isinstance(error, ImportError) and error.name else []
    for module in (target.partition(":")[0], *missing):
        place = Path.cwd().joinpath(*module.split("."))
        found |= {f"{place}.py", str(place / "__init__.py")}
    return found


def is_own(path: str) -> bool:
    return (
        not path.startswith(_INSTALLED)
        and not path.startswith("<")
        and "/site-packages/" not in path
    )


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
