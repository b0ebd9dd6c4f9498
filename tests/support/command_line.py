"""The `genba` command, run as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def genba_command(*args: str) -> list[str]:
    """Return the words that run `genba` with this interpreter, installed or not.

    With -P, as for an installed script: the current folder is not on sys.path.
    """
    return [
        sys.executable,
        "-P",
        "-c",
        "import sys; from genba.cli import main; sys.exit(main())",
        *args,
    ]


def without_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` without GENBA_* settings, and with absolute paths in PYTHONPATH."""
    path = [os.path.abspath(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    rest = {name: value for name, value in env.items() if not name.startswith("GENBA_")}
    return {**rest, "PYTHONPATH": os.pathsep.join(path)}


def run_genba(
    url: str, *args: str, cwd: Path | None = None, within: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run `genba ARGS` on the database `url`; TimeoutExpired if it does not come back."""
    return _run(genba_command(*args), url, cwd, within)


def run_python(
    url: str, *args: str, cwd: Path, within: float = 180
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGS` with GENBA_URL set to `url`."""
    return _run([sys.executable, *args], url, cwd, within)


def _run(
    command: list[str], url: str, cwd: Path | None, within: float
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**without_settings(os.environ), "GENBA_URL": url},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within,
        check=False,
    )
    print(done.stdout, done.stderr)  # pytest shows it when the test has failed
    return done


def own_pid_namespace() -> list[str]:
    """Return the words before a command that make it process 1 of its own namespace, or skip the test."""
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if (
        os.geteuid()
        or subprocess.run([*words, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("a process namespace with its own /proc is refused here; it needs root")
    return words
