"""Ten thousand ticks of twenty schedules, by three nodes that are killed and paused at random, while minutes fly.

The clock is moved for real, see tests/support/moved_clock.py.  What must hold is read from the tables.
"""

from __future__ import annotations

import random
import signal
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.storage.builders import rows
from tests.support import NodeProcess, eventually, lines, load_module
from tests.support.moved_clock import MovedClock, moved_clock

APP = """
import os
from pathlib import Path
from genba import Genba, current_job

app = Genba()

@app.task(name="tick")
def tick(n: int) -> None:
    fd = os.open(Path(__file__).with_name("runs"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{current_job().id} {current_job().attempt}\\n".encode())
    os.close(fd)

for n in range(20):
    app.recur(f"s{n}", tick.call(n), cron="* * * * *", misfire=("all", "once")[n % 2])
"""
SCHEDULES = 20
MINUTE = 60_000_000


class Cluster:
    """Three nodes; one that was killed is replaced."""

    def __init__(self, url: str, folder: Path, clock: MovedClock, stack: ExitStack) -> None:
        (folder / "ticks.py").write_text(APP)
        self._url, self._folder, self._clock, self._stack = url, folder, clock, stack
        self.app: Any = load_module("ticks", folder, url).app
        stack.callback(self.app.close)
        self._started = 0
        self.nodes = [self._start() for _ in range(3)]
        eventually(
            lambda: len(self.app.nodes()) == 3 and len(self.app.schedules()) == SCHEDULES,
            within=120,
        )

    def _start(self) -> NodeProcess:
        self._started += 1
        env = {**self._clock.env, "GENBA_LEASE": "4"}
        node = NodeProcess.start(
            "ticks:app",
            self._url,
            "--max",
            "2",
            "--name",
            f"n{self._started}",
            cwd=self._folder,
            env=env,
        )
        self._stack.callback(node.end)
        return node

    def pause(self, n: int, seconds: float) -> None:
        """It may hold SQLite's only write lock: so not for ever."""
        node = self.nodes[n]
        node.signal(signal.SIGSTOP)
        timer = threading.Timer(seconds, node.signal, [signal.SIGCONT])
        timer.start()
        self._stack.callback(timer.join)

    def kill(self, n: int) -> None:
        self.nodes[n].kill9()
        self.nodes[n] = self._start()

    def latest(self, name: str) -> int:
        """The last of its moments that has had its tick."""
        ticks = "genba.tick t JOIN genba.schedule s ON s.id = t.schedule_id"
        text = f"SELECT max(COALESCE(t.last_moment, t.moment)) FROM {ticks} WHERE s.name = '{name}'"
        return int(rows(self._url, text)[0][0] or 0)

    def all_have_run(self, due: int) -> bool:
        """Each kind of schedule has had its tick of the moment `due`."""
        return min(self.latest(f"s{n}") for n in (0, 1, 18, 19)) >= due


def under_fire(url: str, folder: Path, minutes: int, seed: int) -> int:
    """Let so many minutes pass; how many ticks there were."""
    rng = random.Random(seed)
    hits = {"kill": 0, "pause": 0, "asleep": 0}
    with moved_clock(url, folder) as clock, ExitStack() as stack:
        cluster = Cluster(url, folder, clock, stack)
        passed = 0
        while passed < minutes:
            step = rng.choice((1, 1, 1, 2, 4))
            fault = rng.random()
            if fault < 0.06:
                cluster.kill(rng.randrange(3))
                hits["kill"] += 1
            elif fault < 0.12:
                cluster.pause(rng.randrange(3), rng.uniform(0.5, 7))  # the lease is 4 s
                hits["pause"] += 1
            passed += step
            hits["asleep"] += step > 1
            clock.jump(60.0 * step)
            due = int(clock.now() // 60) * MINUTE
            cluster.app.wake()
            eventually(partial(cluster.all_have_run, due), within=120)
        eventually(lambda: cluster.app.count(task="tick") == 0, within=180)
        print(f"seed {seed}: {passed * SCHEDULES} ticks, {hits}")
    assert all(hits.values()), hits
    return check(url, folder)


def check(url: str, folder: Path) -> int:
    """None twice, none lost but by its policy, every job run; how many ticks."""
    made = rows(url, "SELECT schedule_id, moment, id FROM genba.job WHERE schedule_id IS NOT NULL")
    fired = rows(url, "SELECT schedule_id, moment, job_id FROM genba.tick WHERE job_id IS NOT NULL")
    assert sorted(made) == sorted(fired)
    total = 0
    for id, name in rows(url, "SELECT id, name FROM genba.schedule"):
        moments = [row[1] for row in fired if row[0] == id]
        skipped = rows(
            url,
            f"SELECT moment, COALESCE(last_moment, moment), count, skipped FROM genba.tick WHERE schedule_id = {id}"
            " AND skipped IS NOT NULL",
        )
        covered = moments + [
            at for begin, end, _, _ in skipped for at in range(begin, end + 1, MINUTE)
        ]
        assert len(set(covered)) == len(covered), name
        assert (max(covered) - min(covered)) // MINUTE + 1 == len(covered), name
        if int(name[1:]) % 2 == 0:
            assert skipped == [], name
        else:
            assert {row[3] for row in skipped} <= {"missed: made up for by one later run"}, name
        total += len(covered)
    ran = {int(id) for id, _ in lines(folder / "runs")}
    assert ran == {row[2] for row in made}
    assert {row[0] for row in rows(url, "SELECT DISTINCT state FROM genba.job")} == {"succeeded"}
    return total


@pytest.mark.soak
def test_no_tick_of_ten_thousand_is_fired_twice_or_lost_by_nodes_that_die_and_pause(url, tmp_path):
    assert under_fire(url, tmp_path, 500, seed=6) >= 10_000
