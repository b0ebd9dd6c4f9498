"""`genba task`, `genba queue`, and many jobs at once, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.storage.builders import joined

from genba.cli import main


@pytest.fixture
def run(jobs: Any) -> Any:
    joined(jobs.app.store, tasks=tuple(task.describe() for task in jobs.app.task_table().values()))

    def command(*words: str, code: int = 0) -> Any:
        done = CliRunner().invoke(main, [*words, "--url", jobs.app.url, "--json"])
        assert done.exit_code == code, (words, done.output)
        return json.loads(done.stdout) if done.stdout else json.loads(done.stderr)

    return command


def test_tasks_are_listed_switched_and_changed(run: Any, jobs: Any) -> None:
    assert {"jobs.add", "jobs.write"} <= {one["name"] for one in run("task", "ls")}
    assert run("task", "disable", "jobs.add", "--reason", "why") == [
        {"name": "jobs.add", "changed": True}
    ]
    run("task", "disable", "jobs.add", code=1)
    (add,) = [one for one in run("task", "ls") if one["name"] == "jobs.add"]
    assert not add["enabled"]
    run("task", "enable", "jobs.add")
    assert run("task", "set", "jobs.add", "timeout=5m", "priority=3")["override"] == {
        "timeout": "5m",
        "priority": 3,
    }
    assert jobs.add.enqueue(1).priority == 3
    assert run("task", "set", "jobs.add", "--reset", "timeout")["override"] == {"priority": 3}
    assert run("task", "set", "jobs.add", "--reset-all")["override"] == {}
    assert (
        "did you mean timeout"
        in run("task", "set", "jobs.add", "timout=5", code=2)["error"]["message"]
    )
    assert "OPTION=VALUE" in run("task", "set", "jobs.add", "x", code=2)["error"]["message"]
    run("task", "disable", "no.such", code=4)


def test_queues_are_listed_paused_resumed_and_flushed(run: Any, jobs: Any) -> None:
    jobs.add.using(queue="slow").enqueue(1)
    kept = jobs.add.enqueue(1)
    run("queue", "pause", "slow", "--until", "1h")
    (slow,) = [one for one in run("queue", "ls") if one["name"] == "slow"]
    assert (slow["paused"], slow["waiting"], slow["parked"]) == (True, 1, {})
    assert slow["paused_until"]
    run("queue", "resume", "slow")
    run("queue", "resume", "slow", code=1)
    assert "--yes" in run("queue", "flush", "slow", code=2)["error"]["message"]
    assert run("queue", "flush", "slow", "--yes") == {"queues": ["slow"], "deleted": 1}
    assert [job.id for job in jobs.app.jobs()] == [kept.id]


def test_many_jobs_are_steered_by_what_they_are(run: Any, jobs: Any) -> None:
    jobs.app.enqueue_many([jobs.add.call(i) for i in range(5)])
    assert run("job", "cancel", "--task", "jobs.add", "--dry-run") == {"count": 5, "dry_run": True}
    assert run("job", "hold", "--task", "jobs.add")["count"] == 5
    assert run("job", "resume", "--queue", "default")["count"] == 5
    assert run("job", "cancel", "--state", "waiting")["count"] == 5
    assert len(run("job", "ls", "--state", "cancelled", "--oldest", "--since", "1h")) == 5
    assert run("job", "requeue", "--since", "1h")["count"] == 5
    assert "not both" in run("job", "cancel", "1", "--task", "jobs.add", code=2)["error"]["message"]
    jobs.app.cancel_many()
    assert run("db", "prune", "--older-than", "0") == {"deleted": 5}
    assert run("db", "prune") == {"deleted": 0}


@pytest.mark.parametrize("words", [["task", "ls"], ["queue", "ls"]])
def test_lists_are_readable(jobs: Any, words: list[str], tmp_path: Path) -> None:
    joined(jobs.app.store, tasks=(jobs.add.describe(),))
    done = CliRunner().invoke(main, [*words, "--url", jobs.app.url])
    assert done.exit_code == 0
    assert "default" in done.output
