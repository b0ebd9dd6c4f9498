"""How workers come and go: modes, recycling, dedicated ones, and changes while the node runs; both databases."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest
from tests.support import PATIENCE, eventually, lines, run_genba, started

from genba import BadOption


@pytest.fixture
def node(jobs, url, start_node):
    """Starts a node called "one" and waits until it is there."""

    def start(*args: str, **options: object):
        started = start_node("jobs:app", url, "--name", "one", *args, **options)
        eventually(jobs.app.nodes, within=15)
        return started

    return start


@pytest.fixture
def genba(url, tmp_path):
    """Run `genba` on the same database."""
    return partial(run_genba, url, cwd=tmp_path)


def workers(node) -> int:
    """All but node, guard and zygote."""
    return len(node.tree()) - 3


# modes


@pytest.mark.parametrize(
    "engine", ["sqlite"]
)  # it takes its time, and the database has no part in it
def test_a_dynamic_pool_grows_with_the_work_and_shrinks_when_there_is_none(jobs, node, path):
    one = node("--min", "1", "--max", "4")
    group = jobs.app.enqueue_many([jobs.wait_for.call(str(path)) for _ in range(6)])
    started(path, 4)
    assert workers(one) == 4
    path.touch()
    group.wait(timeout=20)

    eventually(lambda: workers(one) == 1, within=20)  # a worker that is idle for 10 s ends
    assert jobs.add.enqueue(1).result(timeout=10) == 2


def test_a_killed_worker_of_a_static_pool_is_replaced(jobs, node):
    one = node("--pool", "static", "--min", "2")
    eventually(lambda: workers(one) == 2)
    pid = jobs.where.enqueue().result(timeout=10)
    os.kill(pid, signal.SIGKILL)

    eventually(lambda: pid not in one.tree() and workers(one) == 2)
    assert jobs.where.enqueue().result(timeout=10) != pid


def test_an_on_demand_burst_stays_within_max_and_a_killed_job_harms_no_other(jobs, node, path):
    one = node("--pool", "ondemand", "--max", "3")
    group = jobs.app.enqueue_many(
        [
            jobs.die_at_first.call(f"{path}.died"),
            *(jobs.write_slowly.call(str(path), str(i), 0.01) for i in range(30)),
        ]
    )
    most = 0
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(job.refresh().state != "succeeded" for job in group):
        most = max(most, workers(one))

    assert {job.state for job in group} == {"succeeded"}
    assert sorted(int(word) for word, *_ in lines(path)) == list(range(30))
    assert len({line[3] for line in lines(path)}) == 30
    assert most <= 4  # one may be leaving while the next one comes
    eventually(lambda: workers(one) == 0)


def test_on_demand_a_job_that_is_killed_among_short_ones_dies_alone(jobs, node, path):
    one = node("--pool", "ondemand", "--max", "1")
    jobs.app.enqueue_many([jobs.add.call(i) for i in range(20)]).wait(
        timeout=30
    )  # now they come in bunches
    group = jobs.app.enqueue_many(
        [jobs.wait_for.call(str(path)), *(jobs.add.call(i) for i in range(10))]
    )
    [(_, _, pid)] = started(path)
    assert group[0].kill()
    group.wait(timeout=20)

    assert [job.refresh().state for job in group] == ["cancelled"] + ["succeeded"] * 10
    assert [(a.cause, a.pid) for a in group[0].attempts] == [("killed", int(pid))]
    assert {len(job.attempts) for job in group} == {1}
    eventually(lambda: workers(one) == 0)


# slots for each queue


def test_a_queue_has_no_more_workers_at_a_time_than_its_slots(jobs, node, path):
    node("--max", "4", "-q", "slow:1,default:3")
    slow = [jobs.wait_for.using(queue="slow").enqueue(str(path)) for _ in range(3)]
    other = [jobs.wait_for.enqueue(str(path)) for _ in range(5)]
    running = {int(id) for id, *_ in started(path, 4)}

    assert len(running & {job.id for job in slow}) == 1
    assert len(running & {job.id for job in other}) == 3
    path.touch()
    assert [job.result(timeout=20) for job in (*slow, *other)] == ["opened"] * 8


# recycling


def test_a_worker_leaves_after_so_many_jobs(jobs, node):
    node("--max", "1", "--recycle-after", "5")
    group = jobs.app.enqueue_many([jobs.where.call() for _ in range(20)]).wait(timeout=20)

    pids = [job.result() for job in group]
    assert {pids.count(pid) for pid in pids} == {5}


def test_a_worker_that_has_grown_too_large_leaves(jobs, node, path):
    node("--max", "1", "--recycle-after", "200M")
    path.touch()
    before = jobs.where.enqueue().result(timeout=10)
    assert jobs.where.enqueue().result(timeout=10) == before
    jobs.eat_memory.enqueue(str(path), 300).result(timeout=10)

    assert jobs.where.enqueue().result(timeout=10) != before


# dedicated


def test_a_dedicated_job_has_its_own_process_outside_the_slots(jobs, node, path):
    one = node("--max", "1")
    long = [jobs.wait_for.using(dedicated=True).enqueue(str(path)) for _ in range(2)]
    pids = [pid for _, _, pid in started(path, 2)]

    assert jobs.add.enqueue(1).result(timeout=10) == 2  # the one slot is free
    assert str(jobs.where.enqueue().result(timeout=10)) not in pids
    path.touch()
    assert [job.result(timeout=10) for job in long] == ["opened"] * 2
    eventually(lambda: not set(map(int, pids)) & set(one.tree()))  # one job, and it leaves


def test_a_dedicated_job_starts_though_every_slot_is_taken_and_others_wait_before_it(
    jobs, node, path
):
    node("--max", "1")
    long = jobs.wait_for.enqueue(str(path))
    started(path)
    others = jobs.app.enqueue_many([jobs.add.call(i) for i in range(20)])
    apart = jobs.where.using(dedicated=True).enqueue()

    assert apart.result(timeout=5)
    assert {job.refresh().state for job in [long, *others]} <= {"running", "waiting"}
    path.touch()
    assert [job.result(timeout=10) for job in others] == list(range(1, 21))


def test_of_several_nodes_one_runs_a_dedicated_job(jobs, node, url, start_node, path):
    node("--max", "1")
    start_node("jobs:app", url, "--name", "two", "--max", "1")
    eventually(lambda: len(jobs.app.nodes()) == 2, within=60)
    long = [jobs.wait_for.using(dedicated=True).enqueue(str(path)) for _ in range(4)]
    started(path, 4)
    path.touch()

    assert [job.result(timeout=60) for job in long] == ["opened"] * 4
    assert sorted(int(job) for job, _, _ in lines(f"{path}.started")) == sorted(
        job.id for job in long
    )


def test_dedicated_jobs_beyond_their_cap_wait_and_block_no_other(jobs, node, path):
    node("--max", "1", "--max-dedicated", "1")
    first, second = (jobs.wait_for.using(dedicated=True).enqueue(str(path)) for _ in range(2))
    started(path)

    assert jobs.add.enqueue(1).result(timeout=10) == 2
    assert {first.refresh().state, second.refresh().state} <= {"running", "scheduled", "waiting"}
    assert len(lines(f"{path}.started")) == 1
    path.touch()
    assert [job.result(timeout=10) for job in (first, second)] == ["opened"] * 2
    assert (second.crashes, second.retries) == (0, 0)


# steering


def test_a_pool_is_made_larger_and_smaller_while_it_works(jobs, node, genba, path):
    one = node("--max", "1")
    group = jobs.app.enqueue_many([jobs.wait_for.call(str(path)) for _ in range(3)])
    started(path)
    assert genba("node", "set", "one", "--max", "3").returncode == 0

    started(path, 3)
    assert [n.slots for n in jobs.app.nodes()] == [3]
    assert (
        genba("node", "set", "one", "--max", "1", "--pool", "static", "--min", "1").returncode == 0
    )
    eventually(lambda: [n.slots for n in jobs.app.nodes()] == [1])
    assert {job.refresh().state for job in group} == {"running"}  # running jobs run on
    path.touch()
    group.wait(timeout=10)
    eventually(lambda: workers(one) == 1)
    assert jobs.add.enqueue(1).result(timeout=10) == 2


def test_sighup_reads_the_pool_from_the_project(jobs, node, tmp_path):
    one = node()
    (tmp_path / "pyproject.toml").write_text('[tool.genba.node]\npool = "static"\nmin = 3\n')
    one.signal(signal.SIGHUP)

    eventually(lambda: workers(one) == 3)
    (tmp_path / "pyproject.toml").write_text('[tool.genba.node]\npool = "odd"\n')
    one.signal(signal.SIGHUP)
    eventually(lambda: "stay as they are" in one.log)
    assert jobs.add.enqueue(1).result(timeout=10) == 2


def test_a_node_drains_at_once_on_command(jobs, node, genba, path):
    one = node("--max", "2")
    job = jobs.stop_when_asked.enqueue(str(path))
    started(path)
    before = time.monotonic()
    jobs.app.tell_node("one", "drain")
    eventually(lambda: lines(f"{path}.stopped"), every=0.002)

    assert time.monotonic() - before < PATIENCE * 0.5  # 0.2 s on a quiet machine
    assert one.wait() == 0
    assert job.refresh().state == "succeeded"
    assert jobs.app.nodes() == []
    refused = genba("node", "drain", "one")
    assert refused.returncode == 1
    assert "no living node is called 'one'" in refused.stderr


def test_a_node_that_is_stopped_gives_back_what_runs(jobs, node, genba, path):
    one = node("--grace", "60s")
    job = jobs.wait_for.enqueue(str(path))
    started(path)
    assert genba("node", "stop", "one").returncode == 0

    assert one.wait(within=10) == 0
    assert (job.refresh().state, job.crashes) == ("waiting", 0)


def test_a_node_that_drains_is_listed_as_such(jobs, node, genba, path):
    node("--grace", "60s")
    jobs.wait_for.enqueue(str(path))
    started(path)
    assert genba("node", "drain", "one").returncode == 0

    eventually(lambda: [n.state for n in jobs.app.nodes()] == ["draining"])


def test_a_wrong_change_is_refused_before_the_node_hears_of_it(genba, jobs, node):
    assert "nothing to change" in genba("node", "set", "one").stderr
    one = node("--min", "1", "--max", "2")

    for words, sentence in [
        (
            ("--min", "3"),
            "min must not be greater than max, got min=3 and max=2",
        ),  # its max is known from the node
        (("--min", "3", "--max", "2"), "min must not be greater than max, got min=3 and max=2"),
        (("--max", "0"), "min must be at least 0 and max at least 1, got min=1 and max=0"),
    ]:
        refused = genba("node", "set", "one", *words)
        assert (refused.returncode, refused.stderr) == (2, f"genba: {sentence}\n")
    with pytest.raises(BadOption, match="grace cannot be changed"):
        jobs.app.tell_node("one", "set", {"grace": 3})
    assert genba("node", "set", "one", "--min", "3", "--max", "4").returncode == 0
    eventually(lambda: workers(one) == 3)
    assert [n.slots for n in jobs.app.nodes()] == [4]
    assert genba("node", "set", "one", "--max", "2").returncode == 2  # it has reported the new size
    assert "stay as they are" not in one.log
