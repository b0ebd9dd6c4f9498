"""The patterns of docs/howto/patterns.md, as they stand there, with a node and a clock that goes as fast as we like.

They are those of Kōjō: "parallel workers" with 5 and 5, "singleton worker" with 1 and 1, "dynamically scheduled
worker", "continuous singleton" with its variations, and the use case 40.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support import ROOT, NodeProcess, eventually, lines, load_module
from tests.support.moved_clock import MovedClock, moved_clock

HOWTO = ROOT / "docs" / "howto"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(document: str) -> str:
    return "\n".join(BLOCK.findall((HOWTO / document).read_text()))


class Patterns:
    def __init__(self, url: str, folder: Path, clock: MovedClock) -> None:
        (folder / "patterns.py").write_text(code("patterns.md"))
        for queue in ("changes", "orders", "mail", "done"):
            (folder / queue).mkdir()
        self.folder, self.clock = folder, clock
        self.module: Any = load_module("patterns", folder, url)
        self.app = self.module.app
        self._sent = 0

    def send(self, queue: str, *messages: str) -> None:
        for message in messages:
            self._sent += 1
            whole = self.folder / f"{self._sent:05}.new"
            whole.write_text(message)
            whole.rename(self.folder / queue / f"{self._sent:05}.msg")

    def left(self, queue: str) -> list[Path]:
        return sorted((self.folder / queue).glob("*.msg"))

    def states(self, task: str) -> tuple[int, int]:
        """How many run, and how many stand by."""
        return self.app.count(task=task, state="running"), self.app.count(
            task=task, state="waiting"
        )

    def running(self, task: str, at_least: int) -> bool:
        return self.states(task)[0] >= at_least

    def tick(self, name: str, by: float = 60.0) -> None:
        """Let the next moment of a schedule come."""
        handle = self.app.schedule(name)
        known = {tick.moment for tick in handle.ticks(500)}
        self.clock.jump(by)
        self.app.wake()
        eventually(lambda: {tick.moment for tick in handle.ticks(500)} - known, within=30)

    def work(self, task: str) -> None:
        """All that run have begun: one may have been given to a worker that was still at another."""

        def have_begun() -> bool:
            begun = {event.job_id for event in self.app.events(kinds=["running"], task=task)}
            return {job.id for job in self.app.jobs(task=task, state="running")} <= begun

        eventually(have_begun, within=30)

    def has(self, task: str, running: int, waiting: int) -> None:
        eventually(lambda: self.states(task) == (running, waiting), within=30)


@pytest.fixture(scope="module")
def patterns(home: tuple[str, Path]) -> Iterator[Patterns]:
    url, folder = home
    with moved_clock(url, folder) as clock, ExitStack() as stack:
        found = Patterns(url, folder, clock)
        stack.callback(found.app.close)
        node = NodeProcess.start(
            "patterns:app", url, "--max", "9", "--name", "n", cwd=folder, env=clock.env
        )
        stack.callback(lambda: print(node.log))
        stack.callback(node.end)
        eventually(lambda: len(found.app.schedules()) == 5, within=90)
        yield found


def overlapping(jobs: Sequence[Any]) -> int:
    """The most that ran at a time."""
    attempts = [attempt for job in jobs for attempt in job.attempts]
    changes = sorted([(a.started, 1) for a in attempts] + [(a.ended, -1) for a in attempts])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def test_a_dynamically_scheduled_worker_runs_when_it_is_asked_for(patterns):
    patterns.module.ordered(7)
    patterns.module.ordered(7)
    assert patterns.app.job(key="remind:7").result(timeout=30) == "order 7"
    assert patterns.app.count(task="patterns.remind", state="any") == 1


def test_a_continuous_singleton_runs_again_at_once_and_never_twice_at_a_time(patterns):
    app = patterns.app
    eventually(lambda: app.count(task="patterns.watch", state="succeeded") >= 2, within=30)
    assert app.count(task="patterns.watch") == 1
    times = sorted(
        (a.started, a.ended)
        for job in app.jobs(task="patterns.watch", state="final")
        for a in job.attempts
    )
    assert all(
        end <= start + timedelta(milliseconds=50) for (_, end), (start, _) in pairwise(times)
    )


def test_a_good_citizen_bows_out_and_its_copy_goes_on(patterns):
    app = patterns.app
    patterns.send("changes", "a", "b", "c")
    for _ in range(3):
        patterns.tick(
            "patterns.follow"
        )  # at least one: a tick makes a job, unless one is on standby
    eventually(
        lambda: any(
            job.result() == 3 for job in app.jobs(task="patterns.follow", state="succeeded")
        ),
        within=30,
    )
    assert app.count(task="patterns.follow") in (1, 2)  # the follower, and one on standby
    final = app.jobs(task="patterns.follow", state="final", limit=500)
    assert {job.state for job in final} == {"succeeded"}
    assert overlapping(final) == 1
    app.tasks["patterns.follow"].disable()
    app.cancel_many(task="patterns.follow")


def test_of_parallel_workers_five_work_and_five_stand_by(patterns):
    app = patterns.app
    consumers = app.schedule("patterns.consume")
    while (made := sum(tick.job_id is not None for tick in consumers.ticks(500))) < 10:
        assert patterns.states("patterns.consume")[0] <= 5
        patterns.tick("patterns.consume")
        enough = min(made + 1, 5)
        eventually(partial(patterns.running, "patterns.consume", enough), within=30)
    patterns.has("patterns.consume", 5, 5)
    patterns.work("patterns.consume")
    before = len(consumers.ticks(500))
    for _ in range(2):
        patterns.tick("patterns.consume")
    assert patterns.states("patterns.consume") == (5, 5)
    ticks = consumers.ticks(500)
    refused = ticks[: len(ticks) - before]
    assert len(refused) >= 2
    assert all("max_waiting" in tick.skipped for tick in refused)
    assert all(
        (tick.job_id is None) != (tick.skipped is None) for tick in ticks
    )  # a job, or a reason

    patterns.send("orders", *map(str, range(20)))
    eventually(lambda: not patterns.left("orders"), within=30)
    patterns.send(
        "orders", "enough"
    )  # one ends, and one on standby takes its place: there is no tick
    eventually(lambda: app.count(task="patterns.consume", state="succeeded") == 1, within=30)
    eventually(lambda: patterns.states("patterns.consume")[0] == 5, within=30)
    patterns.tick("patterns.consume")
    patterns.has("patterns.consume", 5, 5)

    patterns.send("orders", *["enough"] * 10)
    eventually(lambda: app.count(task="patterns.consume") == 0, within=30)
    handled = [words[0] for words in lines(patterns.folder / "handled")]
    assert sorted(handled, key=int) == [str(n) for n in range(20)]
    assert overlapping(app.jobs(task="patterns.consume", state="succeeded", limit=100)) == 5
    app.tasks["patterns.consume"].disable()


def test_of_a_nightly_singleton_one_works_and_one_stands_by(patterns):
    app = patterns.app
    backup = app.schedule("patterns.backup")
    first = backup.next(1)[0]
    assert (first.hour, first.minute, first.weekday() < 5) == (22, 0, True)
    for waiting in (0, 1, 1):
        patterns.tick("patterns.backup", backup.next(1)[0].timestamp() - patterns.clock.now())
        patterns.has("patterns.backup", 1, waiting)
    third, second, one = backup.ticks()
    assert third.skipped is not None
    assert "max_waiting" in third.skipped
    patterns.send("done", "yes")  # it completes, and its standby replaces it
    eventually(lambda: app.job(one.job_id).state == "succeeded", within=30)
    eventually(lambda: app.job(second.job_id).state == "running", within=30)
    patterns.send("done", "yes")
    eventually(lambda: app.count(task="patterns.backup") == 0, within=30)


def made_of(app: Any, task: str) -> int:
    """How many jobs of a task there have ever been; they themselves may be pruned."""
    return sum(event.kind in ("waiting", "scheduled", "blocked") for event in app.events(task=task))


def test_usecase_40_a_queue_is_drained_by_workers_that_call_for_others(patterns):
    app = patterns.app
    off = ("patterns.consume", "patterns.follow")
    for name in off:
        app.tasks[name].disable()
        app.cancel_many(task=name)
        eventually(lambda name=name: app.count(task=name) == 0, within=30)  # type: ignore[misc]
    before = {name: len(app.schedule(name).ticks(500)) for name in off}
    made = {name: made_of(app, name) for name in off}
    (patterns.folder / "handled").unlink(missing_ok=True)
    messages = [f"m{n}" for n in range(40)]
    patterns.send("mail", *messages[:10], "poison", *messages[10:])

    patterns.tick("patterns.drain")
    eventually(lambda: not patterns.left("mail"), within=60)
    patterns.tick("patterns.drain")
    eventually(lambda: app.count(task="patterns.drain") == 0, within=30)

    handled = [words[0] for words in lines(patterns.folder / "handled")]
    assert sorted(handled) == sorted(messages)  # each once, and that of the crash not at all
    history = list(
        app.events(task="patterns.drain")
    )  # keep="PT0S": the jobs themselves may be gone
    running = most = 0
    for event in history:
        running += {"running": 1, "succeeded": -1, "crashed": -1}.get(event.kind, 0)
        most = max(most, running)
    assert most <= 4
    (crash,) = [event for event in history if event.kind == "crashed"]
    assert [event.kind for event in history if event.job_id == crash.job_id][-1] == "succeeded"
    assert not [event for event in history if event.kind in ("failed", "held")]
    for (
        name,
        count,
    ) in before.items():  # those that are switched off: no job, one skip for each minute
        ticks = app.schedule(name).ticks(500)
        assert len(ticks) >= count + 2
        assert {tick.skipped for tick in ticks[: len(ticks) - count]} == {
            f"task {name} is disabled"
        }
        assert made_of(app, name) <= made[name]  # events of pruned jobs have lost their task


def test_the_example_of_the_schedules_declares_what_it_says(tmp_path):
    (tmp_path / "reports.py").write_text(code("schedules.md"))
    reports = load_module("reports", tmp_path, f"sqlite:///{tmp_path / 'x.db'}")
    names = [one.name for one in reports.app.hello()["schedules"]]
    assert sorted(names) == ["reports.close_day", "reports.poll", "sweep", "weekly-mail"]
    assert not (tmp_path / "x.db").exists()  # declaring writes nothing
