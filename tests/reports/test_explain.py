"""An explanation is true: without its first reason, the job starts or the explanation changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.storage.builders import (
    CLAIM,
    HOUR,
    SECOND,
    TASK,
    a_job,
    a_node,
    after,
    claimed,
    ending,
    finish,
    joined,
    one,
    success,
)

from genba.domain.duration import to_datetime
from genba.domain.limits import LimitRule, needs_of
from genba.reports.explain import Explanation, explain
from genba.storage.clients.locks import LockOwner, LockTaken
from genba.storage.jobs.conditions import ConditionAnswer, check_key

READY = ("shop.open",)
OPTIONS = '{"ready":["shop.open"]}'


def explanation_of(store: Any, id: int) -> Explanation:
    return explain(store, store.job(id))


class Situation:
    """A job with obstacles that can be removed one by one; the test does the node's maintenance."""

    def __init__(self, store: Any, clock: Any, kinds: set[str]) -> None:
        self.store, self.clock, self.left = store, clock, set(kinds)
        self.store.install()
        self.nodes = 0
        self.parent = one(store, delay=9 * HOUR) if "blocked" in kinds else None
        self.ready = "condition" in kinds
        rules = tuple(rule for kind, rule in RULES.items() if kind in kinds)
        if "bucket_full" in kinds:
            self.holder = one(store, queue="afar", needs=needs_of([GPU], {}), rules=(GPU,))
        if "rate" in kinds:
            self.use_up()
        self.id = store.enqueue(
            [
                a_job(
                    args=b'{"mine":1}',
                    after=after(self.parent, wants="finished") if self.parent else (),
                    delay=HOUR if "scheduled" in kinds else 0,
                    ready=READY if self.ready else (),
                    options=OPTIONS if self.ready else None,
                    needs=needs_of(rules, {}),
                    rules=rules,
                )
            ]
        )[0].id
        if "no_slot" in kinds:
            one(store, priority=5)
        if "no_node" not in kinds:
            self.join()
        if "queue_paused" in kinds:
            store.operators.pause("default", None, "me", None)
        if "task_disabled" in kinds:
            self.switch(False)
        if "held" in kinds:
            store.hold(self.id, "the moon is full")
        self.maintain()

    def join(self) -> None:
        self.nodes += 1
        if self.nodes > 1:
            self.store.nodes.leave(self.nodes - 1)
        tasks = () if "unknown_task" in self.left else ({"name": TASK},)
        queues = ("other",) if "unserved_queue" in self.left else ("default",)
        self.store.nodes.join(a_node(self.nodes, tasks=tasks, queues=queues))

    def use_up(self) -> None:
        """Use up the rate with a job that has ended."""
        node = joined(self.store, 1000)
        one(self.store, needs=needs_of([PARTNER], {}), rules=(PARTNER,))
        (job,) = claimed(self.store, node=node)
        self.store.finish(node, [success(job)])
        self.store.nodes.leave(node)

    def switch(self, enabled: bool) -> None:
        self.store.operators.switch(TASK, enabled, "me", None, {"name": TASK})

    def maintain(self) -> None:
        """Do the maintenance of a node."""
        self.store.promote()
        self.store.limits.serve_due_rates()
        self.store.limits.recheck()
        if self.nodes:
            self.store.parked.park_unknown("default", self.store.nodes.known_tasks())
            if "unknown_task" not in self.left:
                self.store.parked.unpark([f"unknown task {TASK}"])
        self.store.operators.keep_parked()

    def remove(self, kind: str) -> None:
        self.left.discard(kind)
        getattr(self, f"_{kind}")()
        self.maintain()

    def _held(self) -> None:
        self.store.resume(self.id)

    def _blocked(self) -> None:
        self.store.cancel(self.parent, None)

    def _scheduled(self) -> None:
        self.clock.advance("1h")

    _rate = _scheduled

    def _no_node(self) -> None:
        self.join()

    _unknown_task = _unserved_queue = _no_node

    def _queue_paused(self) -> None:
        self.store.operators.resume("default", "me")

    def _task_disabled(self) -> None:
        self.switch(True)

    def _bucket_full(self) -> None:
        self.store.cancel(self.holder, None)

    def _condition(self) -> None:
        self.store.conditions.open(check_key(TASK, READY, b'{"mine":1}', OPTIONS))

    def _no_slot(self) -> None:
        job = self.claim()
        if job.id != self.id:
            self.store.finish(self.nodes, [success(job)])

    def claim(self) -> Any:
        (job,) = claimed(self.store, node=self.nodes)
        return job


