"""A job is claimed by one node, and only the holder of the claim can write about it."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.storage.builders import (
    CLAIM,
    HOUR,
    TASK,
    a_job,
    after,
    claimed,
    ending,
    enqueued,
    joined,
    one,
    rows,
    running,
    settle,
    state,
    states,
    success,
)


@pytest.fixture(autouse=True)
def _node(store):
    joined(store)


def test_the_best_rank_is_claimed_first(store, clock):
    late = one(store)
    clock.advance("1h")
    high, low = one(store, priority=2), one(store)

    assert [job.id for job in claimed(store, 4)] == [high, late, low]


@pytest.mark.parametrize("limit", [1024, 2048])
def test_a_large_claim_takes_the_best_jobs_and_each_once(store, url, limit):
    low, high = enqueued(store, 800), enqueued(store, 400, priority=1)

    assert [job.id for job in claimed(store, limit)] == [*high, *low][:limit]
    assert len(rows(url, "SELECT id FROM genba.job WHERE state = 'running'")) == min(limit, 1200)


def test_one_priority_is_worth_an_hour_of_waiting(store, clock):
    old = one(store)
    clock.advance(3601)
    high = one(store, priority=1)

    assert [job.id for job in claimed(store, 2)] == [old, high]


def test_a_claim_brings_what_the_run_needs(store, clock):
    id = one(store, args=b'{"x": 1}', options='{"timeout": 5}', priority=3, expires_in=HOUR)

    (job,) = claimed(store)

    assert (job.id, job.attempt, job.task, job.args, job.options) == (
        id,
        1,
        TASK,
        b'{"x": 1}',
        '{"timeout": 5}',
    )
    assert (job.priority, job.claimed_at, job.expires_at) == (3, clock.now(), clock.now() + HOUR)
    record = store.job(id)
    assert (record.state, record.claim_id, record.node, record.attempt) == ("running", CLAIM, 1, 1)


def test_arguments_and_checkpoint_come_as_the_bytes_they_were(store, url):
    args = '{"text": "\\u0000 \\ud83d\\ude00 😀"}'.encode()
    id = one(store, args=args)
    rows(url, "UPDATE genba.job SET saved = args RETURNING id")

    (job,) = claimed(store)

    assert (job.id, job.args, job.saved) == (id, args, args)


def test_bytes_that_are_no_text_do_not_keep_the_others_from_being_claimed(store, url):
    """Written by another program than genba."""
    broken, sound = one(store, args=b"\xff\x00\xfe"), one(store)

    got = claimed(store, 2)

    assert [(job.id, job.args) for job in got] == [(broken, b"\xff\x00\xfe"), (sound, got[1].args)]
    assert states(store, [broken, sound]) == ["running", "running"]


def test_one_lost_claim_among_many_loses_only_itself(store):
    enqueued(store, 200)
    jobs = claimed(store, 128)
    store.finish(1, [success(jobs[70])])

    ours = store.finish(1, [success(job) for job in jobs])

    assert ours == {job.id for job in jobs} - {jobs[70].id}
    assert set(states(store, [job.id for job in jobs])) == {"succeeded"}


def test_a_claim_takes_no_more_than_was_wanted(store):
    enqueued(store, 9)

    assert len(claimed(store, 6)) <= 6
    assert claimed(store, 0) == []


def test_several_queues_are_claimed_at_once(store):
    ids = [*enqueued(store, 2, queue="a"), *enqueued(store, 2, queue="b")]

    got = store.claim(1, CLAIM, {"a": 2, "b": 1, "none": 4}, [TASK])

    assert [job.id for job in got] == ids[:3]


def test_a_node_that_does_not_know_a_task_does_not_claim_it(store):
    other, known = one(store, task="other"), one(store)

    assert [job.id for job in claimed(store, 2)] == [known]
    assert state(store, other) == "waiting"


def test_what_may_not_start_is_not_claimed(store):
    parent = one(store)
    held = one(store)
    store.hold(held, "why")
    enqueued(store, 1, delay=HOUR)
    store.enqueue([a_job(after=after(parent))])

    assert [job.id for job in claimed(store, 8)] == [parent]


def test_no_job_is_claimed_twice_by_eight_threads(store):
    ids = enqueued(store, 400)
    start = threading.Barrier(8)

    def take(claim: int) -> list[int]:
        start.wait()
        got: list[int] = []
        while batch := store.claim(1, claim, {"default": 8}, [TASK]):
            got += [job.id for job in batch]
        return got

    with ThreadPoolExecutor(8) as pool:
        taken = Counter(id for got in pool.map(take, range(1, 9)) for id in got)

    # A thread may find all that is left locked by others and end; it is theirs then.
    assert set(taken) == set(ids)
    assert set(taken.values()) == {1}


def test_finish_and_the_next_claim_share_a_commit(store):
    ids = enqueued(store, 3)
    first = claimed(store, 1)

    done, got = store.claims.finish_and_claim(1, 78, [success(first[0])], {"default": 2}, [TASK])

    assert done == {ids[0]}
    assert [job.id for job in got] == ids[1:]
    assert states(store, ids) == ["succeeded", "running", "running"]


def test_a_finished_job_has_its_result_and_its_history(store, clock):
    job = running(store)
    clock.advance(2)

    store.finish(1, [success(job, result=b'"done"', started=5, ended=9, pid=12, cpu=3, peak=99)])

    record = store.job(job.id)
    assert (record.state, record.result, record.finished_at) == (
        "succeeded",
        b'"done"',
        clock.now(),
    )
    assert (record.claim_id, record.node, record.attempt) == (None, None, 1)
    (attempt,) = store.attempts_of(job.id)
    assert (attempt.attempt, attempt.cause, attempt.node, attempt.claimed_at) == (
        1,
        "returned",
        1,
        job.claimed_at,
    )
    assert (attempt.started_at, attempt.ended_at, attempt.pid, attempt.cpu, attempt.peak) == (
        5,
        9,
        12,
        3,
        99,
    )


def test_a_result_need_not_be_there_nor_any_measure(store):
    enqueued(store, 2)
    jobs = claimed(store, 2)
    bare = [success(job, result=None, started=None, pid=None, cpu=None, peak=None) for job in jobs]

    assert store.finish(1, bare) == {job.id for job in jobs}


def test_an_attempt_that_ended_badly_has_its_history(store, clock):
    job = running(store)
    due = clock.now() + HOUR

    store.end(
        1,
        [
            ending(
                job,
                "scheduled",
                "exception",
                retries=1,
                wait=HOUR,
                reason="r",
                error="e",
                log="l",
                pid=3,
            )
        ],
    )

    record = store.job(job.id)
    assert (record.state, record.retries, record.due_at, record.rank) == ("scheduled", 1, due, due)
    assert (record.reason, record.error, record.claim_id, record.node) == ("r", "e", None, None)
    (attempt,) = store.attempts_of(job.id)
    assert (attempt.attempt, attempt.cause, attempt.error, attempt.log, attempt.pid) == (
        1,
        "exception",
        "e",
        "l",
        3,
    )


def test_a_retried_job_comes_back_at_its_moment(store, clock):
    job = running(store)
    store.end(1, [ending(job, "scheduled", due_at=clock.now() + HOUR)])

    assert store.promote() == 0
    assert store.due.next_due() == clock.now() + HOUR
    clock.advance("1h")
    assert store.promote() == 1
    (again,) = claimed(store)
    assert (again.id, again.attempt) == (job.id, 2)


def test_a_success_leaves_no_reason_or_error_of_the_tries_before(store):
    job = running(store)
    store.end(1, [ending(job, "waiting", reason="r", error="e")])
    (again,) = claimed(store)
    store.finish(1, [success(again)])

    assert (store.job(job.id).reason, store.job(job.id).error) == (None, None)
    assert store.attempts_of(job.id)[0].error == "e"


def test_the_lowest_priority_survives_a_crash(store, clock):
    job = running(store, priority=-(2**31))
    store.end(1, [ending(job, "scheduled", "signal 9", crashes=2, due_at=clock.now() + 1)])
    clock.advance(1)

    assert store.promote() == 1


def test_a_release_leaves_no_trace(store):
    job = running(store)

    store.end(1, [ending(job, "waiting", "drain", happened=False)])

    assert store.attempts_of(job.id) == []
    record = store.job(job.id)
    assert (record.state, record.attempt, record.claim_id, record.node) == (
        "waiting",
        0,
        None,
        None,
    )
    (again,) = claimed(store, claim=78)
    assert again.attempt == 1
    assert store.finish(1, [success(job)]) == set()


WRITES = {
    "finish": lambda store, job, fence: store.finish(1, [success(job, **fence)]),
    "end": lambda store, job, fence: store.end(1, [ending(job, **fence)]),
    "mark": lambda store, job, fence: store.mark_started(
        [(job.id, fence.get("attempt", 1), fence.get("claim", CLAIM), 5)]
    ),
    "progress": lambda store, job, fence: store.record_progress(
        [(job.id, fence.get("attempt", 1), fence.get("claim", CLAIM), '[1.0,2.0,""]')]
    ),
}


@pytest.mark.parametrize("fence", [{"attempt": 2}, {"claim": CLAIM + 1}], ids=["attempt", "claim"])
@pytest.mark.parametrize("write", WRITES)
def test_a_stale_fence_matches_nothing(store, write, fence):
    job = running(store)
    before = store.job(job.id)

    assert WRITES[write](store, job, fence) == set()
    assert store.job(job.id) == before
    assert store.attempts_of(job.id) == []
    assert WRITES[write](store, job, {}) == {job.id}


@pytest.mark.parametrize("write", WRITES)
def test_a_finished_attempt_cannot_be_written_again(store, write):
    job = running(store)
    store.finish(1, [success(job)])
    before = store.job(job.id)

    assert WRITES[write](store, job, {}) == set()
    assert store.job(job.id) == before
    assert len(store.attempts_of(job.id)) == 1


def test_a_batch_with_a_stale_and_a_live_attempt_writes_the_live_one_only(store):
    stale = running(store)
    store.end(1, [ending(stale, "waiting", "collateral")])
    (live,) = claimed(store, claim=78)

    assert store.finish(1, [success(stale), success(live, claim=78)]) == {live.id}
    assert [(a.attempt, a.cause) for a in store.attempts_of(live.id)] == [
        (1, "collateral"),
        (2, "returned"),
    ]


def test_a_batch_with_two_claims_of_one_attempt_is_no_error(store):
    stale = running(store)
    store.end(1, [ending(stale, "waiting", "drain", happened=False)])
    (live,) = claimed(store, claim=78)

    assert store.finish(1, [success(stale), success(live, claim=78)]) == {live.id}
    assert [a.attempt for a in store.attempts_of(live.id)] == [1]


def test_a_stale_end_beside_a_live_one_leaves_no_history(store):
    stale = running(store)
    store.end(1, [ending(stale, "waiting", "drain", happened=False)])
    first = claimed(store, claim=78)[0]
    store.end(1, [ending(first, "waiting", "collateral", claim=78)])
    (live,) = claimed(store, claim=79)

    ended = [ending(stale, "held", "stall", attempt=7), ending(live, "failed", claim=79)]

    assert store.end(1, ended) == {live.id}
    assert [(a.attempt, a.cause) for a in store.attempts_of(live.id)] == [
        (1, "collateral"),
        (2, "exception"),
    ]


def test_a_start_is_marked_once(store):
    job = running(store)

    assert store.mark_started([(job.id, 1, CLAIM, 5)]) == {job.id}
    assert store.mark_started([(job.id, 1, CLAIM, 6)]) == set()
    assert store.job(job.id).started_mark == 5


def test_a_return_after_a_cancel_does_not_succeed(store):
    job = running(store)

    assert store.cancel(job.id, "not needed")
    assert store.finish(1, [success(job)]) == set()
    assert state(store, job.id) == "running"
    assert store.attempts_of(job.id) == []

    assert store.end(1, [ending(job, "cancelled", "cancelled", reason="not needed")]) == {job.id}
    assert (store.job(job.id).state, store.job(job.id).reason) == ("cancelled", "not needed")


def test_a_kill_is_not_softened_by_a_later_cancel(store):
    job = running(store)

    store.cancel(job.id, None, "kill")
    store.cancel(job.id, None)

    assert store.job(job.id).cancel_requested == "kill"


@pytest.mark.parametrize(("how", "reason"), [("cancel", "cancelled"), ("kill", "killed")])
def test_a_job_that_is_stopped_without_a_word_says_how(store, how, reason):
    job = running(store)
    waiting, held = enqueued(store, 2)
    store.hold(held, "why")

    for id in (job.id, waiting, held):
        store.cancel(id, None, how)
    store.end(1, [ending(job, "waiting", "drain")])

    records = [store.job(id) for id in (job.id, waiting, held)]
    assert [(record.state, record.reason) for record in records] == [("cancelled", reason)] * 3


@pytest.mark.parametrize("back", ["waiting", "scheduled", "held"])
def test_a_job_that_was_asked_to_stop_does_not_come_back(store, url, back):
    """The request and the end of the attempt cross on their way."""
    job = running(store, identity="i")
    store.cancel(job.id, "not needed")

    assert store.end(1, [ending(job, back, "exception", reason="boom")]) == {job.id}

    record = store.job(job.id)
    assert (record.state, record.reason) == ("cancelled", "not needed")
    assert record.finished_at is not None
    assert store.enqueue([a_job(identity="i")])[0].created
    assert [
        row[0]
        for row in rows(url, f"SELECT kind FROM genba.event WHERE job_id = {job.id} ORDER BY seq")
    ][-1] == ("cancelled")


def test_a_failure_after_a_cancel_is_a_failure(store):
    job = running(store)
    store.cancel(job.id, "not needed")

    store.end(1, [ending(job, "failed", reason="boom")])

    assert (store.job(job.id).state, store.job(job.id).reason) == ("failed", "boom")


def test_a_final_job_is_not_cancelled(store):
    job = running(store)
    store.finish(1, [success(job)])

    assert not store.cancel(job.id, None)
    assert not store.cancel(999_999, None)


def test_what_waits_is_held_resumed_and_cancelled(store, clock):
    id, later = one(store), one(store, delay=HOUR)

    assert store.hold(id, "look at it")
    assert store.hold(later, "look at it")
    assert (store.job(id).state, store.job(id).reason) == ("held", "look at it")
    assert claimed(store, 2) == []
    assert store.resume(id)
    assert store.resume(later)
    assert states(store, [id, later]) == ["waiting", "scheduled"]
    assert not store.resume(id)
    assert store.cancel(id, None)
    assert not store.hold(id, "too late")


def test_a_requeued_job_starts_anew_and_keeps_its_history(store, clock):
    job = running(store)
    store.end(1, [ending(job, "failed", retries=3, crashes=1, error="e", reason="r")])
    clock.advance(5)

    assert store.requeue(job.id)

    record = store.job(job.id)
    assert (record.state, record.retries, record.crashes, record.error, record.reason) == (
        "waiting",
        0,
        0,
        None,
        None,
    )
    assert record.finished_at is None
    (again,) = claimed(store)
    store.finish(1, [success(again)])
    assert [a.attempt for a in store.attempts_of(job.id)] == [1, 2]
    assert not store.requeue(999_999)


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_success_that_is_requeued_keeps_its_record_whatever_comes_then(store, clock, how):
    job = running(store)
    store.finish(1, [success(job, started=5, ended=9, pid=12, cpu=3, peak=99)])
    (first,) = store.attempts_of(job.id)

    for last in ("succeeded", "failed", "succeeded"):
        assert store.requeue(job.id) if how == "one" else store.bulk.requeue([job.id])
        assert store.attempts_of(job.id)[0] == first
        (again,) = claimed(store)
        assert store.verify().faults == []
        if last == "failed":
            store.end(1, [ending(again, last, cause="exception")])
        else:
            store.finish(1, [success(again)])

    causes = [(one.attempt, one.cause) for one in store.attempts_of(job.id)]
    assert causes == [(1, "returned"), (2, "returned"), (3, "exception"), (4, "returned")]
    assert store.attempts_of(job.id)[0] == first
    assert store.verify().faults == []


def test_an_expired_job_is_cancelled(store, clock):
    ids = [one(store, expires_in=HOUR), one(store, expires_at=clock.now() + HOUR), one(store)]
    clock.advance(HOUR // 1_000_000)

    assert store.expire() == 2
    assert states(store, ids) == ["cancelled", "cancelled", "waiting"]
    assert store.job(ids[0]).reason == "expired"


def test_unknown_tasks_are_put_aside_and_come_back(store):
    strange = enqueued(store, 3, task="strange")
    known = one(store)

    assert store.parked.park_unknown("default", [TASK]) == 3
    assert store.parked.reasons_among(["unknown task strange", "unknown task other"]) == {
        "unknown task strange"
    }
    assert [job.id for job in claimed(store, 8)] == [known]
    assert store.parked.unpark(["unknown task strange"]) == 3
    assert [job.id for job in store.claim(1, CLAIM, {"default": 8}, ["strange"])] == strange


def test_old_jobs_are_pruned_with_their_history(store, url, clock):
    old = running(store, tags=("x",))
    store.finish(1, [success(old)])
    clock.advance("1h")
    young = running(store)
    store.finish(1, [success(young)])
    waiting = one(store)

    assert store.prune(clock.now()) == 1
    assert store.job(old.id) is None
    assert store.attempts_of(old.id) == []
    assert rows(url, "SELECT count(*) FROM genba.tag")[0][0] == 0
    assert store.states([young.id, waiting]) == {young.id: "succeeded", waiting: "waiting"}


def test_regression_03_jobs_that_wait_longer_than_any_watchdog_are_not_failed(store, clock):
    ids = enqueued(store, 100)

    for _ in range(6):
        clock.advance("1h")
        assert (store.promote(), store.expire()) == (0, 0)
        settle(store)

    assert set(states(store, ids)) == {"waiting"}


def test_a_release_that_is_sent_again_does_not_end_the_next_claim(store, url):
    id = one(store)
    (job,) = claimed(store)
    back = ending(job, "waiting", "drain", happened=False)
    store.end(1, [back])
    (again,) = store.claim(1, CLAIM + 1, {"default": 1}, [TASK])
    assert again.attempt == job.attempt

    returned = ending(again, "succeeded", "returned", claim=CLAIM + 1, started=10, ended=20)
    store.end(1, [back, returned, returned])  # the answer to the first was lost

    assert rows(url, "SELECT job_id FROM genba.event WHERE kind = 'succeeded'") == [(id,)]
    assert [one.cause for one in store.attempts_of(id)] == ["returned"]
    assert state(store, id) == "succeeded"
