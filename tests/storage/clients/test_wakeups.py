"""Bells: rung by others, heard by one process, and locked while it lives."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.support import eventually, without_settings

from genba.storage.engines.sqlite.wakeups import SqliteClientWakeups
from genba.storage.store import Store, open_store

_DIES = """
import os, sys
from pathlib import Path
from genba.storage.engines.sqlite.wakeups import SqliteClientWakeups
SqliteClientWakeups(Path(sys.argv[1])).open_receiver(7)
os._exit(0)
"""


def rung(bell: Any) -> bool:
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def test_a_bell_is_heard_and_its_lock_seen_by_others(store: Store, url: str) -> None:
    with closing(open_store(url)) as other:
        bells = store.sessions._wakeups
        bell = bells.open_receiver(42)
        other.sessions._wakeups.wake_clients([42, 43])
        eventually(lambda: rung(bell))
        bell.clear()
        assert not rung(bell)
        assert not bells.lock_is_free(42)
        bell.close()
        eventually(lambda: other.sessions._wakeups.lock_is_free(42) or url.startswith("sqlite"))


def test_a_dead_process_leaves_a_free_lock_that_is_tidied_up(tmp_path: Path) -> None:
    database = tmp_path / "x.db"
    bells = SqliteClientWakeups(database)
    with closing(bells.open_receiver(8)):
        subprocess.run(
            [sys.executable, "-c", _DIES, str(database)],
            env=without_settings(os.environ),
            check=True,
        )
        assert bells.lock_is_free(7)
        bells.remove_stale()
        assert len(list(tmp_path.glob("x.db-clients/*.lock"))) == 2  # too fresh
        for path in tmp_path.glob("x.db-clients/*.lock"):
            os.utime(path, (0, 0))
        bells.remove_stale()

        assert sorted(path.name for path in tmp_path.glob("x.db-clients/*")) == ["8.lock", "8.sock"]


def test_a_listening_session_that_was_cut_off_listens_again(url: str) -> None:
    if url.startswith("sqlite"):
        pytest.skip("a socket of our own is not cut off")
    with closing(open_store(url)) as store, store.listener.listening() as listener:
        with psycopg.connect(url, autocommit=True) as conn:
            cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE %s"
            eventually(lambda: conn.execute(cut, (f'LISTEN "genba_{listener.id}"%',)).fetchall())
        mark = listener.mark()

        def heard() -> bool:
            store.sessions._wakeups.wake_clients([listener.id])
            return listener.mark() > mark + 1

        eventually(heard, within=10, every=0.1)
