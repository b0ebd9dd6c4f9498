"""The names of events: those that users may ask for are those that the code tells, and no others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import genba
from genba.domain.events import KINDS

_TELLERS = {"tell", "_tell", "_changed"}


def _sources() -> Iterator[ast.Module]:
    for path in sorted(Path(genba.__file__).parent.rglob("*.py")):
        if path.name != "events.py" or path.parent.name != "genba":
            yield ast.parse(path.read_text())


def _texts(node: ast.AST) -> set[str]:
    return {
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }


def _told() -> set[str]:
    """What stands where a kind stands in a call that tells: behind the transaction."""
    found: set[str] = set()
    for module in _sources():
        for node in ast.walk(module):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _TELLERS
            ):
                match node.args:
                    case [ast.Name(id="tx"), ast.Constant() | ast.IfExp() as kind, *_]:
                        found |= _texts(kind)
    return found


def test_what_is_told_can_be_asked_for():
    told = _told()
    assert {"succeeded", "condition_failed", "queue_changed"} <= told
    assert told <= KINDS


def test_what_can_be_asked_for_is_told_by_somebody():
    assert set[str]().union(*map(_texts, _sources())) >= KINDS
