"""How long it takes until others go on: each test prints its figure, and asserts the bound of the scorecard."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from contextlib import suppress
from statistics import median
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import psycopg
import pytest
from tests.support import (
    PATIENCE,
    NodeProcess,
    eventually,
    lines,
    load_jobs,
    load_module,
    without_settings,
)

LEASE = 15  # seconds, the default

HOLDERS = """
import os, time
from genba import Genba, current_job

app = Genba()

@app.task
def hold(path: str) -> int:
    with app.mutex("m") as lock:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, f"{current_job().attempt} {lock.token}\\n".encode())
        os.close(fd)
        while not os.path.exists(f"{path}.over"):
            time.sleep(0.02)
        return lock.token
"""


def test_what_a_lost_machine_had_is_with_others_within_twenty_seconds(url, start_node, tmp_path):
    """All of its processes stand still, guard and workers too: nothing is closed, and no process says that it ends.

    Right after its heartbeat, with the default lease; one job with a lock, for which a process outside waits.
    """
    (tmp_path / "holders.py").write_text(HOLDERS)
    holders = load_module("holders", tmp_path, url)
    lost = start_node("holders:app", url, "--name", "lost")
    path = tmp_path / "held"
    job = holders.hold.enqueue(str(path))
    eventually(lambda: lines(path), within=60)
    start_node("holders:app", url, "--name", "other")
    eventually(lambda: len(holders.app.nodes()) == 2, within=60)
    freed: list[float] = []
    waits = threading.Thread(target=_take_the_lock, args=(url, freed), name="waits")
    waits.start()

    def beat() -> int:
        return next(node.beat_at for node in holders.app.nodes() if node.name == "lost")

    before = beat()
    eventually(lambda: beat() != before, within=30)
    began = time.monotonic()
    stopped = _stand_still(lost)
    waits.join(120)
    assert freed, "the lock was never free"
    eventually(lambda: len(lines(path)) > 1, within=30)
    again = time.monotonic() - began
    (tmp_path / "held.over").touch()

    first, second = lines(path)
    assert (first[0], second[0]) == ("1", "2")
    assert int(second[1]) > int(first[1])
    assert job.result(timeout=30) == int(second[1])
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    took = freed[0] - began
    engine = url.partition(":")[0]
    print(
        f"{engine}: of a lost machine the lock was free after {took:.1f} s, its job ran after {again:.1f} s"
    )
    assert took < 2 * LEASE
    assert again < 2 * LEASE
    assert holders.app.verify().faults == []
    holders.app.close()


def _take_the_lock(url: str, freed: list[float]) -> None:
    from genba import Genba

    app = Genba(url)
    with app.mutex("m", wait="60s"):
        freed.append(time.monotonic())
    app.close()


def _stand_still(node: NodeProcess) -> list[psutil.Process]:
    processes = [psutil.Process(pid) for pid in node.tree()]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    return processes


@pytest.mark.parametrize("outage", [5, pytest.param(60, marks=pytest.mark.soak)])
def test_after_an_outage_jobs_run_at_full_speed_within_fifteen_seconds(
    proxied, start_node, tmp_path, outage
):
    proxy, direct = proxied
    jobs = load_jobs(direct, tmp_path)
    start_node("jobs:app", proxy.url, "--max", "2")
    eventually(jobs.app.nodes, within=60)
    _drain(jobs, 500)
    before = _drain(jobs, 500)

    proxy.refuse()
    jobs.app.enqueue_many([jobs.add.call(n) for n in range(500)])
    time.sleep(outage)
    began = time.monotonic()
    proxy.admit()
    eventually(lambda: jobs.app.count(state="succeeded") > 1000, within=60)
    first = time.monotonic() - began
    eventually(lambda: jobs.app.count(state="succeeded") == 1500, within=60)
    last = time.monotonic() - began

    print(
        f"after {outage} s without a database the first of 500 jobs ended after {first:.2f} s, the last after "
        f"{last:.2f} s (before it all took {before:.2f} s)"
    )
    assert last < PATIENCE * (15 + 2 * before)
    assert jobs.app.count(state="any") == 1500
    assert {job.record.attempt for job in jobs.app.jobs(state="succeeded", limit=1500)} == {1}
    assert jobs.app.verify().faults == []
    jobs.app.close()


def _drain(jobs: Any, count: int) -> float:
    began = time.monotonic()
    jobs.app.enqueue_many([jobs.add.call(n) for n in range(count)]).wait(timeout=60)
    return time.monotonic() - began


@pytest.mark.parametrize("server_knows", [True, False])
def test_a_node_whose_connections_are_half_open_listens_again_within_fifteen_seconds(
    proxied, start_node, tmp_path, server_knows
):
    """What it had open is silent for ever, as after a fail-over; new connections work.

    Or the server does not know it, and keeps the old session, with the lock of the node.
    """
    proxy, direct = proxied
    jobs = load_jobs(direct, tmp_path)
    node = start_node("jobs:app", proxy.url)
    (member,) = eventually(jobs.app.nodes, within=60)
    jobs.add.enqueue(1).result(timeout=60)
    before = median(_time_of_a_job(jobs) for _ in range(5))
    with psycopg.connect(direct, autocommit=True) as server:
        key = [member.id >> 32, member.id & 0xFFFFFFFF]
        ((old,),) = server.execute(f"SELECT pid FROM pg_locks WHERE {HOLDS}", key).fetchall()
        began = time.monotonic()
        proxy.forget()
        if server_knows:
            server.execute("SELECT pg_terminate_backend(%s)", [old])
        eventually(
            lambda: "the listening connection was lost and is there again" in node.log, within=60
        )
        took = time.monotonic() - began

    heard = median(
        _time_of_a_job(jobs) for _ in range(11)
    )  # half a second, if it only looks by itself
    which = "" if server_knows else ", of which the server did not know,"
    print(
        f"a node with half-open connections{which} listened again after {took:.1f} s; a job took {heard:.3f} s"
    )
    assert took < PATIENCE * 15
    assert heard < max(0.25, 3 * before), "it is not woken"
    assert jobs.app.verify().faults == []
    jobs.app.close()


HOLDS = "locktype = 'advisory' AND granted AND (classid, objid) = (%s, %s)"  # the listening session has the node's lock


def _time_of_a_job(jobs: Any) -> float:
    time.sleep(random.uniform(0.2, 0.7))
    began = time.monotonic()
    jobs.add.enqueue(1).result(timeout=60)
    return time.monotonic() - began


def test_a_job_of_an_unknown_task_is_parked_within_a_minute(shop):
    """It is put aside, and `explain` says why; no attempt is used."""
    began = time.monotonic()
    job = shop.app.enqueue("unknown.task")
    eventually(lambda: job.refresh().record.parked_on == "unknown task unknown.task", within=60)
    took = time.monotonic() - began

    print(
        f"{shop.url.partition(':')[0]}: a job that no node knows was put aside after {took:.1f} s"
    )
    assert took < PATIENCE * 60
    assert (job.state, job.record.attempt) == ("waiting", 0)
    assert any("unknown.task" in str(reason) for reason in job.explain().reasons)
    job.cancel()


STUMBLES = """
import os, sys
if "genba.cli" in " ".join(sys.orig_argv):
    from genba.node.database.maintenance import Maintenance
    do_due_work = Maintenance._do_due_work

    def stumble(*args):
        if os.path.exists(os.environ["STUMBLES"]):
            raise RuntimeError("sim")
        return do_due_work(*args)

    Maintenance._do_due_work = stumble
"""


def test_a_node_that_cannot_keep_the_queue_is_red_within_thirty_seconds(
    jobs, url, start_node, tmp_path
):
    """Its maintenance raises in every round: /readyz says so, and is green again when it is over."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STUMBLES)
    sign = tmp_path / "now"
    path = os.pathsep.join([str(tmp_path / "site"), without_settings(os.environ)["PYTHONPATH"]])
    port = _free_port()
    env = {"PYTHONPATH": path, "STUMBLES": str(sign)}
    start_node("jobs:app", url, "--metrics", str(port), env=env)
    eventually(lambda: _status(port) == 200, within=60)

    sign.touch()
    began = time.monotonic()
    eventually(lambda: _status(port) == 503, within=60)
    took = time.monotonic() - began
    sign.unlink()
    eventually(lambda: _status(port) == 200, within=60)

    print(f"{url.partition(':')[0]}: a node with failing maintenance was red after {took:.1f} s")
    assert took < PATIENCE * 30


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _status(port: int) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code
    except OSError:
        return 0
