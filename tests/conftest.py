"""Fixtures for every test.

url         a fresh database with our tables, once on SQLite and once on PostgreSQL (`-k sqlite`, `-k postgres`)
empty_url   the same without tables
store       a Store on `url`, with `clock`
clock       a ManualClock; it stands still until the test moves it
start_node  starts `genba node start` as a process and ends it, with all its children, after the test
jobs        the tasks of jobs.py, of an app on `url`; a node finds them as "jobs:app"
home        the URL of a database and a folder for files, shared by the tests of one file
shop        a database with one node at work, shared by the tests of one file
path        a file that jobs wait for; it is there at the end of the test

PostgreSQL is our own, from a wheel, unless GENBA_TEST_POSTGRES_URL names a server on which we may create databases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.support import (
    Databases,
    NodeProcess,
    eventually,
    load_jobs,
    sqlite_url,
    without_settings,
)
from tests.support.postgres_server import own_server

if (
    TYPE_CHECKING
):  # imported by the fixtures that need them: the tests of the pure rules start without a driver
    from genba.domain.clock import ManualClock
    from genba.storage.store import Store


def pytest_configure(config: pytest.Config) -> None:
    """A busy machine is no reason to fail.  New examples are looked for by `make soak`; elsewhere they are the same."""
    same = "not soak" in config.option.markexpr
    hypothesis.settings.register_profile("genba", deadline=None, print_blob=True, derandomize=same)
    hypothesis.settings.load_profile("genba")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that compute come among those that wait for processes: one kind after the other leaves cores idle."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path in files if path.parent.name in _WAIT]
    computing = [path for path in files if path.parent.name not in _WAIT]
    places = {
        path: (i + 1) / len(some) for some in (waiting, computing) for i, path in enumerate(some)
    }
    for item in items:
        if _is_quick(item):
            item.add_marker("quick")
    items[:] = [
        item for path in sorted(files, key=lambda path: places[path]) for item in files[path]
    ]


def _is_quick(item: pytest.Item) -> bool:
    """Say whether `make quick` runs this test: it starts no node and no PostgreSQL, and is fast."""
    path = item.path.relative_to(Path(__file__).parent)
    if not path.as_posix().startswith(_QUICK) or path.name in _LONG:
        return False
    fixtures = getattr(item, "fixturenames", ())
    callspec = getattr(item, "callspec", None)
    return "databases" not in fixtures and (not callspec or "postgres" not in callspec.id)


_QUICK = (
    *("domain/", "enqueue/", "options/", "reports/", "storage/", "wire/"),
    *("node/database/", "node/decide/", "node/watch/"),
)
_LONG = {"test_failing_calls.py", "test_signal_safe.py"}  # every call and every step, in turn
_WAIT = {"acceptance", "chaos", "cli", "client", "processes", "running", "worker"}
_POSTGRES = os.environ.get("GENBA_TEST_POSTGRES_URL")
_START = 1_767_225_600_000_000  # 2026-01-01 00:00 UTC


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_developer() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - without_settings(os.environ).keys():
            patch.delenv(name)
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # most machines do not set it
        yield


@pytest.fixture(scope="session")
def databases() -> Iterator[Databases]:
    """The PostgreSQL server of this session, started when the first test needs it."""
    with nullcontext(_POSTGRES) if _POSTGRES else own_server(durable=False) as server:
        yield Databases(server)


@pytest.fixture(scope="session")
def template(databases: Databases) -> Iterator[str]:
    """The name of a database with our tables, to be copied: quicker than making them for every test."""
    with databases.fresh() as name:
        _install(databases.url(name))
        yield name


def _install(url: str) -> None:
    from genba.storage.store import open_store

    with closing(open_store(url)) as store:
        store.install()


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if engine == "sqlite":
        yield sqlite_url(tmp_path)
        return
    databases = request.getfixturevalue("databases")
    with databases.fresh() as name:
        yield databases.url(name)


@pytest.fixture
def url(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if engine == "sqlite":
        _install(sqlite_url(tmp_path))
        yield sqlite_url(tmp_path)
        return
    databases = request.getfixturevalue("databases")
    with databases.fresh(request.getfixturevalue("template")) as name:
        yield databases.url(name)


@pytest.fixture
def clock() -> ManualClock:
    from genba.domain.clock import ManualClock

    return ManualClock(_START)


@pytest.fixture
def store(url: str, clock: ManualClock) -> Iterator[Store]:
    from genba.storage.store import open_store

    with closing(open_store(url, clock=clock)) as store:
        store.install()
        yield store


@pytest.fixture
def jobs(url: str, tmp_path: Path) -> Iterator[Any]:
    module = load_jobs(url, tmp_path)
    yield module
    module.app.close()


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    nodes: list[NodeProcess] = []

    def start(target: str, url: str, *args: str, **options: Any) -> NodeProcess:
        nodes.append(NodeProcess.start(target, url, *args, **{"cwd": tmp_path, **options}))
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()
        print(f"node {node.pid}:\n{node.log}")  # pytest shows it when the test has failed


@dataclass(frozen=True)
class Shop:
    url: str
    jobs: Any
    node: NodeProcess

    @property
    def app(self) -> Any:
        return self.jobs.app


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("home")
    if request.param == "sqlite":
        yield sqlite_url(folder), folder
        return
    databases = request.getfixturevalue("databases")
    with databases.fresh(request.getfixturevalue("template")) as name:
        yield databases.url(name), folder


@pytest.fixture(scope="module")
def shop(home: tuple[str, Path]) -> Iterator[Shop]:
    url, folder = home
    with ExitStack() as stack:
        jobs = load_jobs(url, folder)
        stack.callback(jobs.app.close)
        node = NodeProcess.start("jobs:app", url, "--max", "4", "--name", "shop", cwd=folder)
        stack.callback(lambda: print(node.log))
        stack.callback(node.end)
        eventually(
            jobs.app.nodes, within=60
        )  # a busy machine is no reason to fail; how soon is asked elsewhere
        yield Shop(url, jobs, node)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "gate"
    (tmp_path / "gate").touch()
