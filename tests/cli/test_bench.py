"""`genba bench` runs every job it measures, and cleans up.  How fast is not asked here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.support import genba_command, without_settings

from genba import Genba

FIGURES = {
    "enqueue_per_second",
    "bulk_per_second",
    "drain_per_second",
    "pick_up_p50_ms",
    "pick_up_p99_ms",
}


def run_bench(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**without_settings(os.environ), "TMPDIR": str(folder)}
    return subprocess.run(
        genba_command("bench", *args),
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_bench_runs_every_job_and_leaves_nothing_behind(engine, request, tmp_path):
    where = f"sqlite:///{tmp_path / 'x.db'}"
    if engine == "postgres":
        where = request.getfixturevalue("databases").url("postgres")

    ended = run_bench(tmp_path, "--json", "--jobs", "300", "--url", where)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout)
    assert (result["ok"], result["jobs"], result["failed"]) == (True, 300, 0)
    assert all(result[name] > 0 for name in FIGURES)
    assert list(tmp_path.iterdir()) == []
    if engine == "postgres":
        namespace = result["namespace"]
        with_jobs = Genba(where, namespace=namespace)
        assert with_jobs.count(state="any") == 0
        with_jobs.close()


def test_bench_prints_a_table(tmp_path):
    ended = run_bench(tmp_path, "--quick")

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "drain, 2 workers" in ended.stdout
    assert "WRONG" not in ended.stdout


def test_bench_refuses_a_database_that_it_cannot_measure(tmp_path):
    ended = run_bench(tmp_path, "--url", "mysql://h/x")

    assert ended.returncode == 2
    assert "is not a database URL" in ended.stderr
