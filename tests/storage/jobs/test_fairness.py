"""A fair queue: a late tenant is served at once, and equals get equal shares."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.storage.builders import CLAIM, TASK, a_job, ending, joined, one, rows, success

from genba.storage.records import Claimed
from genba.storage.store import Store

TENTH = 10


def flood(store: Store, key: str, count: int, **given: object) -> None:
    store.enqueue(
        [a_job(queue="fair", fair_key=key, fair_by="tenant", **given) for _ in range(count)]
    )


def claim(store: Store, count: int) -> list[Claimed]:
    return store.claim(1, CLAIM, {"fair": count}, [TASK])


def drained(store: Store, keys: dict[int, str], most: int, step: int = 16) -> list[str]:
    """The keys in the order in which their jobs started."""
    order: list[str] = []
    while len(order) < most and (jobs := claim(store, step)):
        store.finish(1, [success(job) for job in jobs])
        order += [keys[job.id] for job in jobs]
    return order


def keys_of(url: str) -> dict[int, str]:
    return dict(rows(url, "SELECT id, fair_key FROM genba.job"))


def jain(shares: list[int]) -> float:
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def late_wait(store: Store, url: str, flooding: int, late: int) -> float:
    """The median place of the late tenant's jobs, as a share of all that the other one has."""
    joined(store)
    flood(store, "A", flooding)
    taken = claim(store, 16)
    store.finish(1, [success(job) for job in taken])
    flood(store, "B", late)
    order = drained(store, keys_of(url), 10 * late, 64)
    places = [place for place, key in enumerate(order) if key == "B"]
    assert len(places) == late
    return places[late // 2] / flooding


def test_a_tenant_that_comes_after_a_flood_is_served_at_once(store, url):
    assert late_wait(store, url, 50_000 // TENTH // 2, 100 // TENTH // 2) < 0.02


@pytest.mark.soak
def test_a_tenant_that_comes_after_a_flood_of_fifty_thousand_is_served_at_once(store, url):
    assert late_wait(store, url, 50_000, 100) < 0.02


def test_four_tenants_of_equal_weight_get_equal_shares_at_every_moment(store, url):
    joined(store)
    for key in "ABCD":
        flood(store, key, 200)
    order = drained(store, keys_of(url), 400)
    for upto in (100, 200, 400):
        shares = Counter(order[:upto])
        assert jain([shares[key] for key in "ABCD"]) >= 0.95


def test_a_tenant_that_was_away_has_saved_up_nothing(store, url):
    joined(store)
    flood(store, "A", 1)
    flood(store, "B", 100)
    drained(store, keys_of(url), 61, 4)
    flood(store, "A", 30)
    order = drained(store, keys_of(url), 20, 4)
    assert abs(Counter(order)["A"] - 10) <= 3


def test_inside_a_key_it_is_first_come_first_served_and_priority_goes_first(store):
    joined(store)
    flood(store, "A", 5)
    flood(store, "A", 1, priority=1)
    first, *rest = [job.id for job in claim(store, 8)]
    assert first > max(rest)
    assert rest == sorted(rest)


def test_what_becomes_due_takes_its_turn_like_the_others(store, url, clock):
    joined(store)
    flood(store, "A", 50, delay=1_000_000)
    flood(store, "B", 10)
    clock.advance(1)
    store.promote()
    assert store.fairness.rank_unranked() == 50
    assert Counter(drained(store, keys_of(url), 8, 4)[:8]) == {"A": 4, "B": 4}


def test_a_job_that_is_released_resumed_or_requeued_has_a_place_again(store):
    joined(store)
    flood(store, "A", 3)
    first, second, _ = claim(store, 4)
    store.end(1, [ending(first, "waiting", "drain", happened=False), ending(second, "failed")])
    assert [job.id for job in claim(store, 4)] == [first.id]
    store.requeue(second.id)
    assert store.fairness.rank_unranked() == 1
    assert [job.id for job in claim(store, 4)] == [second.id]


def test_a_job_without_a_place_is_still_claimed_if_nothing_else_waits(store, clock):
    joined(store)
    flood(store, "A", 1, delay=1_000_000)
    clock.advance(1)
    store.promote()
    assert len(claim(store, 1)) == 1


def test_a_queue_stays_plain_until_a_task_says_otherwise_and_keys_are_forgotten(store, url):
    joined(store)
    one(store)
    assert store.operators.refresh().fair == {}
    assert store.fairness.forget_idle_keys() == 0
    flood(store, "A", 4)
    assert store.operators.refresh().fair == {"fair": "tenant"}
    drained(store, keys_of(url), 5, 4)
    assert store.fairness.forget_idle_keys() == 1
    assert rows(url, "SELECT * FROM genba.fair") == []


def test_a_node_declares_the_queue_of_a_fair_task(store):
    before = store.operators.refresh().epoch
    joined(store, tasks=({"name": TASK, "queue": "fair", "fair_by": "tenant"},))
    joined(store, 2, tasks=({"name": TASK, "queue": "fair", "fair_by": "tenant"},))
    rules = store.operators.refresh()
    assert (rules.fair, rules.epoch) == ({"fair": "tenant"}, before + 1)
