"""For every method of the store that writes: a state in which it has something to do, and the call.

A scene prepares, and returns the call as its caller would repeat it: the writer or the maintenance in its next round, a
client because it got an error.  What may differ from a single call, if the first one had happened, is said with it:
`twice` names tables and events that may be there once more, `over` what the second call may be refused with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.storage.builders import (
    CLAIM,
    HOUR,
    TASK,
    a_job,
    a_node,
    after,
    claimed,
    ending,
    enqueued,
    finish,
    joined,
    loss,
    one,
    running,
    success,
)
from tests.storage.clients.test_locks import owner_of, session, take
from tests.storage.failing import until_it_answers
from tests.storage.jobs.test_conditions import OPTIONS, READY, key, no
from tests.storage.jobs.test_own_writes import DONE, REPORT, fence
from tests.storage.limits.test_slots import limited, rated
from tests.storage.schedules.test_schedules import wanted

from genba.domain.clock import ManualClock
from genba.domain.duration import DAY, MINUTE, SECOND
from genba.errors import LeaseLost, ScheduleNotFound, StoreError
from genba.storage.clients.locks import LockTaken, LockWaiting
from genba.storage.clients.messages import TopicSubscription
from genba.storage.jobs.conditions import SlotRequest
from genba.storage.nodes.take_over import judge_with_jitter
from genba.storage.records import Claimed, JobId
from genba.storage.store import Store

Act = Callable[[], Any]
Prepare = Callable[["Play"], Act]


@dataclass(frozen=True)
class Scene:
    of: tuple[str, ...]  # methods
    prepare: Prepare
    twice: frozenset[str] = frozenset()
    unsynced: frozenset[str] = (
        frozenset()
    )  # the same where a log that could not be synced tells it to the caller
    over: tuple[type[Exception], ...] = ()


SCENES: list[Scene] = []


def scene(
    *of: str,
    twice: Sequence[str] = (),
    unsynced: Sequence[str] = (),
    over: tuple[type[Exception], ...] = (),
) -> Callable[[Prepare], Prepare]:
    def add(prepare: Prepare) -> Prepare:
        SCENES.append(Scene(of, prepare, frozenset(twice), frozenset(unsynced), over))
        return prepare

    return add


@dataclass
class Play:
    """One run of a scene."""

    store: Store
    clock: ManualClock
    another: Callable[[str], Store]  # the same database, another namespace

    def __post_init__(self) -> None:
        self.checks: list[Callable[[], None]] = []

    def then(self, check: Callable[[], None]) -> None:
        """In the end, when nothing fails any more."""
        self.checks.append(check)

    def jobs_of_claim(self, claim: Callable[[], Any]) -> Act:
        """As a desk does it: a claim without an answer is looked for, and only then made again."""

        def act() -> list[Claimed]:
            try:
                return list(claim())
            except StoreError:
                found = until_it_answers(lambda: self.store.claims.jobs_of_claim(1, CLAIM))
                if not found:
                    raise
                return list(found)

        return act


LIMITED = ({"name": TASK, "limits": [["b", 1]]},)
NEW = ("job", "waiting")  # and what tells of it


# the store itself


@scene("Store.install", "Store.upgrade")
def _(play: Play) -> Act:
    other = play.another("other")
    return other.upgrade


@scene("Enqueuer.enqueue", unsynced=NEW)
def _(play: Play) -> Act:
    return lambda: play.store.enqueue([a_job()])


@scene("Enqueuer.enqueue", unsynced=(*NEW, "argument", "tag"))
def _(play: Play) -> Act:
    jobs = [a_job(args=b'{"text": "%s"}' % (b"x" * 2000), tags=("t",)), a_job()]
    return lambda: play.store.enqueue(jobs)


@scene("Enqueuer.enqueue")
def _(play: Play) -> Act:
    parent = one(play.store)
    jobs = [
        a_job(identity="a", key="k", after=after(parent)),
        a_job(identity="b", **limited()),
        a_job(identity="c", ready=READY, options=OPTIONS),
        a_job(identity="d", queue="fair", fair_key="x", fair_by="tenant"),
    ]
    return lambda: play.store.enqueue(jobs)


@scene("Enqueuer.enqueue", unsynced=(*NEW, "cancelled"))
def _(play: Play) -> Act:
    one(play.store, identity="a")
    play.store.changed_by = lambda: "me"
    return lambda: play.store.enqueue([a_job(identity="a", on_conflict="replace")])


@scene("Claims.warm_up")
def _(play: Play) -> Act:
    joined(play.store)
    return lambda: play.store.claims.warm_up(1)


@scene("Claims.claim")
def _(play: Play) -> Act:
    joined(play.store)
    enqueued(play.store, 3)
    return play.jobs_of_claim(lambda: play.store.claim(1, CLAIM, {"default": 2}, [TASK]))


@scene("Claims.claim")
def _(play: Play) -> Act:
    joined(play.store)
    one(play.store)
    one(play.store, queue="fair", fair_key="x", fair_by="tenant")
    return play.jobs_of_claim(lambda: play.store.claim(1, CLAIM, {"default": 2, "fair": 2}, [TASK]))


@scene("Claims.finish_and_claim")
def _(play: Play) -> Act:
    joined(play.store)
    job = running(play.store, **limited())
    enqueued(play.store, 2, **limited())
    one(play.store, after=after(job.id))
    ended = [success(job)]

    def act() -> Any:
        try:
            return play.store.claims.finish_and_claim(1, CLAIM + 1, ended, {"default": 2}, [TASK])
        except StoreError:
            found = until_it_answers(lambda: play.store.claims.jobs_of_claim(1, CLAIM + 1))
            if not found:
                raise
            return found

    return act


@scene("Claims.claim_dedicated")
def _(play: Play) -> Act:
    joined(play.store)
    one(play.store, options='{"dedicated":true}')
    return play.jobs_of_claim(
        lambda: play.store.claims.claim_dedicated(1, CLAIM, ["default"], [TASK], 1)
    )


@scene("Claims.claim_awaited")
def _(play: Play) -> Act:
    joined(play.store)
    id = one(play.store)
    return play.jobs_of_claim(
        lambda: play.store.claims.claim_awaited(1, CLAIM, ["default"], [TASK], [id])
    )


@scene("Claims.claim_job")
def _(play: Play) -> Act:
    joined(play.store)
    id = one(play.store, delay=HOUR)
    return play.jobs_of_claim(lambda: [play.store.claims.claim_job(1, CLAIM, id)])


def _two_running(play: Play, **given: Any) -> list[Claimed]:
    joined(play.store)
    enqueued(play.store, 2, **given)
    return claimed(play.store, 2)


@scene("Attempts.finish")
def _(play: Play) -> Act:
    jobs = _two_running(play, **limited(2))
    one(play.store, after=after(jobs[0].id))
    play.then(lambda: _is_over(play, jobs))
    return lambda: play.store.finish(1, [success(job) for job in jobs])


def _is_over(play: Play, jobs: Sequence[Claimed]) -> None:
    assert play.store.finish(1, [success(job) for job in jobs]) == set()
    assert play.store.end(1, [ending(job) for job in jobs]) == set()


@scene("Attempts.finish")
def _(play: Play) -> Act:
    """With a start that was written before, and the run of a schedule."""
    joined(play.store)
    play.store.schedules.put(wanted(every=10 * SECOND))
    play.store.promote()
    one(play.store)
    jobs = claimed(play.store, 2)
    play.store.mark_started([(job.id, job.attempt, CLAIM, 10) for job in jobs])
    play.then(lambda: _is_over(play, jobs))
    return lambda: play.store.finish(1, [success(job) for job in jobs])


@scene("Attempts.end_attempts")
def _(play: Play) -> Act:
    """A retry, a failure with waiting children, one with a lock and slots, and a start written before."""
    joined(play.store)
    enqueued(play.store, 3, **limited(3))
    jobs = claimed(play.store, 4)
    one(play.store, after=after(jobs[1].id, wants="finished"))
    take(play.store, owner_of(jobs[2]))
    play.store.mark_started([(jobs[0].id, jobs[0].attempt, CLAIM, 10)])
    ends = [
        ending(jobs[0], "scheduled", wait=10 * SECOND, retries=1, started=10),
        ending(jobs[1], error='{"type":"E","message":"m"}'),
        ending(jobs[2], "held", "crash", reason="r", locks=True, crashes=1),
    ]
    play.then(lambda: _is_over(play, jobs))
    return lambda: play.store.end(1, ends)


@scene("Attempts.mark_started", twice=("running",))
def _(play: Play) -> Act:
    jobs = _two_running(play)
    return lambda: play.store.mark_started([(job.id, job.attempt, CLAIM, 10) for job in jobs])


@scene("Attempts.record_progress", twice=("progress",))
def _(play: Play) -> Act:
    jobs = _two_running(play)
    return lambda: play.store.record_progress(
        [(job.id, job.attempt, CLAIM, '[1.0,2.0,"n"]') for job in jobs]
    )


@scene("DueJobs.promote")
def _(play: Play) -> Act:
    joined(play.store, tasks=LIMITED)
    enqueued(play.store, 2, delay=SECOND, **limited())
    play.clock.advance(2)
    return play.store.promote


@scene("Settler.settle")
def _(play: Play) -> Act:
    joined(play.store, tasks=LIMITED)
    good, bad, rest = enqueued(play.store, 3)
    one(play.store, after=after(good), **limited())
    one(play.store, after=after(bad))
    one(play.store, after=after(good, bad, wants="finished"))
    one(play.store, parent_id=rest)
    jobs = {job.id: job for job in claimed(play.store, 4)}
    play.store.finish(1, [success(jobs[good])])
    play.store.end(1, [ending(jobs[bad]), ending(jobs[rest], "timed_out", "timeout")])
    return lambda: [until_it_answers(play.store.settle) for _ in range(3)]


@scene("DueJobs.expire")
def _(play: Play) -> Act:
    enqueued(play.store, 2, expires_in=SECOND, **limited())
    play.clock.advance(2)
    return play.store.expire


@scene("ParkedJobs.park_unknown")
def _(play: Play) -> Act:
    one(play.store, task="shop.unknown")
    one(play.store)
    return lambda: play.store.parked.park_unknown("default", [TASK])


@scene("ParkedJobs.unpark")
def _(play: Play) -> Act:
    one(play.store, task="shop.unknown")
    play.store.parked.park_unknown("default", [TASK])
    return lambda: play.store.parked.unpark(["unknown task shop.unknown"])


def _old(play: Play) -> JobId:
    joined(play.store)
    id = one(play.store, tags=("t",))
    finish(play.store, id)
    play.clock.advance(100)
    return id


@scene("Pruner.prune_before")
def _(play: Play) -> Act:
    _old(play)
    return lambda: play.store.prune(play.clock.now() - SECOND)


@scene("Steering.cancel")
def _(play: Play) -> Act:
    """One that waits, with a slot, and a child."""
    id, _ = enqueued(play.store, 2, **limited())
    one(play.store, after=after(id, wants="finished"))
    return lambda: (
        play.store.cancel(id, "r"),
        [until_it_answers(play.store.settle) for _ in range(3)],
    )


@scene("Steering.cancel", twice=("control", "stop_requested"))
def _(play: Play) -> Act:
    joined(play.store)
    job = running(play.store)
    return lambda: play.store.cancel(job.id, "r")


@scene("Steering.cancel_all", twice=("control", "stop_requested"))
def _(play: Play) -> Act:
    joined(play.store)
    job = running(play.store)
    ids = enqueued(play.store, 3, **limited())
    return lambda: (play.store.cancel_all([job.id, *ids], "r"), until_it_answers(play.store.settle))


@scene("Steering.hold")
def _(play: Play) -> Act:
    id, _ = enqueued(play.store, 2, **limited())
    return lambda: play.store.hold(id, "r")


@scene("Steering.resume")
def _(play: Play) -> Act:
    id = one(play.store, **limited())
    play.store.hold(id, "r")
    return lambda: play.store.resume(id)


def _failed(play: Play, **given: Any) -> JobId:
    joined(play.store)
    id = one(play.store, **given)
    one(play.store, after=after(id))
    finish(play.store, id, "failed")
    while play.store.settle():
        pass
    return id


@scene("Steering.requeue")
def _(play: Play) -> Act:
    id = _failed(play, **limited())
    return lambda: play.store.requeue(id)


@scene("Steering.requeue_failed")
def _(play: Play) -> Act:
    joined(play.store)
    ids = enqueued(play.store, 2)
    for id in ids:
        finish(play.store, id, "failed")
    return lambda: play.store.requeue_failed(ids)


@scene("Namespace.wake_for_granted")
def _(play: Play) -> Act:
    jobs = _two_running(play)
    play.store.limits.queues.granted = bool(jobs)
    return play.store.wake_for_granted


# many at once


@scene("BulkChanges.hold")
def _(play: Play) -> Act:
    ids = enqueued(play.store, 2, **limited())
    return lambda: play.store.bulk.hold(ids, "r")


@scene("BulkChanges.resume")
def _(play: Play) -> Act:
    ids = enqueued(play.store, 2, **limited())
    play.store.bulk.hold(ids, "r")
    return lambda: play.store.bulk.resume(ids)


@scene("BulkChanges.requeue")
def _(play: Play) -> Act:
    id = _failed(play)
    return lambda: play.store.bulk.requeue([id])


@scene("BulkChanges.delete")
def _(play: Play) -> Act:
    id, other = enqueued(play.store, 2, **limited())
    one(play.store, after=after(id))
    return lambda: (
        play.store.bulk.delete([id, other]),
        [until_it_answers(play.store.settle) for _ in range(2)],
    )


@scene("Steering.kill", twice=("control", "stop_requested"))
def _(play: Play) -> Act:
    jobs = _two_running(play)
    return lambda: play.store.steering.kill([job.id for job in jobs], "r")


@scene("BulkChanges.change", twice=("updated",))
def _(play: Play) -> Act:
    id = one(play.store, **limited())
    return lambda: play.store.bulk.change(id, {"priority": 7}, lambda old: '{"x":1}')


# limits


@scene("LimitSlots.recheck")
def _(play: Play) -> Act:
    enqueued(play.store, 2, **limited())
    with play.store._db.transaction() as tx:
        tx.batch("insert_rechecks", [("b", "b", 2, 0, None, None)], namespace="default")
    return play.store.limits.recheck


@scene("LimitSlots.serve_due_rates")
def _(play: Play) -> Act:
    enqueued(play.store, 3, **rated(1, SECOND))
    play.clock.advance(1)
    return play.store.limits.serve_due_rates


@scene("LimitSlots.sweep")
def _(play: Play) -> Act:
    """A queue of a limit that was not served yet."""
    enqueued(play.store, 2, **limited())
    with play.store._db.transaction() as tx:
        for table in ("bucket", "bucket_limit"):
            tx.select(f"UPDATE genba.{table} SET n = 2 RETURNING 1")
    return play.store.limits.sweep


@scene("LimitSlots.prune")
def _(play: Play) -> Act:
    joined(play.store)
    job = running(play.store, **limited())
    play.store.finish(1, [success(job)])
    play.clock.advance(DAY / SECOND)
    return play.store.limits.prune


# nodes


@scene("Nodes.join")
def _(play: Play) -> Act:
    node = a_node(1, tasks=({"name": TASK, "limits": [["b", 1]], "fair_by": "tenant"},))
    return lambda: play.store.nodes.join(node)


@scene("Nodes.declare")
def _(play: Play) -> Act:
    joined(play.store)
    tasks = [{"name": "shop.other", "limits": [["b", 1]]}]
    return lambda: play.store.nodes.declare(1, tasks, ["default", "more"])


@scene("Nodes.renew")
def _(play: Play) -> Act:
    joined(play.store)
    play.clock.advance(3)
    return lambda: play.store.nodes.renew(1)


@scene("Nodes.commands")
def _(play: Play) -> Act:
    joined(play.store)
    job = running(play.store)
    play.store.cancel(job.id, "r")
    play.store.nodes.command(1, "drain")
    heard: list[str] = []

    def act() -> None:
        heard.extend(command.verb for command in play.store.nodes.commands(1))

    def check() -> None:
        act()
        assert heard == ["cancel", "drain"], "a command was lost, or came twice"

    play.then(check)
    return act


@scene("Nodes.hungry")
def _(play: Play) -> Act:
    joined(play.store)
    return lambda: play.store.nodes.hungry(1, True)


@scene("Nodes.drain")
def _(play: Play) -> Act:
    joined(play.store)
    return lambda: play.store.nodes.drain(1)


@scene("Nodes.command", twice=("control",))
def _(play: Play) -> Act:
    joined(play.store)
    return lambda: play.store.nodes.command(1, "drain")


@scene("Nodes.resize")
def _(play: Play) -> Act:
    joined(play.store)
    return lambda: play.store.nodes.resize(1, 9, {"max": 9})


@scene("Nodes.tell", twice=("worker_started",))
def _(play: Play) -> Act:
    joined(play.store)
    return lambda: play.store.nodes.tell(1, [("worker_started", {"pid": 3})])


@scene("Nodes.leave")
def _(play: Play) -> Act:
    joined(play.store)
    return lambda: play.store.nodes.leave(1)


@scene("Nodes.declare_dead")
def _(play: Play) -> Act:
    jobs = _two_running(play, **limited(2))
    play.store.mark_started([(jobs[0].id, jobs[0].attempt, CLAIM, 10)])
    play.then(lambda: _is_over(play, jobs))
    return lambda: play.store.nodes.declare_dead(1, loss)


@scene("Nodes.take_over_jobs")
def _(play: Play) -> Act:
    joined(play.store)
    job = running(play.store, **limited())
    with play.store._db.transaction() as tx:
        tx.one("set_node_state", id=1, state="dead", hungry=False)
    play.then(lambda: _is_over(play, [job]))
    return lambda: play.store.nodes.take_over_jobs(1, judge_with_jitter)


@scene("Nodes.forget")
def _(play: Play) -> Act:
    joined(play.store)
    play.store.nodes.leave(1)
    play.clock.advance(100)
    return lambda: play.store.nodes.forget(play.clock.now())


# operators


@scene("Operators.switch", "Operators.park_task")
def _(play: Play) -> Act:
    joined(play.store)
    enqueued(play.store, 2, **limited())
    return lambda: play.store.operators.switch(TASK, False, "me", "r", None)


@scene("Operators.switch", "Operators.unpark_task", "Operators.unpark")
def _(play: Play) -> Act:
    joined(play.store)
    enqueued(play.store, 2, **limited())
    play.store.operators.switch(TASK, False, "me", "r", None)
    return lambda: play.store.operators.switch(TASK, True, "me", "r", None)


@scene("Operators.keep_parked")
def _(play: Play) -> Act:
    """An operator's program was stopped half-way, twice."""
    joined(play.store, tasks=({"name": TASK}, {"name": "shop.other"}))
    enqueued(play.store, 2)
    one(play.store, task="shop.other")
    play.store.operators.switch("shop.other", False, "me", None, None)
    with play.store._db.transaction() as tx:
        for name, enabled in ((TASK, False), ("shop.other", True)):
            tx.one("switch_task", namespace="default", name=name, enabled=enabled, by="me")
            tx.run("next_epoch", namespace="default")
    play.store.operators.refresh()
    return play.store.operators.keep_parked


