"""Effects in the job's own transaction: one commit for the user's writes, new jobs, and the end of the job."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import psycopg
import pytest
from tests.support import ended, eventually, lines


@pytest.fixture
def ledger(shop):
    """What the jobs have booked, as a function."""
    conn = shop.jobs._connect()
    conn.execute("CREATE TABLE IF NOT EXISTS ledger (word TEXT UNIQUE)")
    conn.execute("DELETE FROM ledger")
    yield lambda: sorted(row[0] for row in conn.execute("SELECT word FROM ledger").fetchall())
    conn.close()


def children(shop, job):
    return shop.app.jobs(state="any", key=f"child of {job.id}")


def kinds(shop, job):
    return [event.kind for event in shop.app.events(job=job)]


def test_the_effect_the_new_job_and_the_end_are_one_commit(shop, ledger):
    job = ended(shop.jobs.pay.enqueue("one"))

    assert (job.state, job.result()) == ("succeeded", "paid one")
    assert ledger() == ["one"]
    [child] = children(shop, job)
    assert child.result(timeout=10) == 2
    assert [(a.cause, a.number) for a in job.attempts] == [("returned", 1)]
    assert job.attempts[0].pid
    assert job.attempts[0].started <= job.attempts[0].ended
    assert kinds(shop, job).count("succeeded") == 1


def test_an_exception_inside_undoes_all_of_it(shop, ledger):
    job = ended(shop.jobs.pay.enqueue("one", "raise inside"))

    assert (job.state, job.error["type"]) == ("failed", "ValueError")
    assert ledger() == []
    assert children(shop, job) == []
    assert job.attempts[0].cause == "exception"


@pytest.mark.parametrize(
    ("how", "state", "booked"), [("return", "succeeded", ["one"]), ("raise inside", "failed", [])]
)
def test_an_async_job_has_it_by_async_with(shop, ledger, how, state, booked):
    job = ended(shop.jobs.pay_later.enqueue("one", how))

    assert (job.state, ledger()) == (state, booked)
    assert state == "failed" or job.result() == "paid one"


def test_an_exception_after_it_changes_nothing_but_is_logged(shop, ledger):
    job = ended(shop.jobs.pay.enqueue("one", "raise after"))

    assert (job.state, job.result()) == ("succeeded", "paid one")
    eventually(lambda: "error_after_end" in kinds(shop, job))
    assert ended(job).state == "succeeded"
    assert ledger() == ["one"]
    assert len(job.attempts) == 1


@pytest.mark.parametrize(("how", "attempts"), [("die before", 2), ("die after", 1)])
def test_a_death_before_or_after_the_commit_leaves_exactly_one_effect(shop, ledger, how, attempts):
    job = ended(shop.jobs.pay.enqueue("one", how))

    assert job.state == "succeeded"
    assert ledger() == ["one"]
    assert shop.jobs.add.enqueue(1).result(timeout=10) == 2
    assert ended(job).state == "succeeded"
    assert [a.cause for a in job.attempts] == ["signal 9"] * (attempts - 1) + ["returned"]
    assert job.crashes == attempts - 1


def test_kills_at_random_moments_leave_exactly_one_effect_of_each_job(shop, ledger):
    seed = random.randrange(10_000)
    print("seed", seed)
    dice = random.Random(seed)
    group = [shop.jobs.pay.using(tags=["killed"]).enqueue(f"w{i}", "slowly") for i in range(120)]
    with shop.app.store._db.statement() as tx:
        before = tx.now()
    kills = 0
    while shop.app.count(state=["waiting", "running", "scheduled"], tag="killed"):
        workers = _workers(shop.node.pid)
        if workers and kills < 25:
            os.kill(dice.choice(workers), signal.SIGKILL)
            kills += 1
        time.sleep(dice.uniform(0.01, 0.06))
        with shop.app.store._db.statement() as tx:
            assert tx.now() - before < 60_000_000

    held = [job for job in group if job.refresh().state == "held"]  # killed three times: at its cap
    done = [job for job in group if job.state == "succeeded"]
    assert len(held) + len(done) == 120
    assert Counter(ledger()) == Counter(f"w{group.index(job)}" for job in done)
    assert all(len(children(shop, job)) == 1 for job in done[:10])
    assert kills >= 5


def _workers(node: int) -> list[int]:
    import psutil

    found = []
    for process in psutil.Process(node).children(recursive=True):
        try:
            if "/worker[" in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_transaction_that_is_left_open_is_rolled_back_and_the_job_held(shop, ledger):
    job = ended(shop.jobs.leave_open.enqueue("one"))

    assert job.state == "held"
    assert "left open" in job.reason
    assert ledger() == []
    assert shop.jobs.pay.enqueue("two").result(timeout=10) == "paid two"


def test_a_job_whose_attempt_is_over_cannot_open_it(shop, ledger, path):
    """It was taken from a node that seemed dead; what it does comes too late."""
    job = shop.jobs.pay_when.enqueue("one", str(path))
    eventually(lambda: lines(f"{path}.started"), within=10)
    _take_away(shop, job)
    path.touch()

    assert eventually(lambda: lines(f"{path}.error"), within=10) == [["LeaseLost"]]
    assert ledger() == []


def _take_away(shop, job):
    conn = shop.jobs._connect()
    table = "genba_job" if shop.url.startswith("sqlite:") else "genba.job"
    conn.execute(f"UPDATE {table} SET claim_id = 1 WHERE id = {job.id}")
    conn.close()


def test_a_job_that_was_asked_to_stop_does_not_open_it(shop, ledger, path):
    job = shop.jobs.pay_when.using(grace="20s").enqueue("one", str(path))
    eventually(lambda: lines(f"{path}.started"), within=10)
    conn = shop.jobs._connect()
    table = "genba_job" if shop.url.startswith("sqlite:") else "genba.job"
    conn.execute(
        f"UPDATE {table} SET cancel_requested = 'cancel', reason = 'enough' WHERE id = {job.id}"
    )
    conn.close()
    path.touch()

    assert (ended(job).state, job.reason) == ("cancelled", "enough")
    assert ledger() == []


def test_while_it_is_open_other_jobs_of_the_node_go_on(shop, ledger, path):
    """On PostgreSQL: the node must not wait for the row that the job has locked."""
    if shop.url.startswith("sqlite:"):
        pytest.skip("on SQLite nothing else can write meanwhile, hence the limit of 5 s")
    job = shop.jobs.pay.enqueue("one", "wait inside", str(path))
    eventually(lambda: lines(f"{path}.started"), within=10)
    time.sleep(1.5)  # the node wants to mark its start now

    assert shop.jobs.add.enqueue(1).result(timeout=8) == 2  # a lock is waited for 10 s
    path.touch()
    assert job.result(timeout=10) == "paid one"


def test_a_job_is_cancelled_at_once_while_its_transaction_is_open(shop, ledger, path):
    """Its row is locked, and the cancel does not wait for that."""
    if shop.url.startswith("sqlite:"):
        pytest.skip("on SQLite nothing else can write meanwhile, hence the limit of 5 s")
    job = shop.jobs.pay.using(grace="20s").enqueue("one", "wait inside", str(path))
    eventually(lambda: lines(f"{path}.started"), within=10)

    began = time.monotonic()
    assert job.cancel("enough")
    assert time.monotonic() - began < 8  # a lock is waited for 10 s
    assert (ended(job).state, job.reason, job.attempts[-1].cause) == (
        "cancelled",
        "enough",
        "cancelled",
    )
    assert ledger() == []
    assert not job.cancel()


@pytest.mark.parametrize("grace", [0, 25])
def test_a_job_that_is_stopped_in_the_middle_of_a_statement_lets_go_of_everything(
    shop, ledger, grace
):
    """Its node must be able to write how it ended."""
    job = shop.jobs.ask_long.using(timeout=0.5, grace=grace).enqueue("one")
    began = time.monotonic()

    assert ended(job).state == "timed_out"
    assert time.monotonic() - began < 20  # its statement takes 30 s
    assert ledger() == []
    assert shop.jobs.pay.enqueue("two").result(timeout=10) == "paid two"


def test_on_sqlite_it_is_ended_after_five_seconds(shop, ledger):
    if not shop.url.startswith("sqlite:"):
        pytest.skip("PostgreSQL has other writers, and deadlines of its own")
    job = shop.jobs.take_too_long.enqueue("slow", 12)
    time.sleep(1)
    began = time.monotonic()
    other = shop.jobs.add.enqueue(1)  # waits for its turn

    assert time.monotonic() - began < 9
    assert other.result(timeout=10) == 2
    assert (ended(job).state, job.error["type"]) == ("failed", "StoreError")
    assert "more than 5 s" in job.reason
    assert ledger() == []


def test_usecase_51_three_producers(shop, ledger):
    for case in ("commit", "rollback", "complete"):
        job = ended(shop.jobs.produce.enqueue(case))
        assert job.state == "succeeded"
        wanted = {"rollback": ("ConstraintError", "UniqueViolation")}.get(case)
        assert wanted is None or job.attempts[0].log.split()[-1] in wanted

    consumers = shop.app.jobs(state="any", task="jobs.consume")
    assert sorted(consumer.result(timeout=10) for consumer in consumers) == ["commit", "complete"]
    assert ledger() == ["commit", "complete"]
    for consumer in consumers:
        assert kinds(shop, consumer) == ["waiting", "running", "succeeded"]


def test_the_connection_is_a_plain_one(shop):
    if shop.url.startswith("sqlite:"):
        pytest.skip("SQLite has no settings of a session")
    settings = shop.jobs.look_at_settings.enqueue().result(timeout=10)

    with psycopg.connect(shop.url) as conn:
        row = conn.execute("SHOW enable_seqscan").fetchone()
    assert row is not None
    assert settings == row[0]
