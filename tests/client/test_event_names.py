"""The kinds of events: users can name exactly those that the code writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import genba
from genba.domain import events
from genba.domain.events import KINDS

_WRITERS = {"add", "_changed"}  # methods that take the transaction, and then a kind


def _modules() -> Iterator[ast.Module]:
    """Parse every module but the one that lists the kinds."""
    for path in sorted(Path(genba.__file__).parent.rglob("*.py")):
        if path != Path(events.__file__):
            yield ast.parse(path.read_text())


def _texts(node: ast.AST) -> set[str]:
    return {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def _written_kinds() -> set[str]:
    """Return the constants in the place of the kind, after the transaction."""
    kinds: set[str] = set()
    for module in _modules():
        for node in ast.walk(module):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _WRITERS
            ):
                match node.args:
                    case [ast.Name(id="tx"), ast.Constant() | ast.IfExp() as kind, *_]:
                        kinds |= _texts(kind)
    return kinds


def test_users_can_name_every_kind_that_is_written():
    written = _written_kinds()
    assert {"succeeded", "condition_failed", "queue_changed"} <= written
    assert written <= KINDS


def test_every_kind_that_users_can_name_occurs_in_the_code():
    assert set[str]().union(*map(_texts, _modules())) >= KINDS
