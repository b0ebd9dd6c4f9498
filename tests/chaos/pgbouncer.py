"""The real PgBouncer, in transaction mode, where it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
from tests.support import eventually

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
WANTED = "needs PgBouncer, which no Python package brings: apt-get install pgbouncer"


class PgBouncer:
    def __init__(self, url: str, sessions: int = 3, *, said: bool = True) -> None:
        """`said`: the URL behind it says that it is there."""
        parts = urlsplit(url)
        server = parse_qs(parts.query)["host"][0]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._home = TemporaryDirectory(prefix="genba-bouncer-")
        home = Path(self._home.name)
        home.chmod(0o755)  # its user is not ours
        (home / "settings.ini").write_text(
            f"[databases]\n* = host={server} user=postgres\n"
            f"[pgbouncer]\npool_mode = transaction\nauth_type = any\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n"
            f"unix_socket_dir =\ndefault_pool_size = {sessions}\n"
        )
        assert PROGRAM is not None
        with (home / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [PROGRAM, home / "settings.ini"], stdout=log, stderr=log, **_as(server)
            )
        bare = f"postgresql://postgres@127.0.0.1:{port}{parts.path}"
        self.url = bare + "?pooler=transaction" * said
        try:
            eventually(lambda: _answers(bare), within=30)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """At once, with the sessions that it has lent."""
        self._process.kill()
        self._process.wait(30)
        self._home.cleanup()


def _as(server: str) -> dict[str, Any]:
    """PgBouncer does not want to be root; it becomes the server's user, which may open its socket."""
    owner = os.stat(server)
    return (
        {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        if os.geteuid() == 0
        else {}
    )


def _answers(url: str) -> bool:
    with suppress(psycopg.OperationalError):
        psycopg.connect(url, connect_timeout=5).close()
        return True
    return False
