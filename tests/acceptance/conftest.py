"""shop: a database with one node at work, shared by the tests of one file; each test has a `path` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import NodeProcess, eventually, load_jobs, sqlite_url


@dataclass(frozen=True)
class Shop:
    url: str
    jobs: Any
    node: NodeProcess

    @property
    def app(self) -> Any:
        return self.jobs.app


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    with ExitStack() as stack:
        if request.param == "sqlite":
            url = sqlite_url(folder)
        else:
            databases = request.getfixturevalue("databases")
            url = databases.url(stack.enter_context(databases.fresh(request.getfixturevalue("template"))))
        jobs = load_jobs(url, folder)
        stack.callback(jobs.app.close)
        node = NodeProcess.start("jobs:app", url, "--max", "4", "--name", "shop", cwd=folder)
        stack.callback(lambda: print(node.log))
        stack.callback(node.end)
        eventually(jobs.app.nodes, within=15)
        yield Shop(url, jobs, node)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that jobs wait for; it is there when the test is over."""
    return tmp_path / "gate"


@pytest.fixture(autouse=True)
def _open_the_gate(tmp_path: Path) -> Iterator[None]:
    yield
    (tmp_path / "gate").touch()
