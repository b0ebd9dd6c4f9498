"""A claim whose answer is lost may have been granted: its jobs are looked for, and given to the brain once."""

from __future__ import annotations

from tests.storage.builders import claimed, enqueued, joined

from genba.domain.clock import ManualClock
from genba.node.doubts import LASTING, Doubts


def test_what_a_lost_claim_has_taken_is_found_once(store, clock):
    joined(store)
    ids = enqueued(store, 2)
    doubts = Doubts(clock)
    doubts.note(5)
    assert doubts.found(5, store.of_claim(1, 5)) == []

    taken = claimed(store, 2, claim=5)  # the server carries it out late, and nobody hears of it

    assert store.of_claim(1, 5) == taken
    assert [job.id for job in doubts.found(5, store.of_claim(1, 5))] == ids
    assert doubts.found(5, store.of_claim(1, 5)) == []
    assert store.of_claim(1, 6) == store.of_claim(2, 5) == []


def test_a_doubt_lasts_longer_than_any_statement():
    clock = ManualClock(0)
    doubts = Doubts(clock)
    doubts.note(1)
    clock.advance(20)
    doubts.note(2)

    assert doubts.open() == [1, 2]
    clock.advance(LASTING / 1_000_000 - 20)
    assert doubts.open() == [2]
