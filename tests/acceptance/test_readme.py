"""What README.md and the tutorial print is what happens; and every link leads to something that is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import ROOT, NodeProcess, run_python, without_settings

DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


def blocks(kind: str, document: Path = ROOT / "README.md") -> list[str]:
    return [text for found, text in BLOCK.findall(document.read_text()) if found == kind]


def command(beginning: str) -> list[str]:
    """The one line of the README that begins so, as words."""
    (line,) = [
        line for text in blocks("shell") for line in text.splitlines() if line.startswith(beginning)
    ]
    return shlex.split(line)


@pytest.fixture
def example(engine: str, request: pytest.FixtureRequest) -> str:
    """The code of the README; for PostgreSQL with the line that the README gives for it, on a server that is there."""
    code, to_postgres = blocks("python")
    if engine == "sqlite":
        return code
    line = to_postgres.strip().replace(
        "postgresql://localhost/shop", request.getfixturevalue("empty_url")
    )
    return re.sub(r"^app = .*$", lambda _: line, code, flags=re.MULTILINE)


def test_the_example_prints_what_the_readme_says(
    example: str, tmp_path: Path, start_node: Callable[..., NodeProcess]
) -> None:
    (tmp_path / "tasks.py").write_text(example)
    *start, target = command("genba node")
    assert start == ["genba", "node", "start"]
    _, *script = command("python ")

    start_node(target, "sqlite:///not-this-one.db")
    ran = subprocess.run(
        [sys.executable, *script],
        cwd=tmp_path,
        env=without_settings(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (ran.stdout, ran.returncode) == (blocks("text")[0], 0), ran.stderr
    assert not (tmp_path / "not-this-one.db").exists()


def test_the_example_has_ten_lines() -> None:
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 10


def test_the_tutorial_is_true(
    url: str, tmp_path: Path, start_node: Callable[..., NodeProcess]
) -> None:
    tutorial = ROOT / "docs" / "tutorial" / "first-steps.md"
    (tmp_path / "tasks.py").write_text(blocks("python", tutorial)[0])

    start_node("tasks:app", url)
    ran = run_python(url, "-m", "doctest", "-o", "ELLIPSIS", str(tutorial), cwd=tmp_path)

    assert (ran.stdout, ran.returncode) == ("", 0), ran.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    links = LINK.findall(document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []
