"""What an attempt saves, the next one finds."""

from __future__ import annotations

from tests.support import eventually, lines


def test_the_next_attempt_goes_on_where_the_last_one_was_also_after_a_crash(shop, path):
    job = shop.jobs.walk.using(retry={"times": 5, "delay": 0}).enqueue(str(path), 4)

    assert job.result(timeout=20) == [0, 1, 2, 3]
    assert lines(path) == [["0", "1"], ["1", "2"], ["2", "3"], ["3", "3"]]
    assert [attempt.cause for attempt in job.refresh().attempts] == [
        "signal 9",
        "exception",
        "returned",
    ]


def test_what_would_not_come_back_as_it_is_cannot_be_saved(shop):
    errors = shop.jobs.save_badly.enqueue().result(timeout=10)

    assert errors == "BadArguments BadArguments BadArguments PayloadTooLarge BadArguments"


def test_an_attempt_that_is_over_cannot_save(shop, path):
    job = shop.jobs.save_late.enqueue(str(path))
    eventually(lambda: lines(f"{path}.started"), within=10)
    conn = shop.jobs._connect()
    table = "genba_job" if shop.url.startswith("sqlite:") else "genba.job"
    conn.execute(f"UPDATE {table} SET claim_id = 1 WHERE id = {job.id}")
    conn.close()
    path.touch()

    assert eventually(lambda: lines(f"{path}.error"), within=10) == [["LeaseLost"]]


def test_a_job_that_was_done_starts_anew_when_it_is_requeued(shop, path):
    job = shop.jobs.walk.using(retry={"times": 5, "delay": 0}).enqueue(str(path), 2)
    job.result(timeout=20)

    assert job.requeue()
    assert job.wait(timeout=20).result() == [0, 1]
    assert len(lines(path)) == 4
