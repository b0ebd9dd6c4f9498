"""Nodes come, beat, die; what they held is taken over, and the dead write nothing."""

from __future__ import annotations

import queue
import select
from collections import Counter
from contextlib import closing

import msgspec
import pytest
from tests.storage.builders import (
    CLAIM,
    SECOND,
    TASK,
    a_node,
    claimed,
    connection,
    ending,
    enqueued,
    joined,
    loss,
    one,
    rows,
    running,
    state,
    states,
    success,
    together,
)
from tests.support import eventually

from genba.domain.clock import SystemClock
from genba.node.database.events import WorkAvailable
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import Maintenance
from genba.node.database.writer import Writer
from genba.storage.events import EventPosition
from genba.storage.jobs import enqueue
from genba.storage.nodes.nodes import NameTaken, Orphan
from genba.storage.nodes.take_over import judge_with_jitter
from genba.storage.records import Ending
from genba.storage.store import open_store

LEASE = 15 * SECOND


def test_a_node_that_joined_is_live_and_known(store):
    tasks = ({"name": "b", "title": "B"}, {"name": "a"})
    joined(store, 5, name="n", queues=("q", "r"), tasks=tasks, lease=LEASE)

    (node,) = store.nodes.live()

    assert (node.id, node.name, node.state, node.pid, node.queues) == (
        5,
        "n",
        "live",
        105,
        '["q","r"]',
    )
    assert (node.lease, node.lease_until - node.beat_at, node.expired) == (LEASE, LEASE, False)
    assert store.nodes.known_tasks() == {"a", "b"}
    assert store.nodes.names() == {5: "n"}


def changes(store):
    page = store.events.page(EventPosition())
    reported = [
        (row.node, msgspec.json.decode(row.data)) for row in page.rows if row.kind == "task_changed"
    ]
    return [(node, data["task"], data["by"], data["diff"]) for node, data in reported]


def test_a_node_that_says_something_else_of_a_task_tells_what(store):
    store.install()
    old = {"name": "pay", "title": "Pay", "timeout": 5, "keep": 1}
    assert store.nodes.join(a_node(1, tasks=(old, {"name": "ship"}))) == {}
    assert store.nodes.join(a_node(2, tasks=({"name": "ship"}, dict(reversed(old.items()))))) == {}
    assert changes(store) == []

    new = {"name": "pay", "title": "Pay", "timeout": 9, "keep": 1, "retry": {"times": 2}}
    diff = {"retry": (None, {"times": 2}), "timeout": (5, 9)}
    assert store.nodes.join(a_node(3, tasks=(new, {"name": "ship"}, {"name": "new"}))) == {
        "pay": diff
    }
    assert changes(store) == [
        (3, "pay", "node node-3", {name: list(pair) for name, pair in diff.items()})
    ]

    assert store.nodes.declare(3, [new], ["default"]) == {}
    assert store.nodes.declare(3, [{**new, "timeout": 10}], ["default"]) == {
        "pay": {"timeout": (9, 10)}
    }
    assert len(changes(store)) == 2


def test_of_many_nodes_that_say_the_same_new_thing_one_tells_of_it(store):
    joined(store, 1, tasks=({"name": "pay", "timeout": 5},))

    together(8, lambda i: store.nodes.join(a_node(i + 2, tasks=({"name": "pay", "timeout": 9},))))

    assert [diff for _, _, _, diff in changes(store)] == [{"timeout": [5, 9]}]


def test_a_name_is_taken_while_its_holder_lives(store):
    joined(store, 1, name="n")

    with pytest.raises(NameTaken, match=r"'n' already .*pid 101"):
        store.nodes.join(a_node(2, name="n"))
    store.nodes.drain(1)
    with pytest.raises(NameTaken):
        store.nodes.join(a_node(2, name="n"))
    store.nodes.leave(1)
    store.nodes.join(a_node(2, name="n"))
    store.nodes.declare_dead(2, loss)
    store.nodes.join(a_node(3, name="n"))
    assert [node.id for node in store.nodes.live()] == [3]


def test_only_one_of_many_gets_the_name(store):
    store.install()

    def join(i: int) -> bool:
        try:
            store.nodes.join(
                a_node(i + 1, name="n", tasks=tuple({"name": f"t{(i + n) % 8}"} for n in range(8)))
            )
        except NameTaken:
            return False
        return True

    assert sorted(together(8, join)) == [False] * 7 + [True]