@scene("Operators.override", twice=("task_changed",))
def _(play: Play) -> Act:
    joined(play.store)
    enqueued(play.store, 2, **limited(1, f"running {TASK}"))
    return lambda: play.store.operators.override(
        TASK, lambda old: {**old, "max_running": 2}, "me", None
    )


@scene("Operators.pause", twice=("queue_paused",))
def _(play: Play) -> Act:
    joined(play.store)
    return lambda: play.store.operators.pause("default", None, "me", "r")


@scene("Operators.resume")
def _(play: Play) -> Act:
    joined(play.store)
    play.store.operators.pause("default", None, "me", "r")
    return lambda: play.store.operators.resume("default", "me")


@scene("Operators.set_limit", twice=("limit_changed",))
def _(play: Play) -> Act:
    joined(play.store)
    enqueued(play.store, 3, **limited())
    return lambda: play.store.operators.set_limit("b", 2, "me")


@scene("Operators.end_pauses")
def _(play: Play) -> Act:
    joined(play.store)
    play.store.operators.pause("default", play.clock.now() + SECOND, "me", "r")
    play.clock.advance(2)
    return play.store.operators.end_pauses


# fair queues


@scene("Fairness.rank_unranked")
def _(play: Play) -> Act:
    enqueued(play.store, 2, queue="fair", fair_key="x", fair_by="tenant", delay=SECOND)
    play.clock.advance(2)
    play.store.promote()
    return play.store.fairness.rank_unranked


