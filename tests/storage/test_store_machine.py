"""Random calls on the store, beside a small model of what they mean.

The model knows nothing of SQL, batches or indexes: only states, fences, ranks and edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.storage.builders import (
    HOUR,
    SECOND,
    a_job,
    after,
    claimed,
    ending,
    joined,
    loss,
    settle,
    success,
)

from genba.domain.clock import ManualClock
from genba.domain.rank import rank
from genba.storage.records import Claimed
from genba.storage.store import Store, open_store

FINAL = ("succeeded", "failed", "timed_out", "cancelled")
PICK = st.integers(0, 10**6)
WANTS = st.sampled_from(["success", "finished", "failure"])
POLICY = st.sampled_from(["cancel", "hold", "run"])
STEP = 2 * HOUR  # another than the usual one: all that ranks a job must read it
numbers = count(1)


@dataclass
class Model:
    """A job as it should be; `edges` maps a parent to what is wanted of it, and whether that is open, met or broken."""

    state: str
    rank: int
    due: int
    priority: int
    identity: str | None = None
    policy: str = "cancel"
    attempt: int = 0
    claim: int | None = None
    asked: bool = False
    why: str | None = None
    edges: dict[int, list[str]] = field(default_factory=dict)
    history: list[int] = field(default_factory=list)

    @property
    def open(self) -> int:
        return sum(how == "open" for _, how in self.edges.values())


class Machine(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        number = next(numbers)
        self.node = number
        self.clock = ManualClock(1_767_225_600 * SECOND)
        self.store: Store = open_store(
            self.url, namespace=f"n{number}", clock=self.clock, age_step=STEP
        )
        joined(self.store, number)
        self.jobs: dict[int, Model] = {}
        self.old: list[tuple[Claimed, int]] = []  # every claim there ever was, with its claim id
        self.claims = count(1000)

    def teardown(self) -> None:
        try:
            assert self.store.verify().faults == []
        finally:
            self.store.close()

    def pick(self, number: int, *states: str) -> int | None:
        ids = [id for id, job in self.jobs.items() if not states or job.state in states]
        return ids[number % len(ids)] if ids else None

    # what the calls mean

    def end(self, id: int, state: str, why: str | None = None) -> None:
        job = self.jobs[id]
        job.state, job.claim, job.asked, job.why, job.identity = state, None, False, why, None
        for child, other in self.jobs.items():
            if other.edges.get(id, ["", ""])[1] == "open":
                self.judge(child, id)

    def judge(self, child: int, parent: int) -> None:
        job, end = self.jobs[child], self.jobs[parent].state
        wants = job.edges[parent][0]
        fine = wants == "finished" or (wants == "success") == (end == "succeeded")
        job.edges[parent][1] = "met" if fine else "broken"
        if not fine and job.policy == "cancel" and job.state not in FINAL:
            self.end(child, "cancelled", "dependency")
        elif not fine and job.policy == "hold" and job.state in ("blocked", "scheduled", "waiting"):
            job.state, job.why = "held", "dependency"
        elif job.state == "blocked" and not job.open:
            job.state = "scheduled" if job.due > self.clock.now() else "waiting"
            if job.state == "waiting":
                job.rank = rank(self.clock.now(), job.priority, STEP)

    def by_the_facts(self, job: Model) -> str:
        if job.open:
            return "blocked"
        return "scheduled" if job.due > self.clock.now() else "waiting"

    # jobs come in

    @rule(
        priority=st.integers(-2, 2),
        delay=st.sampled_from([0, 0, 0, HOUR]),
        identity=st.sampled_from([None, None, "a", "b"]),
        parents=st.lists(st.tuples(PICK, WANTS), max_size=2),
        policy=POLICY,
        many=st.booleans(),
        conflict=st.sampled_from(["return", "replace"]),
    )
    def enqueue(self, priority, delay, identity, parents, policy, many, conflict):
        now = self.clock.now()
        wanted = {id: wants for number, wants in parents if (id := self.pick(number)) is not None}
        new = a_job(
            priority=priority,
            delay=delay,
            identity=identity,
            on_conflict=conflict,
            options=f'{{"on_dependency_failure": "{policy}"}}',
            after=tuple(edge for id, wants in wanted.items() for edge in after(id, wants=wants)),
        )
        holder = next(
            (id for id, job in self.jobs.items() if identity and job.identity == identity), None
        )
        made = self.store.enqueue([new, a_job(delay=HOUR)] if many else [new])
        if many:
            self.jobs[made[1].id] = Model("scheduled", rank(now + HOUR, 0, STEP), now + HOUR, 0)
        if holder is not None and conflict == "return":
            assert made[0] == (holder, False)
            return
        assert made[0].created
        if holder is not None:
            self.jobs[holder].identity = None
            if self.jobs[holder].state == "running":
                self.jobs[holder].asked = True
                wanted[holder] = "finished"
            else:
                self.end(holder, "cancelled", "replaced")
        job = Model(
            "waiting", rank(now + delay, priority, STEP), now + delay, priority, identity, policy
        )
        job.edges = {id: [wants, "open"] for id, wants in wanted.items()}
        job.state = self.by_the_facts(job)
        self.jobs[made[0].id] = job
        for parent in wanted:
            if self.jobs[parent].state in FINAL and job.edges[parent][1] == "open":
                self.judge(made[0].id, parent)

    # jobs are run

    @rule(limit=st.sampled_from([1, 2, 4]))
    def take(self, limit):
        claim = next(self.claims)
        got = claimed(self.store, limit, node=self.node, claim=claim)
        best = sorted((job.rank, id) for id, job in self.jobs.items() if job.state == "waiting")[
            :limit
        ]
        assert [(one.rank, one.id) for one in got] == best
        for one in got:
            job = self.jobs[one.id]
            job.state, job.claim, job.attempt = "running", claim, job.attempt + 1
            assert one.attempt == job.attempt
            self.old.append((one, claim))

    def a_claim(self, number: int) -> tuple[Claimed, int, bool]:
        """Some claim of all there were, and whether it still holds."""
        one, claim = self.old[-1 - number % len(self.old)]
        job = self.jobs[one.id]
        return one, claim, (job.state, job.attempt, job.claim) == ("running", one.attempt, claim)

    @precondition(lambda self: self.old)
    @rule(number=PICK)
    def succeed(self, number):
        one, claim, live = self.a_claim(number)
        live = live and not self.jobs[one.id].asked
        assert self.store.finish(self.node, [success(one, claim=claim)]) == (
            {one.id} if live else set()
        )
        if live:
            self.jobs[one.id].history.append(one.attempt)
            self.end(one.id, "succeeded")

    @precondition(lambda self: self.old)
    @rule(
        number=PICK,
        state=st.sampled_from(["failed", "timed_out", "cancelled", "held", "waiting", "scheduled"]),
    )
    def fail(self, number, state):
        one, claim, live = self.a_claim(number)
        job, due = self.jobs[one.id], self.clock.now() + HOUR if state == "scheduled" else None
        ended = self.store.end(
            self.node, [ending(one, state, claim=claim, due_at=due, reason="boom")]
        )
        assert ended == ({one.id} if live else set())
        if live:
            job.history.append(one.attempt)
            self.left(one.id, state, due)

    @precondition(lambda self: self.old)
    @rule(number=PICK)
    def release(self, number):
        one, claim, live = self.a_claim(number)
        given = self.store.end(
            self.node, [ending(one, "waiting", "drain", claim=claim, happened=False)]
        )
        assert given == ({one.id} if live else set())
        if live:
            self.jobs[one.id].attempt -= 1
            self.left(one.id, "waiting", None)

    def left(self, id: int, state: str, due: int | None) -> None:
        job = self.jobs[id]
        if state in FINAL or job.asked:
            self.end(id, state if state in FINAL else "cancelled")
            return
        job.state, job.claim, job.why, job.due = state, None, None, due or job.due

    @rule()
    def node_dies(self):
        ours = sorted(id for id, job in self.jobs.items() if job.state == "running")
        assert self.store.nodes.declare_dead(self.node, loss) == ours
        for id in ours:
            self.jobs[id].attempt -= 1
            self.left(id, "waiting", None)
        self.node = next(numbers)
        joined(self.store, self.node)

    # people steer, time passes

    def steer(self, call: Callable[[int], bool], number: int, *states: str) -> Model | None:
        """Does it to any job; the job if its state allows that, and nothing happens otherwise."""
        id = self.pick(number)
        if id is None:
            return None
        allowed = self.jobs[id].state in states
        assert call(id) == allowed
        return self.jobs[id] if allowed else None

    @rule(number=PICK)
    def hold(self, number):
        if job := self.steer(
            lambda id: self.store.hold(id, "why"), number, "blocked", "scheduled", "waiting"
        ):
            job.state, job.why = "held", "why"

    @rule(number=PICK)
    def resume(self, number):
        if job := self.steer(self.store.resume, number, "held"):
            job.state, job.why, job.rank = (
                self.by_the_facts(job),
                None,
                rank(job.due, job.priority, STEP),
            )

    @rule(number=PICK)
    def cancel(self, number):
        id = self.pick(number)
        if id is None:
            return
        job = self.jobs[id]
        assert self.store.cancel(id, None) == (job.state not in FINAL)
        if job.state == "running":
            job.asked = True
        elif job.state not in FINAL:
            self.end(id, "cancelled", "by hand")

    @rule(number=PICK)
    def requeue(self, number):
        id = self.pick(number)
        if id is None or not self.steer(self.store.requeue, number, *FINAL):
            return
        job, now = self.jobs[id], self.clock.now()
        job.due, job.rank, job.why, job.identity = now, rank(now, job.priority, STEP), None, None
        job.state = self.by_the_facts(job)
        again = [
            child
            for child, other in self.jobs.items()
            if other.edges.get(id, ["", ""])[1] == "broken"
            and other.state in ("cancelled", "held")
            and other.why == "dependency"
        ]
        for child in again:
            other = self.jobs[child]
            other.state, other.why = "blocked", None
            for edge in other.edges.values():
                edge[1] = "open" if edge[1] == "broken" else edge[1]
        for child in again:
            for parent, edge in self.jobs[child].edges.items():
                if edge[1] == "open" and self.jobs[parent].state in FINAL:
                    self.judge(child, parent)

    @rule(minutes=st.sampled_from([1, 30, 61]))
    def time_passes(self, minutes):
        self.clock.advance(minutes * 60)
        due = [
            job
            for job in self.jobs.values()
            if job.state == "scheduled" and job.due <= self.clock.now()
        ]
        assert self.store.promote() == len(due)
        for job in due:
            job.state, job.rank = "waiting", rank(job.due, job.priority, STEP)
        self.store.nodes.renew(self.node)

    # what must be true

    @invariant()
    def all_is_as_the_model_says(self):
        settle(self.store)
        seen = self.store.states(list(self.jobs))
        assert seen == {id: job.state for id, job in self.jobs.items()}
        for id in list(self.jobs)[-3:]:
            record: Any = self.store.job(id)
            job = self.jobs[id]
            assert (record.attempt, record.claim_id, record.open_deps) == (
                job.attempt,
                job.claim,
                job.open,
            )
            assert (record.finished_at is not None) == (job.state in FINAL)
            assert (record.node is not None) == (job.state == "running")
            assert bool(record.cancel_requested) == job.asked
            assert [one.attempt for one in self.store.attempts_of(id)] == job.history


def test_random_calls_mean_what_the_model_says(url, engine):
    run_state_machine_as_test(
        type("Machine", (Machine,), {"url": url}),
        settings=settings(
            max_examples=60 if engine == "sqlite" else 25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
