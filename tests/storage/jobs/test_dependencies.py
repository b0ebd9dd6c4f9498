"""A job starts after those it waits for, whatever becomes of them and whenever they end."""

from __future__ import annotations

import pytest
from tests.storage.builders import (
    HOUR,
    a_job,
    after,
    claimed,
    connection,
    ending,
    enqueued,
    finish,
    joined,
    one,
    rows,
    settle,
    state,
    states,
    success,
    together,
    transaction,
)

from genba.errors import JobNotFound
from genba.storage.records import Edge

on_postgres = pytest.mark.parametrize(
    "engine", ["postgres"], indirect=True
)  # SQLite has one writer at a time


@pytest.fixture(autouse=True)
def _node(store):
    joined(store)


def policy(name: str) -> str:
    return f'{{"on_dependency_failure": "{name}"}}'


@pytest.mark.parametrize(
    ("wants", "end", "becomes"),
    [
        ("success", "succeeded", "waiting"),
        ("success", "failed", "cancelled"),
        ("success", "timed_out", "cancelled"),
        ("success", "cancelled", "cancelled"),
        ("finished", "succeeded", "waiting"),
        ("finished", "failed", "waiting"),
        ("failure", "failed", "waiting"),
        ("failure", "succeeded", "cancelled"),
    ],
)
def test_a_child_gets_what_it_wants_or_is_cancelled(store, wants, end, becomes):
    parent = one(store)
    child = one(store, after=after(parent, wants=wants))
    assert state(store, child) == "blocked"

    finish(store, parent, end)
    settle(store)

    assert state(store, child) == becomes
    if becomes == "cancelled":
        word = "failed" if wants == "success" else "succeeded"
        assert store.job(child).reason == f"dependency {word}: job {parent} ended {end}"


@pytest.mark.parametrize(
    ("name", "becomes"), [("cancel", "cancelled"), ("hold", "held"), ("run", "waiting")]
)
def test_a_policy_says_what_a_broken_dependency_means(store, name, becomes):
    parent = one(store)
    child = one(store, after=after(parent), options=policy(name))

    finish(store, parent, "failed")
    settle(store)

    assert state(store, child) == becomes


def test_a_child_waits_for_all_its_parents(store):
    parents = enqueued(store, 3)
    child = one(store, after=after(*parents))

    for parent in parents:
        assert state(store, child) == "blocked"
        assert [parent.id for parent in store.dependencies.open_parents(child)] == parents[
            parents.index(parent) :
        ]
        finish(store, parent)
        settle(store)

    assert state(store, child) == "waiting"
    assert store.dependencies.open_parents(child) == []
    assert store.dependencies.results_of_parents(child) == [(parent, b"3") for parent in parents]


def test_a_failure_goes_down_the_whole_chain(store):
    first = one(store)
    second = one(store, after=after(first))
    third = one(store, after=after(second))
    bystander = one(store, after=after(second, wants="finished"))

    store.cancel(first, None)
    settle(store)

    assert states(store, [second, third, bystander]) == ["cancelled", "cancelled", "waiting"]


def test_a_child_with_a_moment_of_its_own_waits_for_that_too(store, clock):
    parent = one(store)
    child = one(store, after=after(parent), delay=HOUR)

    finish(store, parent)
    settle(store)

    assert state(store, child) == "scheduled"
    clock.advance("1h")
    assert store.promote() == 1


@pytest.mark.parametrize(("end", "becomes"), [("succeeded", "waiting"), ("failed", "cancelled")])
def test_a_parent_that_is_final_already_counts(store, end, becomes):
    parent = one(store)
    finish(store, parent, end)

    child = one(store, after=after(parent))

    assert state(store, child) == becomes


def test_a_graph_comes_in_as_a_whole(store):
    a, b, c, d = (
        made.id
        for made in store.enqueue(
            [
                a_job(),
                a_job(after=(Edge(0, inside=True),)),
                a_job(after=(Edge(0, inside=True),)),
                a_job(after=(Edge(1, inside=True), Edge(2, "finished", inside=True))),
            ]
        )
    )
    assert states(store, [a, b, c, d]) == ["waiting", "blocked", "blocked", "blocked"]
    for parent, end in ((a, "succeeded"), (b, "succeeded"), (c, "failed")):
        assert state(store, d) == "blocked"
        finish(store, parent, end)
        settle(store)
    assert state(store, d) == "waiting"


def test_an_edge_to_a_later_job_of_the_batch_is_refused(store):
    with pytest.raises(JobNotFound):
        store.enqueue([a_job(after=(Edge(1, inside=True),)), a_job()])


