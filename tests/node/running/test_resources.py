"""What jobs and nodes may use: memory, CPU time, the lease; real processes, both databases."""

from __future__ import annotations

import signal
import time

import msgspec
import psutil
import pytest
from tests.storage.builders import rows, transaction
from tests.support import eventually, lines, reaped, started


@pytest.fixture
def node(jobs, url, start_node):
    """Starts a node and waits until it is there."""

    def start(*args: str, **options: object):
        before = len(jobs.app.nodes())
        started = start_node("jobs:app", url, *args, **options)
        eventually(lambda: len(jobs.app.nodes()) > before, within=15)
        return started

    return start


def events(url: str, *kinds: str) -> list[tuple[str, dict]]:
    found = rows(url, "SELECT kind, data FROM genba.event ORDER BY seq")
    return [(kind, msgspec.json.decode(bytes(data))) for kind, data in found if kind in kinds]


# one job


def test_a_job_that_takes_too_much_memory_is_ended_and_says_how_much_it_took(shop, path):
    jobs = shop.jobs
    job = jobs.eat_memory.using(memory="150M").enqueue(str(path), 300)

    eventually(lambda: job.refresh().state == "held", within=10)
    attempt = job.attempts[-1]
    assert attempt.cause == "out of memory"
    assert attempt.peak_memory > 150 << 20
    assert "out of memory" in job.reason


def test_what_a_job_starts_counts_for_its_memory_and_ends_with_it(shop, path):
    jobs = shop.jobs
    job = jobs.eat_memory.using(memory="150M").enqueue(str(path), 300, by_child=True)

    eventually(lambda: job.refresh().state == "held", within=10)
    assert job.attempts[-1].cause == "out of memory"
    assert job.attempts[-1].peak_memory > 150 << 20
    assert reaped(*(child for (child,) in lines(f"{path}.children")))


def test_a_job_within_its_limits_is_left_alone(shop, path):
    jobs = shop.jobs
    job = jobs.eat_memory.using(memory="600M", cpu="20s").enqueue(str(path), 50)
    started(path)
    path.touch()

    assert job.result(timeout=10) == "full"


def test_a_job_that_takes_too_much_cpu_time_is_stopped(shop, path):
    jobs = shop.jobs
    job = jobs.burn.using(cpu="500ms", grace="2s").enqueue(str(path))

    eventually(lambda: job.refresh().state == "held", within=15)
    attempt = job.attempts[-1]
    assert attempt.cause == "cpu limit"
    assert 0.4 < attempt.cpu < 3


def test_waiting_is_no_cpu_time(shop, path):
    jobs = shop.jobs
    job = jobs.wait_for.using(cpu="300ms").enqueue(str(path))
    started(path)
    jobs.add.using(delay=1).enqueue(1).result(timeout=10)
    path.touch()

    assert job.result(timeout=10) == "opened"


def test_a_job_without_a_sign_of_life_is_stopped_and_those_with_one_go_on(shop, path):
    jobs = shop.jobs
    silent, *lively = jobs.app.enqueue_many(
        [
            jobs.wait_for.using(stall_timeout="3s", grace="1s").call(str(path)),
            jobs.show_life.using(stall_timeout="3s", grace="1s").call(str(path), "heartbeat"),
            jobs.show_life.using(stall_timeout="3s", grace="1s").call(str(path), "progress"),
        ]
    )
    silent.wait(timeout=60)
    path.touch()

    assert (silent.refresh().state, silent.attempts[-1].cause) == ("timed_out", "stall")
    assert [job.result(timeout=60) for job in lively] == ["opened"] * 2


def test_every_attempt_has_its_times_its_cpu_time_and_its_memory_however_it_ended(shop, path):
    jobs = shop.jobs
    ends = {
        "returned": jobs.add.enqueue(1),
        "exception": jobs.fail.enqueue("so it goes"),
        "signal 11": jobs.die_of.enqueue(11),
        "exit 3": jobs.exit_with.enqueue(3),
        "timeout": jobs.wait_for.using(timeout="1s", grace="1s").enqueue(str(path)),
        "cancelled": jobs.wait_for.enqueue(str(path)),
        "killed": jobs.wait_for.enqueue(str(path)),
    }
    eventually(
        lambda: {ends[how].refresh().state for how in ("cancelled", "killed")} == {"running"},
        within=60,
    )
    started(path, 3)
    ends["cancelled"].cancel()
    ends["killed"].kill()
    eventually(lambda: all(job.refresh().attempts for job in ends.values()), within=60)
    for how, job in ends.items():
        attempt = job.attempts[0]
        assert attempt.cause == how
        assert attempt.claimed <= attempt.started <= attempt.ended, how
        assert attempt.cpu is not None, how
        assert 0 <= attempt.cpu < 30, how
        assert attempt.peak_memory > 5 << 20, how