@scene("Fairness.forget_idle_keys")
def _(play: Play) -> Act:
    joined(play.store)
    one(play.store, queue="fair", fair_key="x", fair_by="tenant")
    play.store.claim(1, CLAIM, {"fair": 1}, [TASK])
    return play.store.fairness.forget_idle_keys


# jobs about themselves


def _one_running(play: Play, **given: Any) -> Claimed:
    joined(play.store)
    return running(play.store, **given)


@scene("OwnWrites.save")
def _(play: Play) -> Act:
    job = _one_running(play)
    return lambda: play.store.own_writes.save(fence(job), b'{"at":1}')


@scene("OwnWrites.end", over=(LeaseLost,))
def _(play: Play) -> Act:
    job = _one_running(play, **limited())
    one(play.store, after=after(job.id))
    play.then(lambda: _is_over(play, [job]))
    return lambda: play.store.own_writes.end(fence(job), DONE, REPORT, 0.0)


@scene("OwnWrites.transaction", "OwnWrites.open", "OwnWrites.close", over=(LeaseLost,))
def _(play: Play) -> Act:
    job = _one_running(play)
    play.then(lambda: _is_over(play, [job]))

    def act() -> None:
        with play.store.own_writes.transaction(fence(job), lambda: (DONE, REPORT, 0.0)) as conn:
            conn.execute("SELECT 1").fetchall()

    return act


