"""The benchmarks run, and every job they measure ran once.  How fast is not asked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT, without_settings

BENCHMARKS = ROOT / "benchmarks"
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


def compare(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *args]
    env = {**without_settings(os.environ), "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_every_peer_says_in_its_head_how_it_is_run(tmp_path):
    listed = compare(tmp_path, "--list")

    files = {file.stem for file in (BENCHMARKS / "peers").glob("*.*")} - {
        "__init__",
        "effects",
        "side",
    }
    assert {line.split()[0] for line in listed.stdout.splitlines()} == files, listed.stderr


def test_the_comparison_drains_every_job_and_finds_nothing_wrong(tmp_path):
    few = ("--quick", "--backlog", "300", "--only", "nobody", "--on", "sqlite")
    ended = compare(tmp_path, *few, "--workloads", "drain,events,ondemand,own")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| genba (SQLite) |" in ended.stdout
    assert "| raw limit (SQLite) |" in ended.stdout
    assert "### Events read along" in ended.stdout
    assert "### A process for each job" in ended.stdout
    assert "| enqueue, of a bare commit, genba (SQLite) | ≥ 85 % |" in ended.stdout
    assert "Not measured" not in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_genba_alone_measures_every_workload_and_finds_all_jobs_done_right(
    engine, request, tmp_path
):
    where = f"sqlite:///{tmp_path / 'x.db'}"
    if engine == "postgres":
        where = request.getfixturevalue("databases").url("postgres")
    command = [sys.executable, str(BENCHMARKS / "alone.py"), "--quick", "--jobs", "300", "--json"]
    env = {**without_settings(os.environ), "TMPDIR": str(tmp_path)}

    ended = subprocess.run(
        [*command, "--url", where],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert list(found["engines"]) == [engine]
    assert {figure["name"] for figure in found["figures"]} == WORKLOADS
    assert all(figure["value"] > 0 for figure in found["figures"])
    assert [check for check in found["checks"] if not check["ok"]] == []
    verified = [check for check in found["checks"] if check["name"].endswith(": verify")]
    assert len(verified) == 10  # each database in which a node ran
    assert list(tmp_path.iterdir()) == []
