"""Fixtures of the chaos tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.chaos.network import Proxy


@pytest.fixture
def proxied(databases: Any, template: str) -> Iterator[tuple[Proxy, str]]:
    """A PostgreSQL database behind a proxy, and its direct URL."""
    with databases.fresh(template) as name:
        proxy = Proxy(databases.url(name))
        try:
            yield proxy, databases.url(name)
        finally:
            proxy.close()