@scene("OwnWrites.afterwards", twice=("error_after_end",))
def _(play: Play) -> Act:
    job = _one_running(play)
    play.store.own_writes.end(fence(job), DONE, REPORT, 0.0)
    return lambda: play.store.own_writes.afterwards(
        fence(job), '{"type":"E","message":"m"}', "printed"
    )


@scene("Dependencies.look_for_lost")
def _(play: Play) -> Act:
    parent = one(play.store)
    one(play.store, after=after(parent))
    while play.store.settle():
        pass
    with play.store._db.transaction() as tx:
        tx.batch("delete_job", [(parent,)], namespace="default")
        play.store.events.add(tx, "deleted", [parent])  # or verify finds it lost
    return lambda: (play.store.dependencies.look_for_lost(), until_it_answers(play.store.settle))


# locks


@scene("Locks.take")
def _(play: Play) -> Act:
    """A job takes what is free; what it is given is what it has."""
    owner = owner_of(_one_running(play))

    def act() -> None:
        got = take(play.store, owner)
        assert isinstance(got, LockTaken)
        assert play.store.locks.held("a", got.token)

    return act


@scene("Locks.take")
def _(play: Play) -> Act:
    """A job stands in line: once."""
    job = _one_running(play)
    holder = session(play.store, 5)
    held = take(play.store, holder)
    got: list[Any] = []

    def check() -> None:
        assert isinstance(got[-1], LockWaiting)
        play.store.locks.release("a", held.token)
        assert isinstance(take(play.store, owner_of(job), seq=got[-1].seq), LockTaken), (
            "it waits for itself"
        )
        assert play.store.locks.waiters() == []

    play.then(check)
    return lambda: got.append(take(play.store, owner_of(job)))