GPU, PARTNER = LimitRule("gpu", 1), LimitRule("partner", 1, False, HOUR, 1)
RULES = {"bucket_full": GPU, "rate": PARTNER}
KINDS = (
    *(
        "held",
        "blocked",
        "scheduled",
        "queue_paused",
        "no_node",
        "unknown_task",
        "unserved_queue",
        "condition",
    ),
    *("task_disabled", "bucket_full", "rate", "no_slot"),
)


def possible(kinds: set[str]) -> set[str]:
    """Leave out kinds that exclude each other."""
    if "no_node" in kinds:
        kinds = kinds - {"unknown_task", "unserved_queue"}
    if kinds & {"blocked", "scheduled", "bucket_full", "rate"}:
        kinds = kinds - {"condition"}  # checked only when the job is claimed
    return kinds


def check(store: Any, clock: Any, kinds: set[str]) -> Situation:
    situation = Situation(store, clock, kinds)
    for _ in range(len(KINDS) + 1):
        explanation = explanation_of(store, situation.id)
        first = explanation.reasons[0].kind
        if store.job(situation.id).state == "running":
            break
        assert first in {*situation.left, "no_slot"}, (kinds, str(explanation))
        situation.remove(first)
        assert explanation_of(store, situation.id).reasons != explanation.reasons, (
            kinds,
            str(explanation),
        )
    assert store.job(situation.id).state == "running", (
        kinds,
        str(explanation_of(store, situation.id)),
    )
    return situation


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.soak) for n in range(20, 400))]
)
def test_the_first_reason_is_true_and_without_it_there_is_another_or_the_job_starts(
    store, clock, seed
):
    chance = random.Random(seed)
    check(store, clock, possible({kind for kind in KINDS if chance.random() < 0.5}))


@pytest.mark.parametrize("kind", KINDS)
def test_what_alone_is_in_the_way_is_named(store, clock, kind):
    situation = Situation(store, clock, {kind})
    assert explanation_of(store, situation.id).reasons[0].kind == kind


def test_a_job_that_runs_and_waits_for_a_lock_names_the_holder_until_it_gets_the_lock(store, clock):
    situation = check(store, clock, {"no_slot"})
    job = store.job(situation.id)
    holder, waiter = (
        LockOwner(id, attempt, claim, None, 20)
        for id, attempt, claim in (fence_of(store), (job.id, job.attempt, CLAIM))
    )
    has = store.locks.take(holder, "door", 1, 0, 5)
    line = store.locks.take(waiter, "door", 1, 0, 6)

    reasons = explanation_of(store, job.id).reasons
    assert [reason.kind for reason in reasons] == ["running", "lock"]
    assert f"it waits for lock 'door' since 00:00:00 UTC, held by job {holder.job_id}" in str(
        reasons[1]
    )

    store.locks.release("door", has.token)
    assert isinstance(store.locks.take(waiter, "door", 1, line.seq, 6), LockTaken)
    assert [reason.kind for reason in explanation_of(store, job.id).reasons] == ["running"]


def test_a_job_that_got_the_slot_of_a_rate_but_has_not_started_is_named(store, clock):
    first, second = (
        one(store, queue=queue, needs=needs_of([PARTNER], {}), rules=(PARTNER,))
        for queue in ("afar", "default")
    )
    joined(store)
    assert 'the rate of bucket "partner" is used up until 01:00:00 UTC, 1st in line' in str(
        explanation_of(store, second)
    )
    clock.advance("2h")
    store.limits.serve_due_rates()

    explanation = explanation_of(store, second)

    assert (
        f'bucket "partner" has given its slot to job {first}, which has not started, 1st in line'
        in str(explanation)
    )
    assert explanation.reasons[0].data["jobs"] == [first]
    store.limits.sweep()  # no node serves its queue, so the other job gets the slot
    assert explanation_of(store, second).reasons[0].kind == "no_slot"


def fence_of(store: Any) -> tuple[int, int, int]:
    """Return the fence of another running job."""
    one(store)
    (job,) = claimed(store)
    return job.id, job.attempt, CLAIM


# in words


@pytest.fixture
def node(store):
    store.install()
    store.nodes.join(a_node(1, slots=2))


