"""What the documents about dependencies and conditions show is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import ROOT, NodeProcess, sqlite_url, without_settings

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

    ran = subprocess.run(
        [sys.executable, "-m", "doctest", HOWTO / document],
        cwd=tmp_path,
        env={**without_settings(os.environ), "GENBA_URL": url},
        capture_output=True,
        text=True,
        timeout=90,
    )

    assert (ran.stdout, ran.returncode) == ("", 0), ran.stderr
