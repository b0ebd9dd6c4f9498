"""What a job prints, logs and tells of its progress."""

from __future__ import annotations

import time

import psutil
import pytest
from tests.support import ended, eventually, lines

# logs


def test_what_a_job_prints_and_logs_is_kept_with_its_attempt(shop):
    job = ended(shop.jobs.talk.enqueue())

    assert job.state == "succeeded"
    log = job.attempts[-1].log
    assert [line.split("from ")[-1] for line in log.splitlines()[:5]] == [
        "stdout",
        "stderr",
        "logging",
        "log",
        "bytes",
    ]
    assert log.splitlines()[5].startswith("the end")
    assert "from stdout" not in shop.node.log


def test_of_a_long_log_the_beginning_and_the_end_are_kept(shop):
    job = ended(shop.jobs.talk.enqueue(3_000_000))

    log = job.attempts[-1].log
    assert job.state == "succeeded"
    assert 60_000 < len(log) < 70_000
    assert log.startswith("from stdout\n")
    assert log.rstrip().splitlines()[-1].startswith("the end")
    assert "left out]" in log


def test_a_job_that_prints_a_gigabyte_harms_no_other(shop):
    began = time.monotonic()
    before = len(shop.node.log)
    job = ended(shop.jobs.talk.enqueue(1_000_000_000))

    print(f"a gigabyte in {time.monotonic() - began:.1f} s")
    assert job.state == "succeeded"
    assert len(job.attempts[-1].log) < 70_000
    assert len(shop.node.log) - before < 1000
    assert psutil.Process(shop.node.pid).memory_info().rss < 300 << 20


@pytest.mark.parametrize("size", [10, 100_000_000])
def test_what_other_processes_of_the_job_print_is_kept_too(shop, size):
    job = ended(shop.jobs.let_others_talk.enqueue(size))

    log = job.attempts[-1].log
    assert job.state == "succeeded"
    assert log.startswith("from python\n[genba: from other processes]\nfrom a child\n")
    assert log.endswith("from a descriptor\n")
    assert len(log) < 20_000
    assert not [text for text in ("from a child", "xxx") if text in shop.node.log]
    assert shop.jobs.add.enqueue(1).wait(timeout=10).attempts[-1].log is None


def test_what_other_processes_have_printed_is_kept_when_the_worker_dies(shop):
    job = shop.jobs.let_others_talk.enqueue(10, die=True)

    attempt = eventually(lambda: job.attempts, within=10)[0]
    job.cancel()
    assert attempt.cause == "signal 9"
    assert attempt.log.splitlines() == [
        "from python",
        "[genba: from other processes]",
        "from a child",
        "xxxxxxxxxx",
        "from a descriptor",
    ]


def test_a_job_that_says_nothing_has_no_log(shop):
    jobs = [ended(job) for job in (shop.jobs.talk.enqueue(), shop.jobs.add.enqueue(1))]

    assert jobs[1].attempts[-1].log is None


@pytest.mark.parametrize(
    ("how", "cause"), [("kill", "signal 9"), ("raise", "exception"), ("hang", "timeout")]
)
def test_the_last_words_of_an_attempt_that_ended_badly_are_kept(shop, how, cause):
    job = shop.jobs.talk_and_die.using(timeout=1, grace=0).enqueue(how)

    attempt = eventually(lambda: job.attempts, within=10)[0]
    job.cancel()
    assert (attempt.cause, attempt.log) == (cause, "last words\n")


def test_the_log_goes_on_after_an_outcome_was_applied(shop):
    job = ended(shop.jobs.talk_and_die.enqueue("apply"))

    eventually(lambda: job.attempts[0].log == "last words\nand more\n")


# progress


@pytest.mark.soak  # a figure for the docs: of the time it promises nothing, so it is no part of the suite
def test_what_a_million_calls_of_progress_cost_is_printed(shop):
    n = 1_000_000
    job = shop.jobs.measure_progress.enqueue(n)
    plain, noted = job.result(timeout=300)

    assert (job.refresh().progress.done, job.progress.note) == (n - 1, "tile 17")
    print(f"progress(): {plain / n * 1e6:.2f} µs, with a note {noted / n * 1e6:.2f} µs")


@pytest.mark.parametrize(("how", "percent"), [("return", 100), ("raise", 50), ("apply", 50)])
def test_the_last_progress_is_stored_however_short_the_job(shop, how, percent):
    job = ended(shop.jobs.say_progress.enqueue(100, "half", how))

    assert (job.progress, job.progress.done, job.progress.note) == (percent, 100, "half")


def test_the_last_progress_of_a_job_that_died_is_stored(shop):
    job = shop.jobs.say_progress.enqueue(100, "half", "kill")

    eventually(lambda: job.attempts, within=10)
    assert (job.refresh().progress.done, job.progress.note) == (100, "half")
    job.cancel()


def test_the_progress_of_many_short_jobs_is_stored_of_each(shop):
    group = [shop.jobs.say_progress.enqueue(i, f"at {i}") for i in range(50)]

    assert [(ended(job).progress.done, job.progress.note) for job in group] == [
        (i, f"at {i}") for i in range(50)
    ]


def test_regression_23_progress_of_a_failed_job_is_never_complete_and_a_heartbeat_leaves_it(shop):
    job = ended(shop.jobs.say_progress.enqueue(200, "all", "raise"))

    assert job.progress < 100
    assert job.progress.done == 200


def test_progress_is_written_while_the_job_runs_twice_a_second_at_most(shop, path):
    job = shop.jobs.count_on.enqueue(str(path))
    seen: set[float] = set()
    began = time.monotonic()
    while len(seen - {0}) < 4 and time.monotonic() - began < 30:
        seen.add(job.refresh().progress.done)
        time.sleep(0.02)
    took = time.monotonic() - began
    path.touch()

    assert len(seen - {0}) >= 4
    assert took > 1.4  # four steps half a second apart
    assert ended(job).progress == 100


def test_the_running_event_comes_before_the_progress_events(shop, path):
    job = shop.jobs.count_on.enqueue(str(path))
    eventually(lambda: job.refresh().progress.done, within=30)
    path.touch()
    ended(job)

    kinds = [event.kind for event in shop.app.events(job=job)]
    assert kinds[:3] == ["waiting", "running", "progress"]
    assert kinds.count("running") == 1


def test_a_task_can_have_its_progress_written_less_often(shop, path):
    job = shop.jobs.rarely.enqueue(str(path))
    eventually(lambda: lines(f"{path}.started"), within=10)
    seen = set()
    began = time.monotonic()
    while time.monotonic() - began < 3:
        seen.add(job.refresh().progress.done)
        time.sleep(0.02)
    path.touch()

    assert len(seen - {0}) <= 1 + (time.monotonic() - began) / 2
