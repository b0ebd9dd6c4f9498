"""Fixtures for the tests of users: `genba_queue` is an empty queue, and a clock to move by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from genba.client.app import Genba
    from genba.testing import Testing


def pytest_addoption(parser: Any) -> None:
    parser.addini("genba_app", "the app under test, as module:attribute", default="")


@pytest.fixture
def genba_app(request: pytest.FixtureRequest) -> Genba:
    """The app under test: what `genba_app` in the settings of pytest names, or what your own fixture gives."""
    target = request.config.getini("genba_app")
    if not target:
        raise pytest.UsageError(
            'genba_queue: which app?  Set genba_app = "module:app" in the settings of pytest'
        )
    app: Genba = resolve_name(str(target))
    return app


@pytest.fixture
def genba_queue(genba_app: Genba) -> Iterator[Testing]:
    """`with app.testing()` around the test."""
    with genba_app.testing() as queue:
        yield queue
