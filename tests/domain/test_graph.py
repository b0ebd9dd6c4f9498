"""Jobs are sorted so that none comes before a job that it waits for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genba.domain.graph import parents_first


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    """Return graphs without cycles, in any order."""
    count = draw(st.integers(0, 12))
    age = draw(st.permutations(range(count)))
    return [
        [other for other in range(count) if age[other] < age[place] and draw(st.booleans())]
        for place in range(count)
    ]


@given(graphs())
def test_each_comes_once_and_after_what_it_waits_for(graph):
    order = parents_first(graph)

    assert sorted(order) == list(range(len(graph)))
    assert all(
        order.index(other) < order.index(place)
        for place in range(len(graph))
        for other in graph[place]
    )


@given(st.integers(0, 20))
def test_what_is_in_order_stays_in_order(count):
    assert parents_first([[place - 1] if place else [] for place in range(count)]) == list(
        range(count)
    )


def test_a_long_chain_needs_no_deep_stack():
    assert (
        parents_first([[place + 1] if place < 9_999 else [] for place in range(10_000)])[0] == 9_999
    )
