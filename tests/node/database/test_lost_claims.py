"""A claim whose answer is lost may have been granted: its jobs are looked for, and given to the brain once."""

from __future__ import annotations

from tests.storage.builders import claimed, enqueued, joined

from genba.domain.clock import ManualClock
from genba.node.database.lost_claims import LostClaims
from genba.node.timing import LOST_CLAIM_US

SECONDS = LOST_CLAIM_US // 1_000_000


def test_what_a_lost_claim_has_taken_is_found_once(store, clock):
    joined(store)
    ids = enqueued(store, 2)
    lost_claims = LostClaims(clock)
    lost_claims.note(5)
    assert lost_claims.found(5, store.claims.jobs_of_claim(1, 5)) == []

    taken = claimed(store, 2, claim=5)  # the server carries it out late, and the answer is lost

    assert store.claims.jobs_of_claim(1, 5) == taken
    assert [job.id for job in lost_claims.found(5, store.claims.jobs_of_claim(1, 5))] == ids
    assert lost_claims.found(5, store.claims.jobs_of_claim(1, 5)) == []
    assert store.claims.jobs_of_claim(1, 6) == store.claims.jobs_of_claim(2, 5) == []


def test_a_doubt_is_looked_at_until_it_cannot_happen_any_more():
    clock = ManualClock(0)
    lost_claims = LostClaims(clock)
    lost_claims.note(7)

    for _ in range(3):
        assert lost_claims.open() == [7]
        assert lost_claims.found(7, []) == []
    clock.advance(SECONDS + 1)

    assert lost_claims.open() == [7]
    lost_claims.found(7, [])
    assert lost_claims.open() == []


def test_a_doubt_outlives_an_outage_in_which_the_database_cannot_be_asked():
    clock = ManualClock(0)
    lost_claims = LostClaims(clock)
    lost_claims.note(7)

    for _ in range(10):
        clock.advance(SECONDS)
        assert lost_claims.open() == [7]  # and the look fails


def test_a_look_that_began_too_early_is_not_the_last_one():
    clock = ManualClock(0)
    lost_claims = LostClaims(clock)
    lost_claims.note(7)

    assert lost_claims.open() == [7]
    clock.advance(SECONDS + 1)  # suspended between the look and its answer
    lost_claims.found(7, [])

    assert lost_claims.open() == [7]
