"""The clock is set while two nodes run: schedules, leases, retries, conditions and rates go on, early is nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from tests.support import PATIENCE, NodeProcess, eventually, lines, load_app
from tests.support.moved_clock import MovedClock, moved_clock

HOUR, DAY, DECADE = 3600.0, 86_400.0, 3653 * 86_400.0
RECOVERY = 60  # seconds, as promised; it takes about three


class Cluster:
    """Two nodes with the app timestamped_tasks, on one clock that the test moves."""

    def __init__(self, url: str, folder: Path, clock: MovedClock, stack: ExitStack) -> None:
        self.folder, self.clock = folder, clock
        self.module: Any = load_app("timestamped_tasks", url, folder)
        self.app = self.module.app
        stack.callback(self.app.close)
        self._url, self._stack = url, stack
        self.nodes = [self.start(name) for name in ("one", "two")]
        eventually(lambda: len(self.app.nodes()) == 2, within=90)

    def start(self, name: str) -> NodeProcess:
        env = {**self.clock.env, "GENBA_LEASE": "10"}
        node = NodeProcess.start(
            "timestamped_tasks:app",
            self._url,
            "--max",
            "3",
            "--name",
            name,
            cwd=self.folder,
            env=env,
        )
        self._stack.callback(end, node)
        return node

    def runs(self, word: str) -> list[tuple[int, float]]:
        """(job, when) in the order in which they began; when is what the worker's clock said."""
        return [
            (int(id), float(at)) for name, id, at in lines(self.folder / "runs") if name == word
        ]

    def more(self, word: str, count: int = 1, within: float = RECOVERY) -> None:
        before = len(self.runs(word))
        eventually(lambda: len(self.runs(word)) >= before + count, within=within)


def end(node: NodeProcess) -> None:
    node.end()
    print(node.log)


@pytest.fixture
def cluster(url: str, tmp_path: Path) -> Iterator[Cluster]:
    with moved_clock(url, tmp_path) as clock, ExitStack() as stack:
        yield Cluster(url, tmp_path, clock, stack)


