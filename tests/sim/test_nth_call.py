"""One call to the database fails, before or after it happens: the first, the second … each in a world of its own."""

from __future__ import annotations

import pytest

from tests.sim.story import Story
from tests.sim.test_seeds import silence
from tests.sim.world import Stage

__all__ = ["silence"]  # a fixture


def a_day(stage: Stage, number: int = 0, how: str = "") -> tuple[int, int]:
    """How many calls it took that may write, and how many that only read."""
    story = Story(stage.world(5))
    story.world.fails = (number, how)
    try:
        story.play_a_day()
        story.check()
    except AssertionError as error:
        raise AssertionError(f"call {number} failed {how} it happened: {error}") from error
    return story.world.calls, story.world.reads


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", ["before", "after", "read"])
def test_whichever_call_fails_nothing_is_lost_or_doubled(how, every):
    stage = Stage()
    writes, reads = a_day(stage)
    calls = reads if how == "read" else writes
    assert calls > 100

    for number in range(1, calls, every):
        a_day(stage, number, how)
