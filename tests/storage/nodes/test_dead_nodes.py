"""When is a node dead?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from genba.storage.nodes.dead_nodes import DatabaseContact, HeartbeatWatch, find_dead_nodes
from genba.storage.records import NodeRecord

SECOND = 1_000_000
LEASE = 15 * SECOND
ME, OTHER = 1, 2


def a_node(
    *, silent: int, id: int = OTHER, lease: int = LEASE, boot_id: str = "this boot"
) -> NodeRecord:
    """A node with its last beat `silent` ago."""
    seen_at = 1_000 * SECOND
    facts: dict[str, Any] = {
        "name": "n",
        "host": "h",
        "pid": 1,
        "state": "live",
        "queues": "[]",
        "tasks": "[]",
    }
    return NodeRecord(
        id=id,
        boot_id=boot_id,
        beat_at=seen_at - silent,
        lease_until=seen_at - silent + lease,
        lease=lease,
        seen_at=seen_at,
        slots=1,
        hungry=False,
        started_at=0,
        version="1",
        **facts,
    )


def is_dead(
    node: NodeRecord,
    *,
    suspect: bool = False,
    boot_id: str | None = None,
    lasted: int = 3600 * SECOND,
) -> bool:
    return find_dead_nodes([node], {node.id} if suspect else set(), ME, boot_id, lasted) == [node]


def test_a_node_that_beats_is_alive() -> None:
    assert not is_dead(a_node(silent=0))
    assert not is_dead(a_node(silent=LEASE - 1))


def test_a_node_whose_lease_is_over_is_dead() -> None:
    assert is_dead(a_node(silent=LEASE))


def test_a_node_never_declares_itself_dead() -> None:
    assert not is_dead(a_node(silent=10 * LEASE, id=ME), suspect=True)


def test_a_suspect_is_dead_after_one_missed_beat_long_before_its_lease_is_over() -> None:
    assert not is_dead(a_node(silent=3 * SECOND), suspect=True)
    assert is_dead(a_node(silent=4 * SECOND), suspect=True)
    assert not is_dead(a_node(silent=4 * SECOND))


@pytest.mark.parametrize("lease", [2 * SECOND, 3 * SECOND, 5 * SECOND])
def test_no_suspect_is_dead_before_its_guard_had_the_time_to_end_its_tree(lease: int) -> None:
    assert not is_dead(a_node(silent=2 * SECOND - 1, lease=lease), suspect=True)
    assert is_dead(a_node(silent=2 * SECOND, lease=lease), suspect=True)


def test_not_even_a_very_short_lease_lets_a_node_die_sooner() -> None:
    assert not is_dead(a_node(silent=SECOND, lease=SECOND // 2), suspect=True)
    assert not is_dead(a_node(silent=SECOND, lease=SECOND // 2))
    assert is_dead(a_node(silent=2 * SECOND, lease=SECOND // 2))


def test_after_an_outage_of_the_database_no_node_is_dead_before_one_full_lease() -> None:
    patience = DatabaseContact()
    patience.confirm(0)
    patience.lose()
    patience.confirm(100 * SECOND)
    for second in range(101, 115):
        patience.confirm(second * SECOND)
    silent = a_node(silent=60 * SECOND)

    assert not is_dead(silent, lasted=patience.duration(100 * SECOND + LEASE - 1))
    assert not is_dead(silent, suspect=True, lasted=patience.duration(100 * SECOND + LEASE - 1))
    assert is_dead(silent, lasted=patience.duration(100 * SECOND + LEASE))


def test_a_node_that_was_suspended_declares_none_dead_right_after() -> None:
    """As when a laptop wakes: the first node to look must not declare the others dead, which could not renew either."""
    patience = DatabaseContact(LEASE // 2)
    for second in range(20):
        patience.confirm(second * SECOND)
    woken = 19 * SECOND + 4 * LEASE
    silent = a_node(silent=4 * LEASE)

    assert not is_dead(silent, lasted=patience.duration(woken))
    assert not is_dead(silent, suspect=True, lasted=patience.duration(woken))
    patience.confirm(woken)
    assert patience.duration(woken + SECOND) == SECOND


def test_a_node_that_has_not_seen_the_database_yet_declares_none_dead() -> None:
    patience = DatabaseContact()

    assert patience.duration(3600 * SECOND) == 0
    assert not is_dead(a_node(silent=60 * SECOND), suspect=True, lasted=0)


def test_a_suspect_is_judged_only_by_a_node_that_was_there_before_its_last_beat() -> None:
    suspect = a_node(silent=7 * SECOND)

    assert not is_dead(suspect, suspect=True, lasted=7 * SECOND - 1)
    assert is_dead(suspect, suspect=True, lasted=7 * SECOND)


def test_a_suspect_that_has_long_been_silent_dies_by_its_lease_at_the_latest() -> None:
    """A newcomer was not there at the last beat, and never will have been."""
    assert is_dead(a_node(silent=3600 * SECOND), suspect=True, lasted=LEASE)


def test_a_machine_that_was_started_anew_has_no_living_nodes_from_before() -> None:
    old = a_node(silent=0, boot_id="an earlier boot")

    assert is_dead(old, boot_id="this boot", lasted=0)
    assert not is_dead(old, boot_id=None)
    assert not is_dead(a_node(silent=0), boot_id="this boot")


def test_a_suspect_whose_process_is_gone_is_dead_also_for_a_newcomer() -> None:
    node = a_node(silent=2 * SECOND)
    assert find_dead_nodes([node], {node.id}, ME, None, 0, {node.id}) == [node]
    assert find_dead_nodes([node], set(), ME, None, 0, {node.id}) == []
    early = a_node(silent=2 * SECOND - 1)
    assert find_dead_nodes([early], {early.id}, ME, None, 0, {early.id}) == []


# the store's clock may be set while nodes live


def heard(watch: HeartbeatWatch, beat: int, seen: int, now: int) -> int:
    """Return how long a node with this `beat` is silent when the store's clock says `seen`, and ours `now`."""
    node = replace(a_node(silent=0), beat_at=beat * SECOND, seen_at=seen * SECOND)
    return watch.silence([node], now * SECOND)[OTHER] // SECOND


