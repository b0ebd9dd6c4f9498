"""Maintenance does many chores; one that goes wrong must not cost the node its lease, nor the others their turn."""

from __future__ import annotations

from typing import Any

import pytest
from tests.storage.builders import TASK, joined

from genba.node.database.events import LeaseRenewed
from genba.node.database.lost_claims import LostClaims
from genba.node.database.maintenance import Maintenance

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("part", "chore"), [("schedules", "declare"), ("nodes", "due_work"), ("nodes", "live")]
)
def test_a_chore_that_breaks_is_logged_and_the_next_round_goes_on(
    store, clock, monkeypatch, part, chore
):
    joined(store)
    posted: list[Any] = []
    maintenance = Maintenance(
        store, 1, lease=2 * SECOND, poll=SECOND, queues=["default"], tasks=[TASK], conditions=[], keep={},
        schedules=[], boot_id=None, clock=clock, lost_claims=LostClaims(clock), post=posted.append,
    )  # fmt: skip

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(store, part), chore, break_down)
        troubles = []
        for _ in range(5):
            assert maintenance.step() <= 1
            troubles.append(maintenance.trouble)
            clock.advance(1)
        assert "a bug of ours" in troubles
    assert (
        sum(isinstance(one, LeaseRenewed) for one in posted) == 5
    )  # the lease was never in danger

    for _ in range(5):
        maintenance.step()
        clock.advance(1)
    assert maintenance.trouble is None