def test_an_unknown_parent_is_refused_by_its_number(store):
    parent = one(store)
    with pytest.raises(JobNotFound, match=r"no job 555, 666$"):
        store.enqueue([a_job(after=after(parent, 666, 555))])


def test_the_same_parent_twice_is_one_dependency(store):
    parent = one(store)
    child = one(store, after=after(parent, parent))

    finish(store, parent)
    settle(store)

    assert (store.job(child).state, store.job(child).open_deps) == ("waiting", 0)


def test_a_child_that_was_cancelled_stays_so(store):
    parent = one(store)
    child = one(store, after=after(parent))
    store.cancel(child, "not needed")

    finish(store, parent)
    settle(store)

    assert (store.job(child).state, store.job(child).reason) == ("cancelled", "not needed")


def test_a_held_child_resumes_to_what_is_open(store):
    parent = one(store)
    child = one(store, after=after(parent))
    store.hold(child, "why")
    store.resume(child)
    assert state(store, child) == "blocked"
    store.hold(child, "why")

    finish(store, parent)
    settle(store)

    assert state(store, child) == "held"
    store.resume(child)
    assert state(store, child) == "waiting"


def test_a_cancel_is_seen_by_the_children_at_once(store):
    parent = one(store)
    child = one(store, after=after(parent))

    store.cancel(parent, None)

    assert state(store, child) == "cancelled"


def test_an_expired_parent_breaks_its_dependency(store, clock):
    parent = one(store, expires_in=HOUR)
    child = one(store, after=after(parent))
    clock.advance("1h")

    store.expire()
    settle(store)

    assert state(store, child) == "cancelled"


@pytest.mark.parametrize("name", ["cancel", "hold"])
def test_a_requeued_parent_takes_its_children_with_it(store, name):
    parent = one(store)
    child = one(store, after=after(parent), options=policy(name))
    finish(store, parent, "failed")
    settle(store)

    assert store.requeue(parent)
    settle(store)

    assert states(store, [parent, child]) == ["waiting", "blocked"]
    finish(store, parent)
    settle(store)
    assert state(store, child) == "waiting"


def test_a_requeued_parent_does_not_count_twice_for_a_child_that_was_let_go(store):
    """Resumed by hand, the child waits for its second parent only; the first must not stand in for it."""
    first, second = enqueued(store, 2)
    child = one(store, after=after(first, second), options=policy("hold"))
    finish(store, first, "failed")
    settle(store)
    store.resume(child)

    store.requeue(first)
    finish(store, first)
    settle(store)

    assert state(store, child) == "blocked"
    finish(store, second)
    settle(store)
    assert state(store, child) == "waiting"


def test_one_requeued_parent_of_two_failed_is_not_enough(store):
    first, second = enqueued(store, 2)
    child = one(store, after=after(first, second))
    finish(store, first, "failed")
    finish(store, second, "failed")
    settle(store)

    store.requeue(first)
    settle(store)
    finish(store, first)
    settle(store)
    assert state(store, child) == "cancelled"

    store.requeue(second)
    settle(store)
    assert state(store, child) == "blocked"
    finish(store, second)
    settle(store)
    assert state(store, child) == "waiting"


def test_a_cancelled_child_is_not_brought_back(store):
    parent = one(store)
    child = one(store, after=after(parent), options=policy("hold"))
    finish(store, parent, "failed")
    settle(store)
    store.cancel(child, "by hand")

    store.requeue(parent)

    assert state(store, child) == "cancelled"


def test_a_parent_that_other_jobs_wait_for_is_not_pruned(store, clock):
    parent = one(store)
    child = one(store, after=after(parent))
    finish(store, parent)
    clock.advance(1)

    assert store.prune(clock.now()) == 0
    settle(store)
    assert state(store, child) == "waiting"
    assert store.prune(clock.now()) == 0  # it will read the result
    finish(store, child)
    assert store.prune(clock.now()) == 1


def test_nothing_is_left_to_look_at(store, url):
    parents = enqueued(store, 3)
    store.enqueue([a_job(after=after(*parents)) for _ in range(3)])
    for parent in parents:
        finish(store, parent)
    settle(store)

    assert rows(url, "SELECT count(*) FROM genba.unsettled")[0][0] == 0


# an edge and the end of its parent, at the same time