@pytest.mark.parametrize("jump", [-3600, 3600, -86_400, 86_400, 10 * 365 * 86_400])
def test_a_clock_that_is_set_makes_no_node_silent_and_none_live_for_ever(jump: int) -> None:
    watch = HeartbeatWatch()
    assert heard(watch, 1000, 1001, 1) == 1
    assert heard(watch, 1003, 1003, 3) == 0
    assert heard(watch, 1003, 1005 + jump, 5) in (
        2,
        4,
    )  # between when we saw its beat, and the look before that
    assert heard(watch, 1006 + jump, 1007 + jump, 7) in (0, 1, 2)  # it beats on, by the new time
    assert (
        heard(watch, 1006 + jump, 1027 + jump, 27) == 21
    )  # and if it does not, it is silent as before


def test_without_jumps_the_clock_of_the_store_is_believed() -> None:
    watch = HeartbeatWatch()
    assert heard(watch, 1000, 1060, 1) == 60  # we have just come
    assert heard(watch, 1061, 1063, 4) == 2
    assert heard(watch, 1061, 1065, 6) == 4


def test_a_beat_from_the_future_is_as_old_as_we_know_it() -> None:
    watch = HeartbeatWatch()
    assert heard(watch, 5000, 1000, 1) == 0
    assert heard(watch, 5000, 1015, 16) == 15


def test_a_node_that_has_slept_does_not_declare_a_beating_node_dead_when_the_clock_is_set() -> None:
    watch = HeartbeatWatch()
    assert heard(watch, 1000, 1000, 1) == 0
    assert heard(watch, 1060, 4660, 61) == 3  # a minute later, and the clock was set just now


def test_a_newcomer_is_not_dead_because_the_clock_was_set_after_it_came() -> None:
    watch = HeartbeatWatch()
    watch.silence([], SECOND)
    assert heard(watch, 1000, 4600, 3) == 2
