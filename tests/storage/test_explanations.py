"""An explanation is true: what it names first is in the way, and without it the explanation is another one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.storage.builders import HOUR, SECOND, TASK, a_job, a_node, after, claimed, ending, finish, one, success

from genba.explain import Explanation, explain
from genba.storage.questions import Answer, question_of

READY = ("shop.open",)
OPTIONS = '{"ready":["shop.open"]}'


def told(store: Any, id: int) -> Explanation:
    return explain(store, store.job(id))


class Situation:
    """A job with obstacles in its way, each of which can be taken away."""

    def __init__(self, store: Any, clock: Any, kinds: set[str]) -> None:
        self.store, self.clock, self.left = store, clock, set(kinds)
        self.store.install()
        self.nodes = 0
        self.parent = one(store, delay=9 * HOUR) if "blocked" in kinds else None
        self.ready = "condition" in kinds
        self.id = store.enqueue(
            [
                a_job(
                    args=b'{"mine":1}',
                    after=after(self.parent, wants="finished") if self.parent else (),
                    delay=HOUR if "scheduled" in kinds else 0,
                    ready=READY if self.ready else (),
                    options=OPTIONS if self.ready else None,
                )
            ]
        )[0].id
        if "no_slot" in kinds:
            one(store, priority=5)
        if "no_node" not in kinds:
            self.join()
        if "queue_paused" in kinds:
            store.policy.pause("default", None, "me", None)
        if "held" in kinds:
            store.hold(self.id, "the moon is full")

    def join(self) -> None:
        self.nodes += 1
        if self.nodes > 1:
            self.store.nodes.leave(self.nodes - 1)
        tasks = () if "unknown_task" in self.left else ({"name": TASK},)
        queues = ("other",) if "unserved_queue" in self.left else ("default",)
        self.store.nodes.join(a_node(self.nodes, tasks=tasks, queues=queues))

    def remove(self, kind: str) -> None:
        self.left.discard(kind)
        getattr(self, f"_{kind}")()

    def _held(self) -> None:
        self.store.resume(self.id)

    def _blocked(self) -> None:
        self.store.cancel(self.parent, None)

    def _scheduled(self) -> None:
        self.clock.advance("1h")
        self.store.promote()

    def _no_node(self) -> None:
        self.join()

    _unknown_task = _unserved_queue = _no_node

    def _queue_paused(self) -> None:
        self.store.policy.resume("default", "me")

    def _condition(self) -> None:
        self.store.questions.opened(question_of(TASK, READY, b'{"mine":1}', OPTIONS))

    def _no_slot(self) -> None:
        job = self.claim()
        if job.id != self.id:
            self.store.finish(self.nodes, [success(job)])

    def claim(self) -> Any:
        (job,) = claimed(self.store, node=self.nodes)
        return job


KINDS = (
    *("held", "blocked", "scheduled", "queue_paused", "no_node", "unknown_task", "unserved_queue", "condition"),
    "no_slot",
)


@pytest.mark.parametrize("seed", range(20))
def test_the_first_reason_is_true_and_without_it_there_is_another_or_the_job_starts(store, clock, seed):
    chance = random.Random(seed)
    kinds = {kind for kind in KINDS if chance.random() < 0.5}
    if "no_node" in kinds:
        kinds -= {"unknown_task", "unserved_queue"}
    if kinds & {"blocked", "scheduled"}:
        kinds.discard("condition")  # it is asked for when it is claimed
    situation = Situation(store, clock, kinds)

    for _ in range(len(KINDS) + 1):
        explanation = told(store, situation.id)
        first = explanation.reasons[0].kind
        if store.job(situation.id).state == "running":
            break
        assert first in {*situation.left, "no_slot"}, (kinds, str(explanation))
        situation.remove(first)
        assert told(store, situation.id).reasons != explanation.reasons, (kinds, str(explanation))

    assert store.job(situation.id).state == "running", (kinds, str(told(store, situation.id)))


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

    explanation = told(store, child)

    assert f"it waits for jobs {first} (running since 00:00:00 UTC) and {second} (running" in str(explanation)
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

    explanation = told(store, last)

    assert "no free slot yet, 41 jobs of queue 'default' are ahead" in str(explanation)
    assert f"{explanation.start:%H:%M:%S}" == "00:03:30"  # 42 × 10 s, two at a time


def test_a_condition_said_no_and_is_asked_again(store, clock, node):
    id = store.enqueue([a_job(ready=READY, options=OPTIONS)])[0].id
    assert "condition shop.open has not been asked yet" in str(told(store, id))
    no: dict[str, Any] = {"said": "shop.open"}
    for answer, words in (
        (no, "condition shop.open said no at 00:00:00 UTC, next look at 00:00:01 UTC"),
        ({**no, "error": "E: x"}, "condition shop.open raised E: x at 00:00:05 UTC, next look at 00:00:07 UTC"),
        ({**no, "unknown": "shop.open"}, "no live node knows condition 'shop.open'"),
    ):
        store.questions.look()
        (job,) = claimed(store)
        gone = ending(job, "waiting", "not ready", happened=False, quiet=True)
        key = question_of(TASK, READY, b"{}", OPTIONS)
        store.questions.answered(1, [Answer(ending=gone, key=key, task=TASK, conditions=READY, **answer)])
        assert words in str(told(store, id))
        clock.advance(5)


def test_a_draining_node_is_of_no_help(store, node):
    id = one(store)
    store.nodes.drain(1)
    assert told(store, id).reasons[0].kind == "no_node"


def test_a_retry_says_after_which_attempt(store, node, clock):
    id = one(store)
    (job,) = claimed(store)
    store.end(1, [ending(job, "scheduled", due_at=clock.now() + HOUR, retries=1)])
    assert "it is not due until 2026-01-01 01:00:00 UTC, after attempt 1" in str(told(store, id))


def test_what_is_final_or_runs_says_so(store, node):
    id = one(store)
    finish(store, id, "failed")
    assert told(store, id).reasons[0].kind == "final"
