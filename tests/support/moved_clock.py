"""A wall clock that tests move while nodes run: that of the processes, and that of the database they ask.

On SQLite the machine's clock counts.  The node and all it starts have a `time` module that is wrong by as much as a
file says (moved/sitecustomize.py), and so has this process.  On PostgreSQL the server's clock counts, and in one
database it can be moved without a line of ours: a function of the same name that is found before the server's own.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from genba.domain.clock import SystemClock

MOVED = Path(__file__).with_name("moved")

SERVER = """
CREATE SCHEMA moved;
CREATE TABLE moved.clock (wrong_by bigint NOT NULL);
INSERT INTO moved.clock VALUES (0);
CREATE FUNCTION moved.statement_timestamp() RETURNS timestamptz STABLE LANGUAGE sql
    RETURN (SELECT pg_catalog.statement_timestamp() + wrong_by * interval '1 microsecond' FROM moved.clock);
"""


class MovedClock:
    """`env` is for the nodes; where only the machine or only the server is wrong, say so."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._file = folder / "wrong_by"
        self._wrong_by = 0
        self._file.write_bytes(struct.pack("<q", 0))
        path = os.pathsep.join([str(MOVED), os.environ.get("PYTHONPATH", "")])
        self.env = {"GENBA_TEST_CLOCK": str(self._file), "PYTHONPATH": path.rstrip(os.pathsep)}
        if self._has_server:
            with psycopg.connect(url, autocommit=True) as conn:
                conn.execute(SERVER)
                here = sql.Identifier(conn.info.dbname)
                conn.execute(
                    sql.SQL("ALTER DATABASE {} SET search_path = moved, pg_catalog").format(here)
                )

    @property
    def _has_server(self) -> bool:
        return self._url.startswith("post")

    def now(self) -> float:
        """What the moved clock shows, in seconds."""
        return time.time() + self._wrong_by / 1e6

    def jump(self, by: float, *, machine: bool = True, server: bool = True) -> None:
        """Set it `by` seconds forward, or back."""
        micros = int(by * 1_000_000)
        if machine:
            self._wrong_by += micros
            with self._file.open("r+b") as file:  # in place: the nodes have it mapped
                file.write(struct.pack("<q", self._wrong_by))
        if server and self._has_server:
            with psycopg.connect(self._url, autocommit=True) as conn:
                conn.execute("UPDATE moved.clock SET wrong_by = wrong_by + %s", [micros])

    def jump_to_just_before_a_minute(self, by: float, left: float = 0.7) -> None:
        """As `jump`, and a little further: until there are `left` seconds to the next full minute."""
        there = self.now() + by
        self.jump(by + (60 - left - there % 60) % 60)


@contextmanager
def moved_clock(url: str, folder: Path) -> Iterator[MovedClock]:
    """The clock of the nodes that get its `env`, and of this process."""
    clock = MovedClock(url, folder)
    right = SystemClock.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SystemClock, "now", lambda self: right(self) + clock._wrong_by)
        yield clock