def test_it_waits_for_jobs_that_run_and_starts_when_they_usually_end(store, clock, node):
    for _ in range(3):
        one(store)
        (job,) = claimed(store)
        store.finish(1, [success(job, started=clock.now(), ended=clock.now() + 30 * SECOND)])
    first, second = one(store), one(store)
    claimed(store, 2)
    child = one(store, after=after(first, second))
    clock.advance(10)

    explanation = explanation_of(store, child)

    assert f"it waits for jobs {first} (running since 00:00:00 UTC) and {second} (running" in str(
        explanation
    )
    assert explanation.reasons[0].data == {"jobs": [first, second]}
    assert explanation.start is not None
    assert f"{explanation.start:%H:%M:%S}" == "00:00:30"


def test_jobs_ahead_and_the_usual_time_give_the_start(store, clock, node):
    one(store)
    (job,) = claimed(store)
    store.finish(1, [success(job, started=clock.now(), ended=clock.now() + 10 * SECOND)])
    for _ in range(41):
        one(store)
    last = one(store)

    explanation = explanation_of(store, last)

    assert "no free slot yet, 41 jobs of queue 'default' are ahead" in str(explanation)
    assert f"{explanation.start:%H:%M:%S}" == "00:03:30"  # 42 × 10 s, two at a time


def test_a_condition_said_no_and_is_asked_again(store, clock, node):
    id = store.enqueue([a_job(ready=READY, options=OPTIONS)])[0].id
    assert "condition shop.open has not been checked yet" in str(explanation_of(store, id))
    no: dict[str, Any] = {"said": "shop.open"}
    for answer, words in (
        (no, "condition shop.open said no at 00:00:00 UTC, next check at 00:00:01 UTC"),
        (
            {**no, "error": "E: x"},
            "condition shop.open raised E: x at 00:00:05 UTC, next check at 00:00:07 UTC",
        ),
        ({**no, "unknown": "shop.open"}, "no live node knows condition 'shop.open'"),
    ):
        store.conditions.send_scouts()
        (job,) = claimed(store)
        gone = ending(job, "waiting", "not ready", happened=False, quiet=True)
        key = check_key(TASK, READY, b"{}", OPTIONS)
        store.conditions.record_answers(
            1, [ConditionAnswer(ending=gone, key=key, task=TASK, conditions=READY, **answer)]
        )
        assert words in str(explanation_of(store, id))
        clock.advance(5)


def test_a_draining_node_is_of_no_help(store, node):
    id = one(store)
    store.nodes.drain(1)
    assert explanation_of(store, id).reasons[0].kind == "no_node"


def test_a_retry_says_after_which_attempt(store, node, clock):
    id = one(store)
    (job,) = claimed(store)
    store.end(1, [ending(job, "scheduled", due_at=clock.now() + HOUR, retries=1)])
    assert "it is not due until 2026-01-01 01:00:00 UTC, after attempt 1" in str(
        explanation_of(store, id)
    )


def test_what_is_final_or_runs_says_so(store, node):
    id = one(store)
    finish(store, id, "failed")
    assert explanation_of(store, id).reasons[0].kind == "final"


def test_a_job_whose_moment_has_come_is_not_said_to_have_none(store, node, clock):
    id = one(store, delay=HOUR)
    assert [reason.kind for reason in explanation_of(store, id).reasons] == ["scheduled"]
    clock.advance("2h")
    assert [reason.kind for reason in explanation_of(store, id).reasons] == ["due"]
    store.promote()
    assert [reason.kind for reason in explanation_of(store, id).reasons] == ["no_slot"]


def test_a_pause_that_ends_says_when_and_slots_are_not_what_is_lacking(store, node, clock):
    id, end = one(store), clock.now() + 26 * HOUR
    late = one(store, delay=30 * HOUR)
    store.operators.pause("default", end, "me", None)

    explanation = explanation_of(store, id)
    assert [(reason.kind, reason.data.get("until")) for reason in explanation.reasons] == [
        ("queue_paused", end)
    ]
    assert "its queue 'default' is paused until 2026-01-02 02:00:00 UTC" in str(explanation)
    assert explanation.start == to_datetime(end)
    assert explanation_of(store, late).start == to_datetime(clock.now() + 30 * HOUR)

    second = explanation_of(store, one(store))
    assert [reason.text for reason in second.reasons][1:] == ["1 job of it is ahead"]
    assert second.start == to_datetime(end)  # at the earliest
    store.operators.pause("default", None, "me", None)
    assert [reason.kind for reason in explanation_of(store, id).reasons] == ["queue_paused"]
    assert explanation_of(store, id).start is None
