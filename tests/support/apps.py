"""Loading the apps of tests/apps, and modules that a test has written."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
APPS = ROOT / "tests" / "apps"


def load_app(name: str, url: str, folder: Path, **settings: Any) -> Any:
    """Load an app of tests/apps as a client of `url`, and copy its file to `folder` for nodes."""
    source = APPS / f"{name}.py"
    (folder / source.name).write_bytes(source.read_bytes())
    return load_module(name, folder, url, source, **settings)


def load_jobs(url: str, folder: Path, **settings: Any) -> Any:
    """Load jobs.py, the app that most tests use."""
    return load_app("jobs", url, folder, **settings)


def load_module(
    name: str, folder: Path, url: str, source: Path | None = None, **settings: Any
) -> Any:
    """The module `name` of `folder`, as a client of `url` has it; `source`: or of another file."""
    spec = spec_from_file_location(name, source or folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for setting, value in {"url": url, **settings}.items():
            patch.setenv(f"GENBA_{setting.upper()}", str(value))
        spec.loader.exec_module(module)
    return module