def test_nodes_that_join_at_once_and_know_the_same_do_not_block_each_other(store):
    store.install()

    def join(i: int) -> None:
        names = [f"t{n}" for n in range(20)]
        store.nodes.join(
            a_node(
                i + 1, tasks=tuple({"name": n, "by": i} for n in (names if i % 2 else names[::-1]))
            )
        )

    together(8, join)

    assert len(store.nodes.live()) == 8


def test_a_beat_prolongs_the_lease(store, clock):
    joined(store, lease=LEASE)
    clock.advance(10)

    beat = store.nodes.renew(1)

    assert beat == (True, clock.now(), False)
    clock.advance(14)
    assert not store.nodes.live()[0].expired
    clock.advance(1)
    assert store.nodes.live()[0].expired


def test_the_wall_clock_may_jump_without_ending_a_lease(store, clock):
    joined(store, lease=LEASE)
    one(store)
    clock.set(clock.now() + 1000 * LEASE)

    assert not store.nodes.live()[0].expired
    assert len(claimed(store)) == 1


def test_an_expired_node_claims_nothing_until_it_beats_again(store, clock):
    joined(store, lease=LEASE)
    one(store)
    clock.advance(15)

    assert claimed(store) == []
    assert store.nodes.renew(1).alive
    assert len(claimed(store)) == 1


@pytest.mark.parametrize("how", ["dead", "draining", "ended"])
def test_a_node_that_is_not_live_claims_nothing(store, how):
    joined(store)
    one(store)
    {
        "dead": lambda id: store.nodes.declare_dead(id, loss),
        "draining": store.nodes.drain,
        "ended": store.nodes.leave,
    }[how](1)

    assert claimed(store) == []
    assert store.claims.finish_and_claim(1, CLAIM, [], {"default": 1}, [TASK]) == (set(), [])


def test_a_node_that_was_never_there_claims_nothing(store):
    one(store)

    assert claimed(store, node=99) == []


def test_a_draining_node_hears_of_it_and_may_still_finish(store):
    joined(store)
    job = running(store)
    store.nodes.drain(1)

    assert store.nodes.renew(1)[2]
    assert store.finish(1, [success(job)]) == {job.id}


def test_commands_reach_their_node_once_and_in_order(store):
    joined(store, 1)
    joined(store, 2)
    jobs = [running(store), running(store)]
    store.cancel(jobs[1].id, "a")
    store.cancel(jobs[0].id, "b", "kill")

    assert store.nodes.commands(2) == []
    got = store.nodes.commands(1)
    assert [(c.job_id, c.attempt, c.verb, c.data) for c in got] == [
        (jobs[1].id, 1, "cancel", "a"),
        (jobs[0].id, 1, "kill", "b"),
    ]
    assert store.nodes.commands(1) == []


