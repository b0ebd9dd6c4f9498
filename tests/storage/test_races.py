"""Two at once, each step held where it hurts."""

from __future__ import annotations

import os
import threading
from contextlib import closing

import pytest
from tests.storage.builders import after, connection, finish, joined, one, rows, state
from tests.support import eventually

from genba.domain.clock import ManualClock
from genba.storage.store import open_store


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_settling_waits_for_the_other_settler_and_not_for_its_rows(store, url):
    """Or two of them take the rows of shared children in different orders, and each waits for the other."""
    joined(store)
    parents = [one(store), one(store)]
    child = one(store, after=after(*parents))
    for parent in parents:
        finish(store, parent)
    with connection(url) as conn:
        conn.execute("BEGIN")
        conn.execute("SELECT 1 FROM genba.job WHERE id = %s FOR UPDATE", (child,))
        settlers = [
            threading.Thread(target=store.settler.settle, name=f"settler {i}") for i in range(2)
        ]
        for settler in settlers:
            settler.start()
        waiting = (
            "SELECT wait_event FROM pg_stat_activity WHERE wait_event_type = 'Lock' ORDER BY 1"
        )
        try:
            eventually(lambda: len(rows(url, waiting)) == 2)
            kinds = [kind for (kind,) in rows(url, waiting)]
        finally:
            conn.execute("ROLLBACK")
            for settler in settlers:
                settler.join()

    assert "advisory" in kinds
    assert state(store, child) == "waiting"


class Held(ManualClock):
    """It does not tell the time to one thread before the gate is open."""

    def __init__(self) -> None:
        super().__init__(1_767_225_600_000_000)
        self.asked, self.gate = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    def now(self) -> int:
        if threading.current_thread() is self.thread:
            self.asked.set()
            self.gate.wait(10)
        return super().now()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_fork_waits_until_no_other_thread_writes(url):
    """SQLite keeps what it has locked in memory, and a child would inherit the belief that it has the file."""
    clock = Held()
    with closing(open_store(url, clock=clock)) as store:
        store.install()
        writer = clock.thread = threading.Thread(target=one, args=(store,), name="writer")
        writer.start()
        assert clock.asked.wait(10)
        threading.Timer(0.2, clock.gate.set).start()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert clock.gate.is_set()
                one(store)
                status = 0
            finally:
                os._exit(status)
        writer.join()

        assert os.waitpid(pid, 0)[1] == 0
        assert len(store.states([1, 2])) == 2
