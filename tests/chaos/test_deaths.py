"""Workers die at any moment: every cause is right, and no other job is touched by it.

2,000 jobs, half of them on each engine, of which every third kills its worker; `make soak` runs 10,000 on each.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from contextlib import suppress

import psutil
import pytest
from tests.support import NodeProcess, eventually, lines, load_module

APP = """
import ctypes, os, signal, sys, threading, time
from genba import Genba

app = Genba()

def tell(path, word):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{word}\\n".encode())
    os.close(fd)

def after_its_result(path):
    time.sleep(0.003)
    tell(path, os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(max_crashes=1)
def meet(fate: str, path: str) -> str:
    if fate == "late":
        threading.Thread(target=after_its_result, args=(path,)).start()
    time.sleep(0.0005)
    match fate:
        case "segfault":
            ctypes.string_at(0)
        case "exit 0" | "exit 3":
            os._exit(int(fate[-1]))
        case "out of memory":   # as the kernel does it
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.abort()
        case "raise":
            raise ValueError("of its own")
        case "sys.exit":
            sys.exit(4)
    return fate

@app.task(max_crashes=100)
def live(n: int) -> int:
    return n
"""

CAUSES = {
    "segfault": f"signal {signal.SIGSEGV.value}",
    "abort": f"signal {signal.SIGABRT.value}",
    "out of memory": "signal 9",
    "exit 0": "exit 0",
    "exit 3": "exit 3",
    "raise": "exception",
    "sys.exit": "exception",
    "late": "returned",
}


@pytest.fixture
def ward(home):
    url, folder = home
    (folder / "fates.py").write_text(APP)
    module = load_module("fates", folder, url)
    node = NodeProcess.start("fates:app", url, "--pool", "static", "--min", "2", cwd=folder)
    eventually(module.app.nodes, within=30)
    yield module, node, folder
    node.end()
    print(node.log[-4000:])
    module.app.close()


ON_DEMAND = 4  # what a node opens when it is needed first, and keeps: a connection for each thread, a bell to ring


def open_files(node):
    """Of the three that stay: node, guard, zygote; when both workers are there and idle."""
    staying = eventually(lambda: beside_two_workers(node), within=20)
    return {process.pid: process.num_fds() for process in staying}


def beside_two_workers(node):
    """Nothing if there are more or fewer, or one has just been forked and has no title yet."""
    with suppress(psutil.NoSuchProcess):
        family = [psutil.Process(pid) for pid in node.tree()]
        staying = [one for one in family if "/worker[" not in " ".join(one.cmdline())]
        return staying if (len(family), len(staying)) == (5, 3) else []
    return []


def leaves_nothing_open(node, before):
    """However many workers have died."""
    more = {pid: count - before[pid] for pid, count in open_files(node).items()}
    return 0 <= more.pop(node.pid) <= ON_DEMAND and set(more.values()) == {0}


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.soak)])
def test_of_jobs_whose_workers_die_every_cause_is_right_and_no_other_job_is_counted(ward, count):
    module, node, folder = ward
    module.app.wait(module.app.enqueue_many([module.live.call(n) for n in range(50)]), timeout=60)
    before = open_files(node)

    fates = [fate for n in range(count // 24) for fate in CAUSES]
    calls = [module.meet.call(fate, str(folder / "late")) for fate in fates]
    calls += [module.live.call(n) for n in range(count - len(calls))]
    random.Random(7).shuffle(calls)
    jobs = module.app.enqueue_many(calls)
    eventually(
        lambda: not module.app.count(state=["waiting", "scheduled", "running"]),
        within=60 + count / 10,
    )

    assert module.app.verify().faults == []
    killers = {int(pid) for (pid,) in lines(folder / "late")}
    seen: Counter[str] = Counter()
    hit = 0
    for job in jobs:
        attempts = job.refresh().attempts
        by_others = [one for one in attempts if one.cause == "signal 9" and one.pid in killers]
        own = [one.cause for one in attempts if one not in by_others]
        if job.task == "fates.live":
            hit += len(by_others)
            assert (own, job.crashes, job.state) == (["returned"], len(by_others), "succeeded")
        elif not by_others:  # else it was about to meet its own fate when that of another met it
            fate = job.args["fate"]
            assert own == [CAUSES[fate]], (fate, own)
            assert job.crashes == (1 if "signal" in own[0] or "exit " in own[0] else 0)
            seen[fate] += 1

    assert seen.keys() == CAUSES.keys()
    assert hit <= len(killers)
    eventually(lambda: leaves_nothing_open(node, before), within=20)
    family = psutil.Process(node.pid).children(recursive=True)
    assert not [process for process in family if process.status() == psutil.STATUS_ZOMBIE]
