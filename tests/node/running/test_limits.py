"""Limits, rates and full tasks, with a node; one for all tests of an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.support import NodeProcess, eventually, lines, load_app, started

from genba import Genba, Limit, Rate, TaskFull
from genba.errors import BadArguments, BadOption, BadTask


@pytest.fixture(scope="module")
def limited_tasks(home: tuple[str, Path]) -> Iterator[Any]:
    """limited_tasks.py, as a client has it, and a node for it."""
    url, folder = home
    with ExitStack() as stack:
        module = load_app("limited_tasks", url, folder)
        stack.callback(module.app.close)
        node = NodeProcess.start(
            "limited_tasks:app", url, "--max", "6", "-q", "default:4,units:2", cwd=folder
        )
        stack.callback(lambda: print(node.log))
        stack.callback(node.end)
        eventually(module.app.nodes, within=60)
        yield module


def test_a_limit_is_filled_from_the_arguments_and_holds_for_each_bucket(limited_tasks, path):
    group = limited_tasks.app.enqueue_many(
        [limited_tasks.serve.call(tenant, str(path)) for tenant in "aaab"]
    )

    assert sorted(tenant for tenant, _ in started(path, 3)) == ["a", "a", "b"]
    assert group[2].refresh().record.parked_on == "limit tenant:a"
    path.touch()
    group.wait(timeout=10)

    assert len(lines(f"{path}.started")) == 4


def test_a_client_without_the_code_is_bound_by_the_same_limits(limited_tasks, path):
    other = Genba(limited_tasks.app.url)
    jobs = [
        other.enqueue("limited_tasks.serve", "c", str(path)),
        other.enqueue("limited_tasks.serve", path=str(path), tenant="c"),
    ]
    jobs.append(other.enqueue("limited_tasks.serve", "c", path=str(path)))

    assert [job.refresh().record.parked_on for job in jobs] == [None, None, "limit tenant:c"]
    started(path, 2)
    path.touch()
    other.wait(jobs, timeout=10)
    other.close()


@pytest.mark.parametrize(("task", "most"), [("few", 2), ("lone", 1)])
def test_so_many_jobs_of_a_task_run_at_a_time(limited_tasks, path, task, most):
    group = limited_tasks.app.enqueue_many(
        [getattr(limited_tasks, task).call(str(path)) for _ in range(most + 2)]
    )

    started(path, most)
    assert [job.refresh().record.parked_on for job in group[most:]] == [
        f"limit max_running limited_tasks.{task}"
    ] * 2
    assert len(lines(f"{path}.started")) == most
    path.touch()
    group.wait(timeout=10)


def test_a_freed_slot_starts_the_next_job_at_once(limited_tasks, tmp_path):
    paths = [tmp_path / str(n) for n in range(6)]
    jobs = [limited_tasks.lone.enqueue(str(path)) for path in paths]
    took = []
    for path, next_path in pairwise(paths):
        started(path)
        path.touch()
        began = time.monotonic()
        started(next_path)
        took.append(time.monotonic() - began)

    assert median(took) < 0.5
    paths[-1].touch()
    limited_tasks.app.wait(jobs, timeout=30)


def test_a_rate_spreads_the_starts(limited_tasks, tmp_path):
    path = tmp_path / "asked"
    limited_tasks.app.enqueue_many([limited_tasks.ask.call("p", str(path)) for _ in range(7)]).wait(
        timeout=15
    )

    at = [float(words[0]) for words in lines(path)]
    assert len(at) == 7
    assert max(at) - min(at) >= 0.45  # two at once, five more with a tenth of a second each


def test_a_delegator_bows_out_when_its_task_is_full_and_loses_nothing(limited_tasks, tmp_path):
    """UseCase52, the throttled delegator."""
    path = tmp_path / "units"

    assert limited_tasks.delegate.enqueue(25, str(path)).result(timeout=30) == 25
    eventually(lambda: len(lines(path)) == 25, within=10)

    assert sorted(int(number) for (number,) in lines(path)) == list(range(25))
    assert limited_tasks.app.count(state="waiting", task="limited_tasks.unit") == 0


def test_one_more_than_may_wait_is_refused_and_a_batch_as_a_whole(limited_tasks, tmp_path):
    path = str(tmp_path / "x")
    later = limited_tasks.unit.using(at="+1 hour")
    jobs = limited_tasks.app.enqueue_many([later.call(i, path) for i in range(2)])

    with pytest.raises(TaskFull, match=r"limited_tasks\.unit.*max_waiting is 3"):
        limited_tasks.app.enqueue_many([later.call(i, path) for i in range(2)])
    jobs = [*jobs, later.enqueue(9, path)]
    with pytest.raises(TaskFull):
        later.enqueue(10, path)

    for job in jobs:
        job.cancel()


def test_an_operator_changes_a_limit_while_jobs_run(limited_tasks, path):
    group = limited_tasks.app.enqueue_many(
        [limited_tasks.serve.call("live", str(path)) for _ in range(4)]
    )
    started(path, 2)

    limited_tasks.app.set_limit("tenant:{tenant}", 3)

    started(path, 3)
    limited_tasks.app.set_limit("tenant:{tenant}", None)
    changes = [
        (event.data["template"], event.data.get("n"))
        for event in limited_tasks.app.events(kinds="limit_changed")
    ]
    assert changes == [("tenant:{tenant}", 3), ("tenant:{tenant}", None)]
    path.touch()
    group.wait(timeout=10)


# what is refused at once


def test_two_tasks_that_disagree_about_a_template_are_an_error():
    app = Genba("sqlite:///never.db")

    @app.task(limits=[Limit("gpu", 2)])
    def one() -> None: ...

    with pytest.raises(BadTask, match=r"'gpu' has 3, but task .* has 2"):

        @app.task(limits=[Limit("gpu", 3)])
        def other() -> None: ...

    with pytest.raises(BadOption, match="'gpu' has 5"):
        one.using(limits=[Limit("gpu", 5)]).enqueue()


def test_a_template_names_arguments_of_its_task():
    app = Genba("sqlite:///never.db")

    with pytest.raises(BadTask, match=r"'tenant:{tenant}' needs an argument 'tenant'"):

        @app.task(limits=[Limit("tenant:{tenant}", 2)])
        def one(x: int) -> None: ...

    @app.task
    def two(x: int) -> None: ...

    with pytest.raises(BadArguments, match="needs the argument 'y'"):
        two.using(limits=[Limit("y:{y}", 1)]).enqueue(1)


@pytest.mark.parametrize(
    "given",
    [
        {"limits": [Limit("a", 1, ordered=True), Limit("b", 1, ordered=True)]},
        {"limits": [Limit("a", 1), Limit("a", 2)]},
        {"limits": ["a"]},
        {"exclusive": True, "max_running": 2},
        {"max_running": -1},
        {"rate": "fast"},
    ],
)
def test_what_makes_no_sense_is_refused_at_registration(given):
    with pytest.raises(BadOption):
        Genba("sqlite:///never.db").task(**given)(lambda: None)


def test_names_of_buckets_that_are_ours_are_refused():
    for name in ("max_running x", "rate x"):
        with pytest.raises(BadOption, match="are reserved"):
            Limit(name, 1)
    assert Rate("x", "1/s").n == 1