@scene("Locks.take", "Locks.withdraw")
def _(play: Play) -> Act:
    """A process outside of jobs: whatever came of a wish without an answer is withdrawn, and the next is another."""
    me = session(play.store, 5)
    wish = me._replace(claim_id=1)
    got: list[Any] = []

    def act() -> None:
        try:
            got.append(take(play.store, wish))
        except StoreError:
            until_it_answers(lambda: play.store.locks.withdraw("a", wish))
            raise

    def check() -> None:
        assert play.store.locks.held("a", got[-1].token)
        assert len(play.store.locks.holders()) == 1

    play.then(check)
    return act


def _held(play: Play) -> tuple[LockTaken, LockWaiting]:
    held, waits = take(play.store, session(play.store, 5)), take(play.store, session(play.store, 6))
    assert isinstance(held, LockTaken)
    assert isinstance(waits, LockWaiting)
    return held, waits


@scene("Locks.leave")
def _(play: Play) -> Act:
    _, waits = _held(play)
    return lambda: play.store.locks.leave("a", waits.seq)


@scene("Locks.withdraw")
def _(play: Play) -> Act:
    owner = session(play.store, 5)._replace(claim_id=9)
    take(play.store, owner)
    take(play.store, session(play.store, 6))
    return lambda: play.store.locks.withdraw("a", owner)


