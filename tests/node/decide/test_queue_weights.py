"""Queues share a node by weight, and a flood in one does not keep another from its share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from genba.node.decide.queue_weights import QueueWeights

WEIGHTS = {"render": 2, "default": 8}
PLENTY = {"render": 10_000, "default": 10_000}


def test_one_slot_is_shared_by_weight_over_time() -> None:
    shares, given_to = QueueWeights(), Counter[str]()
    for _ in range(1000):
        (queue,) = shares.divide(1, WEIGHTS, PLENTY)
        shares.record(queue, 1, WEIGHTS[queue])
        given_to[queue] += 1
    assert given_to == {"render": 200, "default": 800}


def test_a_large_wish_is_divided_by_weight_at_once() -> None:
    wants = QueueWeights().divide(1000, WEIGHTS, PLENTY)
    assert sum(wants.values()) == 1000
    assert abs(wants["render"] - 200) <= 40


def test_a_queue_without_room_gives_its_share_to_the_others() -> None:
    assert QueueWeights().divide(10, WEIGHTS, {"render": 1, "default": 100}) == {
        "render": 1,
        "default": 9,
    }
    assert QueueWeights().divide(10, WEIGHTS, {"render": 0, "default": 4}) == {"default": 4}


def test_a_queue_that_was_empty_has_saved_up_nothing() -> None:
    shares = QueueWeights()
    for _ in range(500):
        (queue,) = shares.divide(1, {"default": 8}, PLENTY)
        shares.record(queue, 1, 8)
    again = Counter[str]()
    for _ in range(50):
        (queue,) = shares.divide(1, WEIGHTS, PLENTY)
        shares.record(queue, 1, WEIGHTS[queue])
        again[queue] += 1
    assert 8 <= again["render"] <= 12


@given(
    lack=st.integers(1, 5000),
    weights=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 50), min_size=1),
    room=st.integers(0, 300),
)
def test_never_more_than_is_lacking_and_never_less_than_there_is_room_for(
    lack: int, weights: dict[str, int], room: int
) -> None:
    wants = QueueWeights().divide(lack, weights, dict.fromkeys(weights, room))
    assert sum(wants.values()) == min(lack, room * len(weights))
    assert all(0 < count <= room for count in wants.values())