# gates


def test_a_node_whose_gate_is_closed_claims_nothing_and_says_so(jobs, url, node):
    node("--min-free-memory", "900T")
    eventually(lambda: events(url, "gate_closed"), within=10)
    job = jobs.add.enqueue(1)
    open_node = node("--min-free-memory", "1M", "--max-load", "10000")

    assert job.result(timeout=10) == 2
    assert job.attempts[-1].pid in (
        process.pid for process in psutil.Process(open_node.pid).children(recursive=True)
    )
    [(_, gate_event)] = events(url, "gate_closed", "gate_opened")
    assert "memory free" in gate_event["reason"]


# the lease


def test_regression_21_a_node_stopped_past_its_lease_is_another_one_and_writes_nothing_stale(
    jobs, url, node, path
):
    first = node("--name", "first", "--max", "1", env={"GENBA_LEASE": "3"})
    [before] = jobs.app.nodes()
    job = jobs.wait_for.enqueue(str(path))
    [(_, _, pid)] = started(path)
    node("--name", "second", env={"GENBA_LEASE": "3"})
    eventually(lambda: job.refresh().record.started_mark)

    first.signal(signal.SIGSTOP)
    eventually(lambda: reaped(pid), within=10)  # the guard's deed: the node cannot do it
    assert started(path, 2)[1][:2] == [str(job.id), "2"]
    first.signal(signal.SIGCONT)

    eventually(lambda: "new incarnation" in first.log, within=15)
    again = eventually(lambda: {n.name: n.id for n in jobs.app.nodes()}.get("first"), within=15)
    assert again != before.id
    assert (job.refresh().state, job.record.attempt) == ("running", 2)
    path.touch()
    assert job.result(timeout=10) == "opened"
    assert [attempt.cause for attempt in job.attempts] == ["node lost", "returned"]


def test_a_node_without_its_database_stops_what_must_not_run_twice_and_nothing_else(
    jobs, url, node, path
):
    lease = 8
    node("--max", "2", env={"GENBA_LEASE": f"{lease}"})
    plain = jobs.wait_for.enqueue(str(path))
    once = jobs.wait_once.enqueue(str(path))
    started(path, 2)
    with transaction(url) as conn:  # no node can renew
        conn.execute(
            "SELECT 1 FROM genba_node"
            if url.startswith("sqlite")
            else "SELECT 1 FROM genba.node FOR UPDATE"
        )
        began = time.monotonic()
        assert eventually(lambda: lines(f"{path}.stopped"), within=8) == [[str(once.id), "Stopped"]]
        assert time.monotonic() - began < lease  # before others may take it for lost
        conn.execute("ROLLBACK")
    path.touch()

    assert plain.result(timeout=10) == "opened"
    assert once.wait(timeout=10).state == "failed"
    assert once.attempts[-1].cause == "maybe_ran"
    assert "lease lost" in once.reason


@pytest.mark.parametrize(
    ("task", "number", "end"),
    [("die_of", 9, {"signal": 9, "signal_name": "SIGKILL"}), ("exit_with", 3, {"exit": 3})],
)
def test_workers_that_come_and_go_are_in_the_events(jobs, url, node, task, number, end):
    node("--max", "1")
    job = getattr(jobs, task).enqueue(number)
    eventually(lambda: job.refresh().state == "held", within=10)
    pid = job.attempts[-1].pid

    ended = eventually(
        lambda: [w for _, e in events(url, "worker_ended") for w in e["workers"] if w["pid"] == pid]
    )
    begun = [w for _, e in events(url, "worker_started") for w in e["workers"] if w["pid"] == pid]
    assert ended == [{**begun[0], **end}]


def test_a_long_job_has_its_name_in_the_list_of_processes(shop, path):
    jobs = shop.jobs
    job = jobs.wait_for.enqueue(str(path))
    [(_, _, pid)] = started(path)

    title = " ".join(psutil.Process(int(pid)).cmdline())
    assert title.startswith("genba-default: /node[")
    assert title.rstrip("\0 ").endswith(f"jobs.wait_for #{job.id}")
    path.touch()
    job.result(timeout=10)
    eventually(lambda: f"#{job.id}" not in " ".join(psutil.Process(int(pid)).cmdline()))
