"""Fixtures for users' tests: `genba_queue` is an empty queue with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from genba.client.app import Genba
    from genba.client.under_test import Testing


def pytest_addoption(parser: Any) -> None:
    parser.addini("genba_app", "the app under test, as module:attribute", default="")


@pytest.fixture
def genba_app(request: pytest.FixtureRequest) -> Genba:
    """Return the app that the pytest setting `genba_app` names, or override this fixture."""
    target = request.config.getini("genba_app")
    if not target:
        raise pytest.UsageError(
            'genba_queue needs an app: set genba_app = "module:app" in the settings of pytest, '
            "or define a fixture genba_app"
        )
    app: Genba = resolve_name(str(target))
    return app


@pytest.fixture
def genba_queue(genba_app: Genba) -> Iterator[Testing]:
    """Run the test inside `with app.testing()`."""
    with genba_app.testing() as queue:
        yield queue
