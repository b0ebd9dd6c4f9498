"""What the documents about dependencies and conditions show is what happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import ROOT, NodeProcess, run_python, sqlite_url

HOWTO = ROOT / "docs" / "howto"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", ["dependencies.md", "conditions.md"])
def test_the_examples_are_true(
    document: str, tmp_path: Path, start_node: Callable[..., NodeProcess]
) -> None:
    url = sqlite_url(tmp_path)
    code, *more = PYTHON.findall((HOWTO / document).read_text())
    (tmp_path / "tasks.py").write_text("\n\n".join([code, *more]))
    start_node("tasks:app", url)

    ran = run_python(url, "-m", "doctest", str(HOWTO / document), cwd=tmp_path)

    assert (ran.stdout, ran.returncode) == ("", 0), ran.stderr