@scene("Locks.release")
def _(play: Play) -> Act:
    held, _ = _held(play)
    return lambda: play.store.locks.release("a", held.token)


@scene("Locks.break_")
def _(play: Play) -> Act:
    held, _ = _held(play)
    return lambda: play.store.locks.break_("a", held.token, "me")


@scene("Locks.sweep")
def _(play: Play) -> Act:
    job = _one_running(play)
    take(play.store, owner_of(job))
    take(play.store, session(play.store, 6))
    play.store.finish(1, [success(job)])  # without a word of its locks
    return play.store.locks.sweep


# sessions


@scene("Sessions.open")
def _(play: Play) -> Act:
    return lambda: play.store.sessions.open(5)


@scene("ClientListener.session")
def _(play: Play) -> Act:
    play.store.listener.id = 5
    return play.store.listener.session


@scene("Sessions.renew")
def _(play: Play) -> Act:
    play.store.sessions.open(5)
    play.clock.advance(1)
    return lambda: play.store.sessions.renew(5)


@scene("Sessions.close")
def _(play: Play) -> Act:
    _held(play)
    return lambda: play.store.sessions.close(5)


@scene("Sessions.sweep")
def _(play: Play) -> Act:
    _held(play)
    play.clock.advance(20)
    return lambda: play.store.sessions.sweep(100 * SECOND)


