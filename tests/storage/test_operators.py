"""What operators decide holds at once, for everybody, and what waits meanwhile is not in the way."""

from __future__ import annotations

import msgspec
import pytest
from tests.storage.builders import (
    CLAIM,
    SECOND,
    TASK,
    a_job,
    claimed,
    ending,
    enqueued,
    joined,
    one,
    rows,
    state,
)

from genba.errors import UnknownTask
from genba.storage.operators import RulesChanged
from genba.storage.store import Store, open_store

OTHER = "shop.mail"


def switch(store: Store, enabled: bool, task: str = TASK) -> bool:
    return store.operators.switch(task, enabled, "ann@desk", "why", None)


def parked(store: Store) -> dict[str, int]:
    found: dict[str, int] = {}
    for why, _, count in store.operators.parked():
        found[why] = found.get(why, 0) + count
    return found


def test_a_disabled_task_leaves_the_claim_index_and_comes_back_in_its_old_order(store):
    joined(store, tasks=({"name": TASK}, {"name": OTHER}))
    jobs = enqueued(store, 3) + enqueued(store, 2, queue="slow")
    other = one(store, task=OTHER)

    assert switch(store, False)
    assert parked(store) == {f"disabled task {TASK}": 5}
    assert [job.id for job in store.claim(1, CLAIM, {"default": 8, "slow": 8}, [TASK, OTHER])] == [
        other
    ]

    assert switch(store, True)
    assert parked(store) == {}
    assert [
        job.id for job in store.claim(1, CLAIM, {"default": 8, "slow": 8}, [TASK, OTHER])
    ] == jobs
    assert not switch(store, True)


def test_what_becomes_due_of_a_disabled_task_is_not_claimed_and_a_keeper_parks_it(store, clock):
    joined(store)
    later = one(store, delay=SECOND)
    running = one(store)
    (job,) = claimed(store)
    assert job.id == running
    switch(store, False)

    clock.advance(1)
    store.promote()
    store.end(1, [ending(job, "waiting", "drain", happened=False)])
    assert claimed(store, 8) == []
    assert {state(store, later), state(store, running)} == {"waiting"}

    store.operators.keep_parked()
    assert parked(store) == {f"disabled task {TASK}": 2}
    switch(store, True)
    assert {job.id for job in claimed(store, 8)} == {later, running}


def test_a_process_with_old_rules_neither_claims_nor_enqueues_by_them(store, url, clock):
    joined(store)
    one(store)
    old = store.operators.rules().epoch
    operator = open_store(url, clock=clock)
    operator.operators.switch(TASK, False, "ann@desk", None, None)
    operator.enqueue([a_job()])  # from somewhere that does not ask

    assert claimed(store, 8) == []
    for jobs in ([a_job()], [a_job()] * 2, [a_job(identity="x")]):
        with pytest.raises(RulesChanged):
            store.enqueue(jobs, epoch=old)
    assert store.operators.rules().disabled == {TASK}
    operator.close()


def test_a_keeper_ends_what_an_operator_has_left_half_done(store):
    joined(store)
    enqueued(store, 3)
    switch(store, False)
    with store._db.transaction() as tx:  # enabled by one that died before the jobs were back
        tx.run("switch_task", namespace="default", name=TASK, enabled=True, by="ann")
        tx.run("next_epoch", namespace="default")
    store.operators.refresh()

    assert store.operators.keep_parked()
    assert len(claimed(store, 8)) == 3  # 8 is a size: the largest that there is


def test_nothing_of_a_paused_queue_is_claimed_until_it_is_resumed(store):
    joined(store)
    one(store, queue="slow")
    quick = one(store)

    store.operators.pause("slow", None, "ann@desk", None)
    got = store.claim(1, CLAIM, {"slow": 4, "default": 4}, [TASK])
    assert [job.id for job in got] == [quick]

    assert store.operators.resume("slow", "ann@desk")
    assert not store.operators.resume("slow", "ann@desk")
    assert len(store.claim(1, CLAIM, {"slow": 4, "default": 4}, [TASK])) == 1


def test_a_pause_for_a_time_ends_by_itself(store, clock):
    joined(store)
    one(store)
    store.operators.pause("default", clock.now() + 5 * SECOND, "ann@desk", None)

    clock.advance(4)
    assert store.nodes.due_work(1, ["default"], [TASK]).pause_ends == clock.now() + SECOND
    assert store.operators.end_pauses() == []
    assert claimed(store) == []

    clock.advance(1)
    assert store.operators.end_pauses() == ["default"]
    assert len(claimed(store)) == 1


def test_every_change_records_its_actor(store, url):
    joined(store)
    switch(store, False)
    switch(store, True)
    store.operators.override(TASK, lambda old: {**old, "timeout": 5}, "bob@desk", None)
    store.operators.pause("default", None, "ann@desk", "rest")
    store.operators.resume("default", "bob@desk")

    reported = rows(
        url,
        "SELECT kind, data FROM genba.event WHERE kind LIKE 'task%' OR kind LIKE 'queue%' ORDER BY seq",
    )
    said = [(kind, msgspec.json.decode(bytes(data))) for kind, data in reported]
    assert [(kind, more["by"]) for kind, more in said] == [
        ("task_disabled", "ann@desk"),
        ("task_enabled", "ann@desk"),
        ("task_changed", "bob@desk"),
        ("queue_paused", "ann@desk"),
        ("queue_resumed", "bob@desk"),
    ]
    assert said[2][1]["changes"] == {"timeout": 5}


def test_an_unknown_task_cannot_be_switched(store):
    with pytest.raises(UnknownTask, match=r"no node has declared a task 'shop\.pay'"):
        switch(store, False)


def test_regression_19_an_operators_word_survives_that_many_nodes_declare_the_task(store):
    joined(store)
    store.operators.override(TASK, lambda old: {"timeout": 5}, "ann@desk", None)
    switch(store, False)
    epoch = store.operators.refresh().epoch
    for id in range(2, 6):
        joined(store, id, tasks=({"name": TASK, "timeout": 60},))

    rules = store.operators.refresh()
    assert (rules.epoch, rules.disabled, rules.overrides) == (epoch, {TASK}, {TASK: {"timeout": 5}})
    assert [record.name for record in store.operators.tasks()] == [TASK]