@on_postgres
def test_an_edge_in_an_open_transaction_sees_the_end_that_came_before_its_commit(store, url):
    parent = one(store)
    (job,) = claimed(store)
    with transaction(url) as conn:
        (child,) = store.enqueue([a_job(after=after(parent))], conn=conn)
        store.finish(1, [success(job)])
        settle(store)
        conn.execute("COMMIT")

    settle(store)
    assert state(store, child.id) == "waiting"


@on_postgres
def test_an_edge_that_commits_while_its_parent_ends_is_not_forgotten(store, url):
    parent = one(store)
    (job,) = claimed(store)
    with connection(url) as conn:
        conn.execute(
            "BEGIN"
        )  # a finish that has looked for children, found none, and is about to commit
        conn.execute(
            "UPDATE genba.job SET state = 'succeeded', claim_id = NULL, node = NULL, finished_at = 1 WHERE id = %s",
            (job.id,),
        )
        child = one(store, after=after(parent))
        assert store.settle() == 0
        assert state(store, child) == "blocked"
        conn.execute("COMMIT")

    settle(store)
    assert state(store, child) == "waiting"


def test_an_edge_before_the_end_of_its_parent_is_seen_by_that_end(store, url):
    parent = one(store)
    (job,) = claimed(store)
    with transaction(url) as conn:
        (child,) = store.enqueue([a_job(after=after(parent))], conn=conn)
        conn.execute("COMMIT")
    settle(store)
    assert state(store, child.id) == "blocked"

    store.finish(1, [success(job)])
    settle(store)

    assert state(store, child.id) == "waiting"