def jump(cluster: Cluster, by: float) -> None:
    """Set the clock to just before a minute, and see that all goes on as before."""
    before = {word: len(cluster.runs(word)) for word in ("minute", "second")}
    began = time.monotonic()
    cluster.clock.jump_to_just_before_a_minute(by)
    due = (cluster.clock.now() // 60 + 1) * 60
    eventually(
        lambda: any(at >= due for _, at in cluster.runs("minute")[before["minute"] :]),
        within=RECOVERY,
    )
    for word in ("second", "again"):
        cluster.more(word)
    cluster.module.slowly.enqueue(1).wait(timeout=RECOVERY)
    took = time.monotonic() - began
    print(f"{by:+.0f} s: all is as before after {took:.1f} s")

    ran = {word: cluster.runs(word)[before[word] :] for word in before}
    assert len(ran["minute"]) <= 2 + took / 60, (
        ran
    )  # what was missed once, and the minutes that have passed
    assert len(ran["second"]) <= 2 + took, ran
    moments = {
        job.id: job.record.moment / 1e6
        for job in cluster.app.jobs(task=list(ran), state="any", limit=500)
    }
    for word, found in ran.items():
        for id, at in found:
            moment = moments.get(id, at)  # with a clock ten years ahead all that is old is pruned
            assert at >= moment or at < moment - 60, (
                word,
                id,
                at,
                moment,
            )  # earlier by far: before the clock was set


def through(cluster: Cluster, jumps: Sequence[float]) -> None:
    """Everything goes on, jump after jump, and no node is declared dead."""
    far = cluster.module.late.using(at=cluster.clock.now() + 3 * DAY).enqueue("far")
    again, asked = cluster.module.again.enqueue(), cluster.module.asked.enqueue()
    for word in ("second", "again"):
        cluster.more(word)
    ids = {node.id for node in cluster.app.nodes()}
    memory = [psutil.Process(node.pid).memory_info().rss for node in cluster.nodes]
    for by in jumps:
        jump(cluster, by)
        assert (far.refresh().state == "scheduled") == (by < DECADE)
    (cluster.folder / "enough").touch()
    assert again.wait(timeout=RECOVERY).state == "succeeded"
    assert asked.wait(timeout=RECOVERY).state == "succeeded"

    assert {node.id for node in cluster.app.nodes()} == ids
    assert not list(cluster.app.events(kinds=["node_lost"]))
    after = [psutil.Process(node.pid).memory_info().rss for node in cluster.nodes]
    assert all(more - less < 20_000_000 for less, more in zip(memory, after, strict=True)), (
        memory,
        after,
    )


def test_after_a_jump_of_the_clock_all_goes_on_within_a_minute_without_a_storm(cluster):
    through(cluster, [-DAY, DECADE])


@pytest.mark.soak
def test_after_every_kind_of_jump_all_goes_on_within_a_minute_without_a_storm(cluster):
    through(cluster, [HOUR, -HOUR, DAY, -DAY, -DAY, -HOUR, HOUR, DECADE])


@pytest.mark.soak
def test_what_was_asked_for_while_the_clock_was_ten_years_ahead_does_not_wait_for_ten_years(
    cluster,
):
    again = cluster.module.again.enqueue()
    cluster.more("again")
    jump(cluster, DECADE)
    delayed = cluster.module.late.using(delay="15s").enqueue("delayed")
    jump(cluster, -DECADE)

    assert delayed.wait(timeout=RECOVERY).state == "succeeded"
    (cluster.folder / "enough").touch()
    assert again.wait(timeout=RECOVERY).state == "succeeded"
    assert not list(cluster.app.events(kinds=["node_lost"]))
    assert cluster.app.verify().faults == []


def test_what_was_to_happen_soon_happens_soon_also_if_the_clock_was_set_back_while_no_node_ran(
    cluster,
):
    retried = cluster.module.twice.enqueue()
    eventually(lambda: retried.refresh().state == "scheduled", within=RECOVERY)
    for node in cluster.nodes:
        node.kill9()
    delayed = cluster.module.late.using(delay="10s").enqueue("delayed")
    named = cluster.module.late.using(at=cluster.clock.now() + 10).enqueue("named")
    cluster.clock.jump(-DAY)

    cluster.start("three")

    assert retried.wait(timeout=RECOVERY).state == "failed"
    assert delayed.wait(timeout=RECOVERY).state == "succeeded"
    assert len(cluster.runs("twice")) == 2
    assert named.refresh().state == "scheduled"


@pytest.mark.soak
@pytest.mark.parametrize("jump", [HOUR, -HOUR, -DAY])
def test_a_node_that_dies_with_a_jump_of_the_clock_is_found_dead_in_time(cluster, jump):
    cluster.more("second")
    one, two = cluster.nodes
    stuck = cluster.module.stay.using(priority=9).enqueue()
    (holder,) = eventually(
        lambda: [node for node in cluster.app.nodes() if node.id == stuck.refresh().record.node],
        within=60,
    )
    cluster.clock.jump(jump)
    (one if holder.name == "one" else two).kill9()
    cluster.more("stay", within=30)  # as without a jump
    (cluster.folder / "enough").touch()
    assert stuck.wait(timeout=20).state == "succeeded"
    cluster.more("second")


@pytest.mark.soak
@pytest.mark.parametrize("wrong_by", [HOUR, -HOUR])
def test_a_node_whose_machine_has_the_wrong_time_starts_and_repeats_nothing_early(
    cluster, url, wrong_by
):
    if url.startswith("sqlite"):
        pytest.skip("on SQLite all are on one machine, whose clock is that of the store")
    cluster.module.again.enqueue()
    cluster.clock.jump(wrong_by, server=False)
    cluster.more("again", 5, within=60)  # the skew is known after a beat
    with psycopg.connect(url) as conn:
        now = conn.execute("SELECT extract(epoch FROM statement_timestamp())").fetchone()
    assert now is not None
    moments = [float(now[0]) + 0.5 + 0.1 * i for i in range(40)]
    jobs = cluster.app.enqueue_many(
        [cluster.module.late.using(at=moment).call("due") for moment in moments]
    )
    cluster.app.wait(jobs, timeout=30)
    late = sorted(
        job.attempts[0].started.timestamp() - at for job, at in zip(jobs, moments, strict=True)
    )
    print(
        f"machine wrong by {wrong_by:+.0f} s: started {late[0] * 1000:.0f} to {late[-1] * 1000:.0f} ms late"
    )
    assert late[0] >= -0.06  # what the skew of a node is known to
    assert late[-1] < PATIENCE * 2
    assert not list(cluster.app.events(kinds=["node_lost"]))
