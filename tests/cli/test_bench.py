"""`genba bench`: it measures everything, and what it ran was right.  How fast is not asked here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support import genba_command, without_settings

WORKLOADS = {
    "enqueue, one by one",
    "enqueue, bulk of 1,000",
    "drain, 1 worker",
    "drain, 2 workers",
    "drain, each job limited",
    "a slot freed to the next start, p50, 100 in line",
    "mutex, taken and given back",
    "drain, all history kept",
    "drain, backlog of 3,000",
    "idle pick-up, p50",
    "idle pick-up, p99",
    "start after its moment, p50",
    "start after its moment, p99",
    "idle node, all processes",
    "idle node, supervisor",
}


def run_bench(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**without_settings(os.environ), "TMPDIR": str(folder)}
    return subprocess.run(
        genba_command("bench", "--quick", *args),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_bench_measures_every_workload_and_finds_all_jobs_done_right(engine, request, tmp_path):
    where = f"sqlite:///{tmp_path / 'x.db'}"
    if engine == "postgres":
        where = request.getfixturevalue("databases").url("postgres")

    ended = run_bench(tmp_path, "--json", "--jobs", "300", "--url", where)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout)
    assert list(told["engines"]) == [engine]
    assert {figure["name"] for figure in told["figures"]} == WORKLOADS
    assert all(figure["value"] > 0 for figure in told["figures"])
    assert [check for check in told["checks"] if not check["ok"]] == []
    verified = [check for check in told["checks"] if check["name"].endswith(": verify")]
    assert len(verified) == 10  # each database in which a node ran
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args", [("--engine", "sqlite", "--url", "postgresql://h/x"), ("--url", "mysql://h/x")]
)
def test_bench_refuses_a_database_that_it_cannot_measure(args, tmp_path):
    ended = run_bench(tmp_path, *args)

    assert ended.returncode == 2
    assert "--url" in ended.stderr or "no database URL" in ended.stderr
