"""`make bench`: genba beside its peers.  Here genba is alone, and how fast is not asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT, without_settings

BENCHMARKS = ROOT / "benchmarks"


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
