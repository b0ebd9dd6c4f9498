"""A signal never hits another process that has got the number of a dead worker; `make soak` tries it 5,000 times."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.support import ROOT
from tests.worker.test_fork_per_job import Ward

LAST = Path(
    "/proc/sys/kernel/ns_last_pid"
)  # of this namespace; the next process gets the number after it


@pytest.mark.parametrize("rounds", [25, pytest.param(5_000, marks=pytest.mark.soak)])
def test_a_process_with_the_pid_of_a_dead_worker_is_not_signalled(rounds):
    inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if (
        os.geteuid()
        or not LAST.exists()
        or subprocess.run([*inside, "true"], check=False).returncode
    ):
        pytest.skip("a namespace of processes needs root, and a kernel that lets it choose numbers")
    code = "from tests.node.processes.test_pid_reuse import main; main()"
    command = [*inside, sys.executable, "-c", code, str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    reused, hit = map(int, done.stdout.split())
    assert hit == 0
    assert reused >= rounds * 0.9  # another process may be faster now and then


def main() -> None:
    """Kill workers, give their numbers to bystanders, signal the workers; tells how many there were, and were hit."""
    reused = hit = 0
    with tempfile.TemporaryDirectory() as folder:
        ward = Ward(Path(folder))
        for _ in range(int(sys.argv[1])):
            with ward.worker():
                ward.run(("stay", {}))
                ward.runs(0)
                os.kill(ward.pid, signal.SIGKILL)
                while os.path.exists(
                    f"/proc/{ward.pid}"
                ):  # until the zygote has reaped it; we have not heard of it
                    time.sleep(0.0005)
                LAST.write_text(str(ward.pid - 1))
                bystander = os.fork()
                if bystander == 0:
                    signal.pause()
                    os._exit(0)
                reused += bystander == ward.pid
                ward.pool.signal(ward.slot, signal.SIGKILL)
                ward.ended()
                ward.pool.sweep(ward.slot)
                if os.waitpid(bystander, os.WNOHANG)[0]:
                    hit += 1
                else:
                    os.kill(bystander, signal.SIGKILL)
                    os.waitpid(bystander, 0)
        ward.pool.end()
    print(reused, hit)