# messages


@scene("Messages.send", twice=("message",))
def _(play: Play) -> Act:
    id = one(play.store)
    return lambda: play.store.messages.send(id, b"1")


@scene("Messages.receive")
def _(play: Play) -> Act:
    job = _one_running(play)
    for data in (b"1", b"2"):
        play.store.messages.send(job.id, data)
    got: list[bytes | None] = []

    def check() -> None:
        got.append(play.store.messages.receive(fence(job)))
        assert got == [b"1", b"2"], "a message was lost, or came twice"

    play.then(check)
    return lambda: got.append(play.store.messages.receive(fence(job)))


@scene("Messages.await_mail", twice=("listener",))
def _(play: Play) -> Act:
    job = _one_running(play)
    return lambda: play.store.messages.await_mail(job.id, 5)


@scene("Messages.stop")
def _(play: Play) -> Act:
    job = _one_running(play)
    listener = play.store.messages.await_mail(job.id, 5)
    return lambda: play.store.messages.stop(listener)


def _listening(play: Play) -> TopicSubscription:
    session(play.store, 5)
    return play.store.messages.subscribe("t", 5, 5)


@scene("Messages.publish", twice=("message",))
def _(play: Play) -> Act:
    _listening(play)
    return lambda: play.store.messages.publish("t", b"1")


@scene("Messages.subscribe", twice=("listener",))
def _(play: Play) -> Act:
    session(play.store, 5)
    return lambda: play.store.messages.subscribe("t", 5, 5)


@scene("Messages.hear")
def _(play: Play) -> Act:
    listening = [_listening(play)]
    play.store.messages.publish("t", b"1")
    play.store.messages.publish("t", b"2")
    got: list[bytes] = []

    def act() -> None:
        listening[0], found = play.store.messages.hear(listening[0])
        got.extend(found)

    def check() -> None:
        play.store.messages.publish("t", b"3")
        act()
        assert got == [b"1", b"2", b"3"], "what was published was lost, or came twice"

    play.then(check)
    return act


@scene("Messages.unsubscribe")
def _(play: Play) -> Act:
    listening = _listening(play)
    play.store.messages.publish("t", b"1")
    return lambda: play.store.messages.unsubscribe(listening)


@scene("Messages.sweep")
def _(play: Play) -> Act:
    _listening(play)
    play.store.messages.publish("t", b"1")
    play.clock.advance(100)
    return lambda: play.store.messages.sweep(play.clock.now())


# the clock, and what is old


@scene("ClockSetBack.repair")
def _(play: Play) -> Act:
    job = _one_running(play)
    play.store.end(1, [ending(job, "scheduled", wait=10 * SECOND)])
    enqueued(play.store, 2, **rated(1, SECOND))
    play.clock.set(play.clock.now() - DAY)
    return play.store.clock_set_back.repair


@scene("ClockSetBack.repair_ranks")
def _(play: Play) -> Act:
    enqueued(play.store, 2)
    play.clock.set(play.clock.now() - DAY)
    return play.store.clock_set_back.repair_ranks


@scene("Pruner.step")
def _(play: Play) -> Act:
    """One that is old, and one that was needed when it was looked at for the first time."""
    id = _old(play)
    child = one(play.store, after=after(id, wants="finished"))
    while play.store.settle():
        pass
    pruner = play.store.pruner

    def sweep() -> None:
        while pruner.step() is not None:
            pass

    pruner.begin({TASK: SECOND}, play.clock.now())
    sweep()
    finish(play.store, child)
    play.clock.advance(100)
    pruner.begin({TASK: SECOND}, play.clock.now())
    return sweep


@scene("Events.prune")
def _(play: Play) -> Act:
    enqueued(play.store, 2)
    play.clock.advance(100)
    one(play.store)
    return lambda: play.store.events.prune(play.clock.now() - SECOND, 1000)


# schedules


@scene("Schedules.put")
def _(play: Play) -> Act:
    return lambda: play.store.schedules.put(wanted(every=10 * SECOND))


@scene("Schedules.put")
def _(play: Play) -> Act:
    play.store.schedules.put(wanted(cron="* * * * *"))
    return lambda: play.store.schedules.put(wanted(every=10 * SECOND))


