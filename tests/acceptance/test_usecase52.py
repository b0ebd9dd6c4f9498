"""UseCase52 of Kōjō's fitness cases in four forms: no two units of a model at once, each done once and in order.

Four nodes, and kills in the middle of units.  10,000 units over 1,000 models and 50 kills in `make soak`; here each
form has a twentieth of that on one engine, and less on the other.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from tests.support import NodeProcess, eventually, lines, load_app

NODES = 4


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class Place:
    def __init__(self, engine: str, folder: Path, tasks: Any, start: Any) -> None:
        self.engine, self.folder, self.tasks, self.app = engine, folder, tasks, tasks.app
        self._start = start
        self._nodes = [start() for _ in range(NODES)]
        self._random = random.Random(52)
        eventually(lambda: len(self.app.nodes()) == NODES, within=60)

    def fill(self, units: int, models: int) -> None:
        """Tables, and units of the models in turn; returned for the form that does not read them from `work`."""
        (self.folder / "log").unlink(missing_ok=True)
        with self.tasks.transaction() as conn:
            for table in (
                "work (id int, model int)",
                "side (job bigint, model int UNIQUE, unit int)",
                "done (id int)",
            ):
                conn.execute(f"CREATE TABLE IF NOT EXISTS {table}")
                conn.execute(f"DELETE FROM {table.split()[0]}")
            values = ", ".join(f"({unit}, {unit % models})" for unit in range(1, units + 1))
            conn.execute(f"INSERT INTO work VALUES {values}")

    def kill_worker(self) -> bool:
        """Kill in the middle of a unit, if one is seen there; log that it is over by then.

        Not one that has died with its node.
        """
        entries = lines(self.folder / "log")[-100:]
        ended = {(line[2], line[3]) for line in entries if line[0] != "begin"}
        begun = [line for line in entries if line[0] == "begin" and alive(int(line[3]))]
        if not begun:
            return False
        inside = [line for line in begun if (line[2], line[3]) not in ended]
        _, model, unit, pid, _ = self._random.choice((inside or begun)[-3:])
        moment = time.monotonic_ns()
        if not alive(int(pid)):
            return False
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
        self.tasks.tell("killed", model, unit, pid, moment)
        return True

    def kill_node(self) -> bool:
        """With all that runs on it; its guard ends that."""
        place = self._random.randrange(NODES)
        self._nodes[place].kill9()
        self._nodes[place] = self._start()
        return True

    def done(self) -> int:
        return int(self.tasks.rows("SELECT count(*) FROM done")[0][0])

    def finish(self, size: Size) -> None:
        """Kills, spread over the work; until all is done."""
        units, kills, node_kills = size.units, size.kills, size.node_kills
        for turn in range(kills):
            eventually(lambda: self.done() >= turn * units // (kills + 2), within=300, every=0.02)  # noqa: B023
            of_node = node_kills and turn % (kills // node_kills) == 1
            kill = self.kill_node if of_node else self.kill_worker
            eventually(lambda: kill() or self.done() == units, within=60)  # noqa: B023  asked at once
        eventually(lambda: self.done() >= units, within=120 + units / 10, every=0.05)
        eventually(lambda: self.app.count(state="open") == 0, within=60, every=0.05)

    def check(self, size: Size) -> None:
        assert sorted(id for (id,) in self.tasks.rows("SELECT id FROM done")) == list(
            range(1, size.units + 1)
        )
        spans: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        begun: dict[tuple[str, str], int] = {}
        for word, model, unit, pid, moment in lines(self.folder / "log"):
            if word == "begin":
                begun[unit, pid] = int(moment)
            elif (unit, pid) in begun:
                spans[int(model)].append((begun.pop((unit, pid)), int(moment), int(unit)))
        for number, of_model in spans.items():
            of_model.sort()
            assert all(one[1] <= other[0] for one, other in pairwise(of_model)), (
                f"two units of {number} at once"
            )
            order = [which for _, _, which in of_model]
            assert order == sorted(order), f"model {number} out of order"
        all_spans = sorted(span for of_model in spans.values() for span in of_model)
        assert any(one[1] > other[0] for one, other in pairwise(all_spans)), (
            "nothing ran in parallel"
        )


@pytest.fixture(scope="module")
def place(home: tuple[str, Path]) -> Iterator[Place]:
    url, folder = home
    with ExitStack() as stack:
        tasks = load_app("ordered_units", url, folder)
        stack.callback(tasks.app.close)
        stack.callback(lambda: tasks.connection().close())

        def start() -> NodeProcess:
            node = NodeProcess.start("ordered_units:app", url, "--max", "2", cwd=folder)
            stack.callback(node.end)
            return node

        tasks.app.install()
        yield Place(url[:6], folder, tasks, start)


class Size(NamedTuple):
    units: int
    models: int
    kills: int
    node_kills: int = 0


FULL = pytest.param(Size(10_000, 1_000, 50, 5), id="full", marks=pytest.mark.soak)
SMALL = Size(200, 20, 2)


def sizes(more_on: str) -> Any:
    """For each engine its size."""
    few = {"sqlite": SMALL, "postgr": SMALL, more_on: Size(500, 50, 4)}
    return pytest.mark.parametrize("size", [pytest.param(few, id="few"), FULL])


def ready(place: Place, size: Size | dict[str, Size]) -> Size:
    chosen = size[place.engine] if isinstance(size, dict) else size
    place.fill(chosen.units, chosen.models)
    return chosen


@sizes(more_on="postgr")
def test_usecase_52_a_delegator_and_workers_with_a_side_table(place, size):
    size = ready(place, size)
    place.tasks.delegate.enqueue()

    place.finish(size)
    place.check(size)
    assert place.tasks.rows("SELECT job FROM side") == []


@sizes(more_on="sqlite")
def test_usecase_52_message_groups_are_stripes_through_retries_and_kills(place, size):
    size = ready(place, size)
    units = place.tasks.rows("SELECT id, model FROM work")
    place.app.enqueue_many(
        [place.tasks.message.using(priority=unit % 3).call(model, unit) for unit, model in units]
    )

    place.finish(size._replace(node_kills=size.node_kills or 1))
    place.check(size)
    assert any(
        job.retries
        for job in place.app.jobs(state="succeeded", task="ordered_units.message", limit=100)
    )


@sizes(more_on="postgr")
def test_usecase_52_a_throttled_delegator_bows_out_when_enough_waits(place, size):
    size = ready(place, size)
    job = place.tasks.throttle.enqueue(100)  # at a time, and 60 may wait

    place.finish(size)
    place.check(size)
    assert len(job.refresh().attempts) > 1  # it has bowed out


@sizes(more_on="sqlite")
def test_usecase_52_a_mutex_for_each_model_with_the_look_inside(place, size):
    size = ready(place, size)
    place.app.enqueue_many([place.tasks.mutexed.call(40)] * 3)

    place.finish(size)
    place.check(size)
    assert [one.name for one in place.app.locks()] == []
