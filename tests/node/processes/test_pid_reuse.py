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
from tests.support import ROOT, own_pid_namespace
from tests.worker.test_fork_per_job import Ward

LAST = Path(
    "/proc/sys/kernel/ns_last_pid"
)  # of this namespace; the next process gets the number after it


@pytest.mark.parametrize("rounds", [25, pytest.param(5_000, marks=pytest.mark.soak)])
def test_a_process_with_the_pid_of_a_dead_worker_is_not_signalled(rounds):
    inside = own_pid_namespace()
    if not LAST.exists():
        pytest.skip("this kernel does not let a process namespace choose its process numbers")
    code = "from tests.node.processes.test_pid_reuse import main; main()"
    command = [*inside, sys.executable, "-c", code, str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    reused, hit = map(int, done.stdout.split())
    assert hit == 0
    if reused < rounds * 0.5:  # the kernel has given the number to another process
        pytest.skip(f"did not happen often enough in this run: {reused} of {rounds} pids reused")


def main() -> None:
    """Kill workers, give their pids to bystanders, and signal the workers.

    Print how many pids were reused, and how many bystanders were hit.
    """
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