@scene("Schedules.declare", "Schedules.still_declared")
def _(play: Play) -> Act:
    play.store.schedules.declare([wanted("s", cron="* * * * *")])
    play.clock.advance(10)
    return lambda: play.store.schedules.declare(
        [wanted("s", cron="* * * * *"), wanted("t", every=SECOND)]
    )


@scene("Schedules.pause_abandoned")
def _(play: Play) -> Act:
    play.store.schedules.declare([wanted(cron="* * * * *")])
    play.clock.advance(2 * HOUR / SECOND)
    names = play.store.schedules.abandoned()
    assert names
    return lambda: play.store.schedules.pause_abandoned(names)


@scene("Schedules.pause")
def _(play: Play) -> Act:
    play.store.schedules.put(wanted(every=10 * SECOND))
    return lambda: play.store.schedules.pause("s", "r")


@scene("Schedules.resume")
def _(play: Play) -> Act:
    play.store.schedules.put(wanted(every=10 * SECOND))
    play.store.schedules.pause("s", "r")
    return lambda: play.store.schedules.resume("s")


@scene("Schedules.delete", over=(ScheduleNotFound,))
def _(play: Play) -> Act:
    play.store.schedules.put(wanted(every=10 * SECOND))
    return lambda: play.store.schedules.delete("s")


@scene("Schedules.undeclare")
def _(play: Play) -> Act:
    play.store.schedules.declare([wanted("a", every=10 * SECOND), wanted("b", every=10 * SECOND)])
    return lambda: play.store.schedules.undeclare("a")


@scene("Schedules.end_series")
def _(play: Play) -> Act:
    play.store.schedules.put(wanted(every=10 * SECOND))
    id = play.store.schedules.named("s").id
    return lambda: play.store.schedules.end_series(id, 1)


@scene("Schedules.trigger", twice=("job", "tick", "schedule", "waiting", "schedule_triggered"))
def _(play: Play) -> Act:
    """A second request is a request for another run."""
    play.store.schedules.put(wanted(cron="0 * * * *"))
    return lambda: play.store.schedules.trigger("s")


@scene("Ticks.fire")
def _(play: Play) -> Act:
    play.store.schedules.put(wanted("a", cron="* * * * *", misfire="all"))
    play.store.schedules.put(wanted("b", cron="* * * * *", misfire="skip"))
    play.clock.advance(3 * MINUTE / SECOND)
    return lambda: [until_it_answers(play.store.ticks.fire) for _ in range(3)]


@scene("Ticks.replan")
def _(play: Play) -> Act:
    play.store.schedules.put(wanted("a", cron="0 * * * *"))
    play.store.schedules.put(wanted("b", every=10 * SECOND))
    play.clock.set(play.clock.now() - DAY)
    return lambda: play.store.ticks.replan(set_back=True)


@scene("Ticks.prune_ticks")
def _(play: Play) -> Act:
    play.store.schedules.put(wanted(cron="* * * * *"))
    play.clock.advance(MINUTE / SECOND)
    play.store.ticks.fire()
    play.clock.advance(40 * DAY / SECOND)
    return play.store.ticks.prune_ticks


# conditions


def _asking(play: Play, count: int = 2, **given: Any) -> None:
    joined(play.store)
    enqueued(play.store, count, ready=READY, options=OPTIONS, **given)


@scene("Conditions.send_scouts")
def _(play: Play) -> Act:
    _asking(play)
    return play.store.conditions.send_scouts


@scene("Conditions.record_answers")
def _(play: Play) -> Act:
    """Counts of answers and of errors are written once."""
    _asking(play)
    play.store.conditions.send_scouts()
    (job,) = claimed(play.store, 8)
    return lambda: play.store.conditions.record_answers(1, [no(job, error="ValueError: sim")])


@scene("Conditions.take_slots")
def _(play: Play) -> Act:
    """Slots for one of two: the other one stands in line."""
    _asking(play)
    play.store.conditions.send_scouts()
    (scout,) = claimed(play.store, 8)
    play.store.conditions.open(key())
    jobs = [scout, *claimed(play.store, 8)]
    asked = [SlotRequest(no(job), ((("b", 1),),)) for job in jobs]
    play.then(lambda: _has_slot(play, asked))
    return lambda: play.store.conditions.take_slots(1, asked)


def _has_slot(play: Play, asked: Sequence[SlotRequest]) -> None:
    assert play.store.conditions.take_slots(1, asked) == {asked[0].answer.ending.id}


@scene("Conditions.open")
def _(play: Play) -> Act:
    _asking(play, 3)
    play.store.conditions.send_scouts()
    return lambda: play.store.conditions.open(key())
