"""Watches the files of an app, for `genba node start --reload`."""

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
    """The files of imported modules outside of installed packages, and `also` these, as of now."""

    def __init__(self, also: Iterable[str] = ()) -> None:
        own = {
            module.__file__
            for module in list(sys.modules.values())
            if getattr(module, "__file__", None)
        }
        self._seen = {path: _stamp(path) for path in {*own, *also} if path and is_own(path)}

    def changed(self) -> str | None:
        """Return a file that was changed, created or deleted since, or None."""
        return next((path for path, stamp in self._seen.items() if _stamp(path) != stamp), None)


def suspects(target: str, error: BaseException) -> set[str]:
    """Return the files to watch after `target` could not be imported.

    A module whose import failed is not in sys.modules.
    """
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    if isinstance(error, SyntaxError) and error.filename:
        files.add(error.filename)
    missing = [error.name] if isinstance(error, ImportError) and error.name else []
    for module in (target.partition(":")[0], *missing):
        path = Path.cwd().joinpath(*module.split("."))
        files |= {f"{path}.py", str(path / "__init__.py")}
    return files


def is_own(path: str) -> bool:
    return (
        not path.startswith(_INSTALLED)
        and not path.startswith("<")
        and "/site-packages/" not in path
    )


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