def test_parents_that_end_while_children_come_release_them_all(store):
    parents = enqueued(store, 32)
    jobs = claimed(store, 32)

    def act(i: int) -> list[int]:
        if i % 2:
            for job in jobs[i // 2 :: 4]:
                store.finish(1, [success(job)])
                store.settle()
            return []
        return [one(store, after=after(parents[n], parents[-1 - n])) for n in range(i // 2, 32, 4)]

    children = [id for made in together(8, act) for id in made]
    settle(store)

    assert set(states(store, children)) == {"waiting"}


def test_processes_that_settle_shared_children_do_not_block_each_other(store):
    parents = enqueued(store, 24)
    children = [one(store, after=after(*parents[:: -1 if i % 2 else 1])) for i in range(12)]
    jobs = claimed(store, 16) + claimed(store, 8)

    def act(i: int) -> None:
        for job in jobs[i::6]:
            store.finish(1, [success(job)])
            store.settle()

    together(6, act)
    settle(store)

    assert set(states(store, children)) == {"waiting"}


def test_a_release_is_no_end(store):
    parent = one(store)
    child = one(store, after=after(parent))
    (job,) = claimed(store)
    store.end(1, [ending(job, "waiting", "drain", happened=False)])
    settle(store)
    assert state(store, child) == "blocked"


@on_postgres
def test_a_job_requeued_while_it_is_pruned_is_not_lost(store, url, clock):
    id = one(store)
    finish(store, id, "failed")
    clock.advance(1)
    with connection(url) as conn:
        conn.execute("BEGIN")  # a requeue that is about to commit
        conn.execute(
            "UPDATE genba.job SET state = 'waiting', finished_at = NULL WHERE id = %s", (id,)
        )

        def act(i: int) -> object:
            if i == 0:
                return store.prune(clock.now())
            with connection(url) as eye:  # until the other one waits for the row
                while not eye.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
                    pass
            return conn.execute("COMMIT")

        assert together(2, act)[0] == 0

    assert state(store, id) == "waiting"


# graphs and families


def test_a_requeued_graph_goes_on_from_what_failed(store):
    """a → b (fails) → c → d, and e after a: what has succeeded does not run again, the rest waits as before."""
    a, b, c, d, e = (
        made.id
        for made in store.enqueue(
            [a_job(), *(a_job(after=(Edge(i, inside=True),)) for i in (0, 1, 2, 0))],
        )
    )
    finish(store, a)
    settle(store)
    finish(store, b, "failed")
    settle(store)
    assert states(store, [a, b, c, d, e]) == [
        "succeeded",
        "failed",
        "cancelled",
        "cancelled",
        "waiting",
    ]

    assert store.requeue_failed([a, b, c, d, e]) == 1

    assert states(store, [a, b, c, d, e]) == [
        "succeeded",
        "waiting",
        "blocked",
        "blocked",
        "waiting",
    ]
    for id in (b, c, d):
        finish(store, id)
        settle(store)


def test_a_thousand_dependencies_and_a_diamond(store):
    first = one(store)
    middle = [made.id for made in store.enqueue([a_job(after=after(first)) for _ in range(1000)])]
    last = one(store, after=after(*middle))
    finish(store, first)
    settle(store)

    for job in claimed(store, 512) + claimed(store, 512):
        store.finish(1, [success(job)])
    settle(store)

    assert (state(store, last), len(store.dependencies.results_of_parents(last))) == (
        "waiting",
        1000,
    )


def test_parents_that_end_together_free_each_child_as_it_wished(store):
    parents = [one(store) for _ in range(3)]
    all_of_them = one(store, after=after(*parents))
    some = one(store, after=after(*parents[:2]))
    hopes_in_vain = one(store, after=after(parents[0], wants="failure"))
    other = one(store)
    waits_on = one(store, after=after(*parents, other))
    jobs = [job for job in claimed(store, 8) if job.id in parents]

    store.finish(1, [success(job) for job in jobs])
    settle(store)

    found = store.states([all_of_them, some, hopes_in_vain, waits_on])
    assert found == {
        all_of_them: "waiting",
        some: "waiting",
        hopes_in_vain: "cancelled",
        waits_on: "blocked",
    }
    assert [parent.id for parent in store.dependencies.open_parents(waits_on)] == [other]


def test_children_beyond_one_step_are_not_forgotten(store):
    parent = one(store)
    children = [
        made.id for made in store.enqueue([a_job(after=after(parent)) for _ in range(2500)])
    ]

    finish(store, parent)
    settle(store)

    assert set(store.states(children).values()) == {"waiting"}


def delete(url: str, id: int) -> None:
    with connection(url) as conn:
        table = "genba_job" if url.startswith("sqlite") else "genba.job"
        conn.execute(f"DELETE FROM {table} WHERE id = {id}")


@pytest.mark.parametrize(
    ("wants", "becomes"),
    [("success", "cancelled"), ("failure", "cancelled"), ("finished", "waiting")],
)
def test_a_parent_that_was_deleted_by_hand_has_finished_but_neither_well_nor_badly(
    store, url, wants, becomes
):
    parent = one(store)
    child = one(store, after=after(parent, wants=wants))
    delete(url, parent)

    assert store.dependencies.look_for_lost() == 1
    settle(store)

    assert state(store, child) == becomes
    if becomes == "cancelled":
        assert store.job(child).reason == f"dependency failed: job {parent} was deleted"
    assert store.dependencies.look_for_lost() == 0


def test_a_parent_that_was_deleted_before_the_insert_is_refused(store, url):
    parent = one(store)
    delete(url, parent)
    with pytest.raises(JobNotFound, match=f"no job {parent}"):
        one(store, after=after(parent))


def test_a_requeue_between_the_end_and_the_look_leaves_the_child_waiting_for_it(store):
    parent = one(store)
    child = one(store, after=after(parent))
    finish(store, parent, "failed")
    store.requeue(parent)

    settle(store)
    assert state(store, child) == "blocked"

    finish(store, parent)
    settle(store)
    assert state(store, child) == "waiting"


@pytest.mark.parametrize(
    ("end", "becomes"),
    [("cancelled", "cancelled"), ("timed_out", "cancelled"), ("failed", "waiting")],
)
def test_a_cancelled_or_timed_out_job_takes_its_open_children_with_it(store, end, becomes):
    parent = one(store)
    child, ended = enqueued(store, 2, parent_id=parent)
    grandchild = one(store, parent_id=child, delay=HOUR)
    finish(store, ended)

    finish(store, parent, end)
    settle(store)

    assert states(store, [child, ended]) == [becomes, "succeeded"]
    if becomes == "cancelled":
        assert state(store, grandchild) == "cancelled"
        assert store.job(child).reason == f"parent ended: job {parent} ended {end}"


def test_a_running_child_is_asked_to_stop_when_its_parent_is_cancelled(store):
    parent = one(store, delay=HOUR)
    one(store, parent_id=parent)
    (child,) = claimed(store)

    store.cancel(parent, None)

    assert store.job(child.id).cancel_requested == "cancel"
    assert [command.job_id for command in store.nodes.commands(1)] == [child.id]
    assert store.settle() == 0


def test_a_whole_group_is_cancelled_in_one_go(store):
    ids = enqueued(store, 700)
    finish(store, ids[0])
    (job,) = claimed(store)

    assert store.cancel_all(ids, "not needed") == 699

    assert (state(store, ids[0]), state(store, ids[-1])) == ("succeeded", "cancelled")
    assert store.job(job.id).cancel_requested == "cancel"
