"""What grows while a load does not end: memory, the database, rows that are dead and still there."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
import psycopg

if TYPE_CHECKING:
    from beside.stage import Stage

EVERY = 5.0  # seconds between two looks

_ROWS = "SELECT sum(n_dead_tup) FROM pg_stat_user_tables"
_SIZE = "SELECT pg_database_size(current_database())"


class Watch:
    """Looks on, in a thread, inside the `with`."""

    def __init__(self, place: Stage, on: str) -> None:
        self._place, self._on = place, on
        self._memory: list[float] = []
        self._dead: list[int] = []
        self._sizes: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Watch:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def figures(self, jobs: int) -> dict[str, float]:
        part = max(1, len(self._memory) // 10)
        found = {
            "steady load, memory in the beginning": max(self._memory[:part]),
            "steady load, memory in the end": max(self._memory[-part:]),
        }
        if self._sizes:
            found["steady load, stored"] = (self._sizes[-1] - self._sizes[0]) / jobs
        if self._dead:
            found["steady load, dead rows at most"] = max(self._dead)
        return found

    def _look_on(self) -> None:
        while not self._over.wait(EVERY):
            self._look()

    def _look(self) -> None:
        self._memory.append(sum(map(_memory, self._place.pids)) / 1e6)
        if self._on == "postgres":
            with psycopg.connect(self._place.url, autocommit=True) as conn:
                for text, found in ((_ROWS, self._dead), (_SIZE, self._sizes)):
                    found.append(int((conn.execute(text).fetchone() or (0,))[0] or 0))
        elif self._on == "sqlite":
            path = Path(urlsplit(self._place.url).path[1:])
            self._sizes.append(
                sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))
            )


def _memory(pid: int) -> float:
    """Of a process and what it has started; what they share counts once for each."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total
