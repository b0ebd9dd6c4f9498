"""What tests share: waiting, nodes as real processes, and a PostgreSQL of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, LiteralString, TypeVar
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest
from psycopg import sql

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
APPS = ROOT / "tests" / "apps"


def eventually(ask: Callable[[], T], within: float = 5.0, every: float = 0.01) -> T:
    """The first true answer of `ask`; AssertionError with the last answer when `within` seconds have passed."""
    deadline = time.monotonic() + within
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {within} s; the last answer was {answer!r}")
        time.sleep(every)


def sqlite_url(directory: Path) -> str:
    return f"sqlite:///{directory / 'genba.db'}"


def load_jobs(url: str, folder: Path, **settings: Any) -> Any:
    """The tasks of jobs.py as a client of `url` has them; and a copy of the file in `folder`, for its nodes."""
    source = APPS / "jobs.py"
    (folder / "jobs.py").write_bytes(source.read_bytes())
    return load_module("jobs", folder, url, source, **settings)


def load_module(
    name: str, folder: Path, url: str, source: Path | None = None, **settings: Any
) -> Any:
    """The module `name` of `folder`, as a client of `url` has it; `source`: or of another file."""
    spec = spec_from_file_location(name, source or folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for setting, value in {"url": url, **settings}.items():
            patch.setenv(f"GENBA_{setting.upper()}", str(value))
        spec.loader.exec_module(module)
    return module


def lines(path: Path | str) -> list[list[str]]:
    """What jobs have told in a file, as words; nothing if they have not."""
    try:
        return [line.split() for line in Path(path).read_text().splitlines()]
    except FileNotFoundError:
        return []


def genba_command(*args: str) -> list[str]:
    """The `genba` command line of this interpreter, installed or not; -P as for a script: no cwd on sys.path."""
    return [
        sys.executable,
        "-P",
        "-c",
        "import sys; from genba.cli import main; sys.exit(main())",
        *args,
    ]


def without_settings(env: Mapping[str, str]) -> dict[str, str]:
    """`env` less the developer's own GENBA_* settings, and with a PYTHONPATH that holds in any directory."""
    path = [os.path.abspath(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    rest = {name: value for name, value in env.items() if not name.startswith("GENBA_")}
    return {**rest, "PYTHONPATH": os.pathsep.join(path)}


class NodeProcess:
    """`genba node start` as a process of its own; what it prints is in `log`."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path, mark: str) -> None:
        self._popen = popen
        self._log = log
        self._mark = mark

    @classmethod
    def start(
        cls, target: str, url: str, *args: str, cwd: Path, env: Mapping[str, str] | None = None
    ) -> NodeProcess:
        """Start a node for `target` ("module:app", found in `cwd`) on `url`; does not wait until it is ready."""
        mark = uuid.uuid4().hex
        log = cwd / f"node-{mark[:8]}.log"
        settings = {
            **without_settings(os.environ),
            "GENBA_URL": url,
            "GENBA_TEST_NODE": mark,
            **(env or {}),
        }
        with log.open("wb") as out:
            popen = subprocess.Popen(
                genba_command("node", "start", target, *args),
                cwd=cwd,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at pytest is not for the node
                preexec_fn=_end_with_parent,
            )
        return cls(popen, log, mark)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def tree(self) -> list[int]:
        """The living processes of this node, also those that have left its tree and session."""
        return [process.pid for process in self._living()]

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, within: float = 15.0) -> int:
        """The node's exit code; AssertionError with its log if it does not end."""
        try:
            return self._popen.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"node {self.pid} did not end within {within} s\n{self.log}"
            ) from None

    def stop(self, within: float = 15.0) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(within)

    def kill9(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        """Leave nothing behind, whatever the test did."""
        self._popen.kill()
        self._popen.wait()
        eventually(self._kill_rest)

    def _kill_rest(self) -> bool:
        rest = self._living()
        for process in rest:
            with suppress(psutil.NoSuchProcess):  # its guard was faster
                process.kill()
        return not rest

    def _living(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter()
            if _setting(process, "GENBA_TEST_NODE") == self._mark
        ]


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Of a pytest that is killed no node stays; PR_SET_PDEATHSIG is not inherited by the node's children."""
    _libc.prctl(1, signal.SIGKILL)


def _setting(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):  # it has ended, or is not ours
        return None


class Databases:
    """Makes and drops databases on one PostgreSQL server, given as a URL with the right to do so."""

    def __init__(self, server: str) -> None:
        self._server = server

    def url(self, name: str) -> str:
        server = urlsplit(self._server)
        query = f"?{server.query}" if server.query else ""
        return f"{server.scheme}://{server.netloc}/{name}{query}"

    @contextmanager
    def fresh(self, template: str = "template1") -> Iterator[str]:
        """The name of a database that exists inside the `with` and no longer."""
        name = f"genba_test_{uuid.uuid4().hex[:12]}"
        self._run("CREATE DATABASE {} TEMPLATE {}", name, template)
        try:
            yield name
        finally:
            self._run("DROP DATABASE {} WITH (FORCE)", name)

    def _run(self, statement: LiteralString, *names: str) -> None:
        with psycopg.connect(self._server, autocommit=True) as conn:
            conn.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))
