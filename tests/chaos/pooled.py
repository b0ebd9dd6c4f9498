"""A plugin: the tests run with all of genba's connections to PostgreSQL behind a pooler in transaction mode.

    pytest -p tests.chaos.pooled -k postgres tests/storage

It is PgBouncer where that is installed, else one of our own, which is slow.  What a test connects by itself goes
straight to the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from tests.chaos.pgbouncer import PROGRAM, PgBouncer
from tests.chaos.pooler import Pooler
from tests.support import Databases

_poolers: dict[str, Pooler | PgBouncer] = {}
_straight: dict[str, str] = {}  # of a pooled URL
_url, _fresh, _connect = Databases.url, Databases.fresh, psycopg.connect


def url(databases: Databases, name: str) -> str:
    if name not in _poolers:
        straight = _url(databases, name)
        _poolers[name] = Pooler(straight, 8) if PROGRAM is None else PgBouncer(straight, 8)
        _straight[_poolers[name].url] = straight
    return _poolers[name].url


@contextmanager
def fresh(databases: Databases, template: str = "template1") -> Iterator[str]:
    if template in _poolers:  # it can be copied only without connections to it
        _poolers.pop(template).end()
    with _fresh(databases, template) as name:
        try:
            yield name
        finally:
            if name in _poolers:
                _poolers.pop(name).end()


def connect(url: str = "", *args: Any, **given: Any) -> Any:
    return _connect(_straight.get(url, url), *args, **given)


def pytest_configure(config: pytest.Config) -> None:
    patch: Any = setattr
    for where, name, instead in (
        (Databases, "url", url),
        (Databases, "fresh", fresh),
        (psycopg, "connect", connect),
    ):
        patch(where, name, instead)
