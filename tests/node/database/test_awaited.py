"""Awaited jobs: claimed ahead of their queue, and whether anything can end the wait for them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.storage.builders import CLAIM, TASK, enqueued, joined, one, states

from genba.node.database.awaited import can_end
from genba.node.decide.actions import CheckAwaited


def claim_awaited(store, *ids: int, queues: tuple[str, ...] = ("default",)) -> list[int]:
    jobs = store.claims.claim_awaited(1, CLAIM, queues, [TASK], ids)
    return [job.id for job in jobs]


def look(*ids: int, **given: Any) -> CheckAwaited:
    values = {"waiting": frozenset(), "slot_free": False, "dedicated_free": False, **given}
    return CheckAwaited(ids, **values)


def test_an_awaited_job_is_claimed_past_those_that_wait_before_it(store):
    joined(store)
    enqueued(store, 3)
    first, second = enqueued(store, 2)

    assert claim_awaited(store, second, first) == [second]
    assert claim_awaited(store, second, first) == [first]
    assert claim_awaited(store, second, first) == []
    assert states(store, [first, second]) == ["running", "running"]


def test_an_awaited_job_that_may_not_start_is_not_claimed(store):
    joined(store)
    waiting = [
        one(store, delay=3_600_000_000),
        one(store, queue="elsewhere"),
        one(store, task="unknown"),
        one(store, options='{"dedicated":true}'),
        one(store) + 1_000,
    ]

    assert claim_awaited(store, *waiting) == []
    store.operators.pause("default", None, "me", None)
    assert claim_awaited(store, one(store)) == []


def test_a_wait_can_end_if_an_awaited_job_ended_or_runs_without_waiting(store):
    joined(store)
    mine, other = enqueued(store, 2)

    assert not can_end(store, 1, look(mine, other))
    assert claim_awaited(store, mine) == [mine]
    assert can_end(store, 1, look(mine, other))
    assert not can_end(store, 1, look(mine, other, waiting=frozenset({mine})))
    store.cancel(other, None)
    assert can_end(store, 1, look(mine, other, waiting=frozenset({mine})))
    assert can_end(store, 1, look(other + 1_000))


@pytest.mark.parametrize(
    ("node", "can"),
    [
        ({}, True),
        ({"queues": ("other",)}, False),
        ({"tasks": ({"name": "other"},)}, False),
    ],
)
def test_a_wait_can_end_if_another_live_node_serves_queue_and_task(store, node, can):
    joined(store)
    id = one(store)
    joined(store, 2, **node)

    assert can_end(store, 1, look(id)) is can
    store.nodes.drain(2)
    assert not can_end(store, 1, look(id))


def test_a_wait_can_end_if_what_the_awaited_job_needs_is_free_here(store):
    joined(store)
    plain, dedicated = one(store), one(store, options='{"dedicated":true}')

    assert can_end(store, 1, look(plain, slot_free=True))
    assert not can_end(store, 1, look(plain, dedicated_free=True))
    assert can_end(store, 1, look(dedicated, dedicated_free=True))
    assert not can_end(store, 1, look(dedicated, slot_free=True))
