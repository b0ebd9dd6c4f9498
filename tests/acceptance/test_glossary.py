"""The documents for developers name modules that exist, and the glossary explains every module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support import ROOT

SOURCE = ROOT / "src" / "genba"
GLOSSARY = (ROOT / "docs" / "explanation" / "glossary.md").read_text().lower()
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
# `node/loop.py`, `tests/sim/` or `storage/engines/…`: a path from src/genba, or from the root.
PATH = re.compile(
    r"`((?:src/genba|tests|benchmarks|docs|cli|client|domain|enqueue|node|options|reports"
    r"|storage|wire|worker)/[\w./-]*)`"
)

NAME = re.compile(r"`(\w[\w/]*)`")


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if not path.stem.startswith("_"))


@pytest.mark.parametrize("module", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_glossary_explains_every_module(module: Path) -> None:
    names = {module.stem, module.stem.replace("_", " ")}

    assert any(re.search(rf"(?<![a-z0-9_]){name}(?![a-z0-9_])", GLOSSARY) for name in names), (
        f"docs/explanation/glossary.md has no line for {module.stem}"
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    paths = PATH.findall(document.read_text())

    assert [path for path in paths if not exists(path)] == []


def exists(path: str) -> bool:
    """Whether a file or folder has this path, with or without `.py`."""
    return any((root / f"{path}{end}").exists() for root in (ROOT, SOURCE) for end in ("", ".py"))


def test_every_module_that_the_glossary_names_exists() -> None:
    """Classes stand in parentheses behind their module."""
    layers = re.sub(r"\([^)]*\)", "", GLOSSARY.partition("\n## `cli`")[2])
    rows = re.findall(r"^\| ([^|]+) \|", layers, re.MULTILINE)
    named = {name for row in rows for name in NAME.findall(row)}
    existing = {
        name for path in modules() for name in (path.stem, f"{path.parent.name}/{path.stem}")
    }

    assert sorted(named - existing) == []