def test_thousands_that_a_dead_node_held_are_offered_without_a_pause_and_spread_by_their_back_off(
    store, clock
):
    joined(store, 1)
    ids = enqueued(store, 2200)
    claimed(store, 2200)
    store.mark_started([(id, 1, CLAIM, 5) for id in ids[:1000]])
    store.nodes.declare_dead(1, judge_with_jitter)
    joined(store, 2)
    maintenance = Maintenance(
        store, 2, lease=15 * SECOND, poll=SECOND, queues=["default"], tasks=[TASK], conditions=[], keep={},
        schedules=[], boot_id=None, clock=clock, lost_claims=LostClaims(clock), post=lambda what: None,
    )  # fmt: skip

    for _ in range(4):
        maintenance.step()  # no time passes between them

    jobs = [store.job(id) for id in ids]
    assert [job.state for job in jobs] == ["scheduled"] * 1000 + ["waiting"] * 1200
    waits = sorted(job.due_at - clock.now() for job in jobs[:1000])
    assert waits[0] >= SECOND // 2
    assert waits[-1] <= SECOND * 3 // 4
    windows = Counter(wait * 100 // SECOND for wait in waits)
    assert max(windows.values()) < 3 * 1000 / 25  # of ten milliseconds each


def test_the_jobs_of_a_buried_node_are_judged_and_go_on(store):
    joined(store, 1)
    ids = enqueued(store, 3)
    jobs = claimed(store, 4)
    store.mark_started([(ids[0], 1, CLAIM, 5)])
    store.cancel(ids[1], "not needed")
    seen: list[Orphan] = []

    def judge(orphan: Orphan, now: int) -> Ending:
        seen.append(orphan)
        return loss(orphan, now)

    assert store.nodes.declare_dead(1, judge) == ids

    assert [(o.id, o.attempt, o.claim, o.task) for o in seen] == [
        (id, 1, CLAIM, TASK) for id in ids
    ]
    assert [(o.started_mark, o.cancel_requested) for o in seen] == [
        (5, None),
        (None, "cancel"),
        (None, None),
    ]
    assert states(store, ids) == ["waiting", "cancelled", "waiting"]
    assert [store.job(id).losses for id in ids] == [1, 1, 1]
    assert [(a.attempt, a.cause, a.node) for a in store.attempts_of(ids[0])] == [
        (1, "node lost", 1)
    ]
    assert store.attempts_of(ids[2]) == []
    assert not store.nodes.renew(1).alive
    assert store.nodes.live() == []
    assert store.finish(1, [success(job) for job in jobs]) == set()


def test_what_the_dead_held_is_run_by_the_living_and_the_dead_cannot_overwrite_it(store):
    joined(store, 1)
    slow = running(store)
    store.nodes.declare_dead(1, loss)
    joined(store, 2)
    (fast,) = claimed(store, node=2, claim=78)

    assert store.finish(1, [success(slow)]) == set()
    assert store.end(1, [ending(slow)]) == set()
    assert store.finish(2, [success(fast, claim=78)]) == {fast.id}
    assert store.nodes.declare_dead(2, loss) == []


def test_a_node_is_buried_once(store, url):
    joined(store)
    ids = enqueued(store, 40)
    claimed(store, 32)

    taken = together(6, lambda _: store.nodes.declare_dead(1, loss))

    assert sorted(id for got in taken for id in got) == ids[:32]
    assert {store.job(id).losses for id in ids[:32]} == {1}
    assert rows(url, "SELECT count(*) FROM genba.event WHERE kind = 'node_lost'")[0][0] == 1


def test_more_than_one_call_may_be_needed(store):
    joined(store)
    enqueued(store, 600)
    claimed(store, 512)
    claimed(store, 64)

    assert len(store.nodes.declare_dead(1, loss)) == 500
    assert store.nodes.left_behind() == [1]
    assert len(store.nodes.take_over_jobs(1, loss)) == 76
    assert store.nodes.left_behind() == []


def test_jobs_of_a_node_that_left_or_vanished_are_found(store, url):
    joined(store, 1)
    joined(store, 2)
    joined(store, 3)
    enqueued(store, 3)
    for node in (1, 2, 3):
        claimed(store, node=node)
    store.nodes.leave(1)
    with connection(url) as conn:
        table = "genba_node" if url.startswith("sqlite") else "genba.node"
        conn.execute(f"DELETE FROM {table} WHERE id = 2")

    assert store.nodes.left_behind() == [1, 2]
    assert len(store.nodes.take_over_jobs(2, loss)) == 1


def test_the_dead_are_forgotten_when_nothing_is_left_of_them(store, clock):
    joined(store, 1)
    joined(store, 2)
    job = running(store)
    store.nodes.leave(1)
    store.nodes.leave(2)
    clock.advance(1)

    assert store.nodes.forget(clock.now()) == 1
    assert store.nodes.names() == {1: "node-1"}
    store.nodes.take_over_jobs(1, loss)
    assert store.nodes.forget(clock.now()) == 1
    assert state(store, job.id) == "waiting"


def test_a_namespace_does_not_see_the_nodes_of_another(store, url, clock):
    joined(store, 1, name="n")
    with closing(open_store(url, namespace="other", clock=clock)) as other:
        joined(other, 2, name="n")
        one(store)
        assert claimed(other, node=2) == []
        assert [node.id for node in other.nodes.live()] == [2]


# presence: hints


def test_a_node_that_is_present_is_no_suspect(store, url, clock):
    joined(store, 1)
    joined(store, 2)
    with closing(open_store(url, clock=clock)) as first:
        first.node_wakeups.register(1)
        assert [node.id for node in store.nodes.suspects(store.nodes.live(), me=9)] == [2]
        assert [node.id for node in store.nodes.suspects(store.nodes.live(), me=2)] == []
        first.node_wakeups.unregister()  # PostgreSQL frees the lock when it has noticed
        eventually(
            lambda: [node.id for node in store.nodes.suspects(store.nodes.live(), me=2)] == [1]
        )


def test_an_idle_node_hears_of_new_work(store, url, clock):
    joined(store, 1)
    with closing(open_store(url, clock=clock)) as node:
        node.node_wakeups.register(1)
        try:
            node.nodes.hungry(1, True)
            one(store)
            assert select.select([node.node_wakeups.fileno()], [], [], 5)[0]
            node.node_wakeups.clear()
            (job,) = claimed(node)
            store.cancel(job.id, None)
            assert select.select([node.node_wakeups.fileno()], [], [], 5)[0]
        finally:
            node.node_wakeups.unregister()


def test_on_postgres_a_single_job_calls_a_hungry_node_by_its_own_insert(
    store, engine, url, clock, monkeypatch
):
    if engine == "sqlite":
        pytest.skip("wake-ups on SQLite do not ask the database")
    joined(store, 1)
    monkeypatch.setattr(enqueue, "WAKE_AGAIN_SECONDS", 0.0)
    monkeypatch.delattr(type(store.node_wakeups), "wake_nodes")  # a second round trip
    with closing(open_store(url, clock=clock)) as node:
        node.node_wakeups.register(1)
        try:
            node.nodes.hungry(1, True)
            one(store, queue="other")
            assert not select.select([node.node_wakeups.fileno()], [], [], 0)[0]
            one(store)
            assert select.select([node.node_wakeups.fileno()], [], [], 5)[0]
            assert [seen.hungry for seen in store.nodes.live()] == [False]
        finally:
            node.node_wakeups.unregister()


def test_a_job_soon_after_another_one_calls_a_hungry_node_too(store, url, clock, monkeypatch):
    joined(store, 1)
    monkeypatch.setattr(enqueue, "WAKE_AGAIN_SECONDS", 3600.0)
    one(store, queue="other")
    with closing(open_store(url, clock=clock)) as node:
        node.node_wakeups.register(1)
        try:
            node.nodes.hungry(1, True)
            one(store)
            assert select.select([node.node_wakeups.fileno()], [], [], 5)[0]
            assert (
                not any(seen.hungry for seen in store.nodes.live()) or store.parallel_writers == 1
            )
        finally:
            node.node_wakeups.unregister()


def test_on_postgres_a_desk_that_finds_nothing_looks_again(store, engine):
    if engine == "sqlite":
        pytest.skip("there an enqueue always wakes after the commit")
    posts: queue.Queue = queue.Queue()
    joined(store, 1)
    writer = Writer("claimer", store, 1, [TASK], LostClaims(SystemClock()), posts.put)
    writer.start()
    try:
        writer.claim({"default": 1})
        assert posts.get(timeout=10).jobs == []
        assert isinstance(posts.get(timeout=10), WorkAvailable)
        assert [seen.hungry for seen in store.nodes.live()] == [True]
    finally:
        writer.finish(10)


# commands and reports


def test_a_node_gets_the_commands_for_itself_only(store):
    joined(store, 7, name="one")
    joined(store, 8, name="two")

    store.nodes.command(7, "set", '{"max":4}')
    store.nodes.command(7, "drain")

    assert store.nodes.commands(8) == []
    assert [(one.verb, one.data) for one in store.nodes.commands(7)] == [
        ("set", '{"max":4}'),
        ("drain", None),
    ]
    assert store.nodes.commands(7) == []


def test_a_node_may_change_its_size_and_tell_what_happens(store, url):
    joined(store, 7, slots=2)

    store.nodes.resize(7, 5, {"pool": "dynamic", "min": 1, "max": 5})
    store.nodes.tell(7, [("gate_closed", {"reason": "load"}), ("gate_opened", {})])

    assert [(node.slots, node.pool) for node in store.nodes.live()] == [
        (5, '{"pool":"dynamic","min":1,"max":5}')
    ]
    reported = rows(
        url, "SELECT kind, node, data FROM genba.event WHERE kind LIKE 'gate%' ORDER BY seq"
    )
    assert [(kind, node, data and bytes(data)) for kind, node, data in reported] == [
        ("gate_closed", 7, b'{"reason":"load"}'),
        ("gate_opened", 7, None),
    ]


def test_dedicated_jobs_can_be_claimed_past_those_that_wait_before_them(store):
    joined(store)
    enqueued(store, 3)
    mine = [one(store, options='{"timeout":5,"dedicated":true}') for _ in range(3)]
    one(store, options='{"dedicated":true}', task="unknown")

    got = store.claims.claim_dedicated(1, CLAIM, ["default"], [TASK], 2)

    assert [job.id for job in got] == mine[:2]
    assert states(store, mine) == ["running", "running", "waiting"]
    assert [
        job.id for job in store.claims.claim_dedicated(1, CLAIM, ["default"], [TASK], 2)
    ] == mine[2:]
    assert store.claims.claim_dedicated(1, CLAIM, ["default"], [TASK], 2) == []
    store.nodes.drain(1)
    one(store, options='{"dedicated":true}')
    assert store.claims.claim_dedicated(1, CLAIM, ["default"], [TASK], 2) == []
