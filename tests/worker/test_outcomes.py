"""How a job can say itself how it ends."""

from __future__ import annotations

import json
import time

import pytest
from tests.support import ended, eventually, lines


def events(shop, job):
    with shop.app.store._db.statement() as tx:
        rows = tx.select(
            "SELECT kind, data FROM genba.event WHERE job_id = :id ORDER BY seq", id=job.id
        )
    return [(kind, json.loads(bytes(data)) if data else None) for kind, data in rows]


# requests


@pytest.mark.parametrize(
    ("wishes", "then", "state", "said"),
    [
        (["succeed:done"], "return", "succeeded", "done"),
        (["succeed"], "returned", "succeeded", "returned"),
        (["fail:bad luck"], "return", "failed", "bad luck"),
        (["hold:ask Ann"], "return", "held", "ask Ann"),
        (["fail:no", "succeed:yes"], "return", "succeeded", "yes"),
        (["succeed:yes", "fail:no"], "return", "failed", "no"),
        (["now"], "return", "succeeded", "attempt 2"),
        (["counted"], "return", "failed", "counted"),
        (["succeed:yes"], "raise", "failed", "ValueError: after all"),
        (["fail:bad luck"], "raise", "failed", "ValueError: after all"),
        (["hold:ask Ann"], "raise", "failed", "ValueError: after all"),
        (["retry:0"], "raise", "failed", "ValueError: after all"),
        (["counted"], "raise", "failed", "ValueError: after all"),
        (["retry:0"], "FailJob", "failed", "for good"),
        (["hold:ask Ann"], "RetryJob", "failed", "once more"),
    ],
)
def test_the_last_request_counts_when_the_job_ends(shop, wishes, then, state, said):
    """An exception is stronger than any of them."""
    job = ended(shop.jobs.ask_for.enqueue(*wishes, then=then))

    assert job.state == state
    if said != "counted":
        assert (job.result() if state == "succeeded" else job.reason) == said
    assert job.error is None or state != "succeeded"


@pytest.mark.parametrize("wishes", [["now"], ["retry:0", "apply"]])
def test_a_free_retry_takes_nothing_from_the_budget(shop, wishes):
    job = ended(shop.jobs.ask_for.using(retry=0).enqueue(*wishes))

    assert (job.state, job.result()) == ("succeeded", "attempt 2")
    assert (job.retries, job.crashes) == (0, 0)
    assert [attempt.cause for attempt in job.attempts] == ["returned", "returned"]


@pytest.mark.parametrize("wish", ["retry:0", "fail:bad luck", "hold:ask Ann"])
def test_an_exception_after_a_request_takes_from_the_budget(shop, wish):
    job = ended(shop.jobs.ask_for.using(retry={"times": 1, "delay": 0}).enqueue(wish, then="raise"))

    assert (job.state, job.retries) == ("succeeded", 1)
    assert [attempt.cause for attempt in job.attempts] == ["exception", "returned"]


def test_a_retry_that_is_not_free_takes_from_the_budget(shop):
    job = ended(shop.jobs.ask_for.using(retry=1).enqueue("counted"))

    assert (job.result(), job.retries) == ("attempt 2", 1)


def test_usecase_45_regression_15_a_job_may_ask_for_a_retry_as_often_as_it_likes_and_never_fails(
    shop, path
):
    """UseCase45: the same job, one attempt after the other."""
    job = shop.jobs.wait_for_retry.enqueue(str(path), 5)

    assert job.result(timeout=20) == 6
    assert lines(path) == [[str(job.id), str(n)] for n in range(1, 7)]
    assert (job.refresh().retries, len(job.attempts)) == (0, 6)


def test_a_retry_waits_until_the_moment_it_was_asked_for(shop):
    asked = time.time() + 1
    job = ended(shop.jobs.ask_for.enqueue("retry:1"))

    assert job.state == "succeeded"
    assert job.attempts[1].started.timestamp() >= asked - 0.05
    assert job.due.timestamp() == pytest.approx(asked, abs=0.5)


# explicit outcomes


@pytest.mark.parametrize(
    ("wish", "state", "said"),
    [
        (None, "held", "panic: it returned no outcome"),
        ("succeed", "succeeded", "as asked"),
        ("apply", "succeeded", "applied"),
        ("hold", "held", "by hand"),
    ],
)
def test_a_task_that_wants_it_explicit_is_held_when_nothing_was_said(shop, wish, state, said):
    job = ended(shop.jobs.be_explicit.enqueue(wish))

    assert job.state == state
    assert (job.result() if state == "succeeded" else job.reason) == said
    assert len(job.attempts) == 1


# apply


@pytest.mark.parametrize(
    ("wish", "state", "said"),
    [
        ("succeed:now", "succeeded", "now"),
        ("fail:bad luck", "failed", "bad luck"),
        ("hold:Ann", "held", "Ann"),
    ],
)
@pytest.mark.parametrize("then", ["return", "raise"])
def test_what_is_applied_stays_whatever_comes_after(shop, wish, state, said, then):
    job = ended(shop.jobs.ask_for.enqueue(wish, "apply", then=then))

    assert job.state == state
    assert (job.result() if state == "succeeded" else job.reason) == said
    if then == "raise":
        [late] = eventually(
            lambda: [data for kind, data in events(shop, job) if kind == "error_after_end"]
        )
        assert (late["attempt"], late["error"]["message"]) == (1, "after all")
    assert shop.jobs.add.enqueue(1).result(timeout=10) == 2
    assert ended(job).state == state
    assert [attempt.cause for attempt in job.attempts] == ["returned"]
    assert job.attempts[0].pid
    assert job.attempts[0].started


def test_an_applied_outcome_is_there_while_the_job_still_runs(shop, path):
    job = shop.jobs.apply_and_wait.enqueue(str(path))

    eventually(lambda: lines(f"{path}.started"), within=10)
    assert (job.refresh().state, job.result()) == ("succeeded", "applied")
    assert not job.cancel()
    path.touch()
    assert shop.jobs.add.enqueue(1).result(timeout=10) == 2
    assert job.refresh().result() == "applied"


def test_regression_16_a_second_apply_and_a_request_after_it_are_refused(shop):
    job = ended(shop.jobs.apply_twice.enqueue())

    assert job.result() == "first"
    logged = eventually(lambda: (job.attempts[0].log or "").splitlines())
    assert [line.split()[-1] for line in logged] == ["IllegalMove"] * 3


def test_the_children_of_a_job_that_ended_itself_start(shop, path):
    job = shop.jobs.apply_and_wait.enqueue(str(path))
    child = shop.jobs.sum_of_deps.using(after=[job], on_dependency_failure="run").enqueue()

    with pytest.raises(
        Exception, match="unsupported"
    ):  # it has a text as its result: the child ran, and said so
        child.result(timeout=10)


# ends of all kinds


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "SystemExit"),
        ("exit text", "SystemExit: a text"),
        ("interrupt", "KeyboardInterrupt"),
        ("recursion", "RecursionError"),
        ("memory", "MemoryError"),
        ("curse", "Curse: (str() of it raised"),
        ("caused by a curse", "ValueError: outer"),
        ("generator exit", "GeneratorExit"),
        ("group", "ExceptionGroup: many"),
        ("long", "ValueError: yyy"),
    ],
)
@pytest.mark.parametrize("task", ["end_badly", "end_badly_later"])
def test_whatever_is_raised_ends_the_job_and_only_it(shop, task, how, said):
    job = ended(getattr(shop.jobs, task).enqueue(how))

    assert job.state == "failed"
    assert job.reason.startswith(said)
    assert [attempt.cause for attempt in job.attempts] == ["exception"]
    assert job.attempts[0].error["type"] == said.partition(":")[0]
    assert shop.jobs.add.enqueue(1).result(timeout=10) == 2


@pytest.mark.parametrize("how", ["object", "huge"])
def test_a_result_that_cannot_be_kept_is_no_reason_to_fail(shop, how):
    job = ended(shop.jobs.end_badly.enqueue(how))

    assert (job.state, job.result()) == ("succeeded", None)
    assert "could not be kept" in job.reason


# retry by type


@pytest.mark.parametrize(
    ("how", "rule", "attempts"),
    [
        ("doom", {"on": [ValueError]}, 2),
        ("doom", {"on": ["Doom"]}, 2),
        ("doom", {"on": ["jobs.Doom"]}, 2),
        ("doom", {"on": ["other.Doom"]}, 1),
        ("doom", {"on": [OSError, "httpx.TimeoutException"]}, 1),
        ("doom", {"never": ["ValueError"]}, 1),
        ("doom", {"on": [Exception], "never": ["Doom"]}, 1),
        ("timeout", {"on": [OSError]}, 2),
        ("timeout", {"never": [ValueError]}, 2),
    ],
)
def test_a_rule_can_say_which_exceptions_are_worth_another_try(shop, how, rule, attempts):
    from genba import Retry

    job = ended(shop.jobs.end_badly.using(retry=Retry(1, delay=0, **rule)).enqueue(how))

    assert job.state == "failed"
    assert len(job.attempts) == attempts
    assert job.error["message"] in ("doomed", "too late")


def test_what_blocks_inside_a_job_has_an_async_twin(shop):
    before = shop.jobs.add.enqueue(1)
    job = shop.jobs.end_itself_later.using(after=[before], retry={"times": 1, "delay": 0}).enqueue(
        "w"
    )

    assert (ended(job).state, job.result()) == ("succeeded", ["w", 2])
    assert shop.app.job(key="copy of w").refresh().state == "scheduled"


@pytest.mark.parametrize("way", ["return", "raise", "sys.exit"])
@pytest.mark.parametrize("task", ["fork", "fork_later", "fork_in_company"])
def test_a_process_that_the_job_has_forked_cannot_end_the_job(shop, task, way):
    job = getattr(shop.jobs, task).enqueue(way)

    parent = job.result(timeout=30)

    [attempt] = job.refresh().attempts
    assert (attempt.cause, attempt.pid) == ("returned", parent)
    assert shop.jobs.add.enqueue(1).result(timeout=30) == 2
