"""What the simulator has found, each as a story of its own."""

from __future__ import annotations

import pytest

from tests.sim.locks import Visitor
from tests.sim.story import Asked, Story, _locking
from tests.sim.test_seeds import play, silence
from tests.sim.world import LEASE, SECOND, Mood, Stage

__all__ = ["silence"]  # a fixture


def a_calm_story(nodes: int) -> Story:
    story = Story(Stage().world(1))
    story.world.mood, story._schedules = Mood(lost_bell=0), []
    story.start_nodes(nodes)
    story.world.run(2 * SECOND)
    return story


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("call", range(1, 7))
def test_a_process_whose_answer_is_lost_while_it_takes_a_lock_does_not_wait_for_itself(call, how):
    story = a_calm_story(1)
    world = story.world
    world.fails = (world.calls + call, how)

    Visitor(world, SECOND).start()
    Visitor(world, SECOND).start()

    story.calm()
    story.check()
    assert len(world.holds) == 2


def test_a_process_suspended_in_an_outage_while_it_waits_for_a_lock_declares_none_dead():
    story = a_calm_story(2)
    world = story.world
    one = Asked(1, "locking")
    story.asked.append(one)
    (made,) = story._client.enqueue(
        [_locking({"n": 1, "ms": 30_000, "fates": ["return"], "lock": "leaves it"})]
    )
    one.id = made.id
    assert world.run(world.now + 2 * SECOND, lambda: bool(world.holds))
    visitor = Visitor(world, SECOND)
    visitor.start()
    world.run(world.now + 2 * SECOND)

    visitor.pause()
    world.down = True
    world.run(world.now + 2 * LEASE)
    world.down = False
    visitor.resume()  # before any node has renewed its lease

    story.calm()
    story.check()  # no living node was declared dead


def test_a_job_given_back_twice_and_ended_in_the_same_breath_has_one_end():
    """Seed 23869: a release was sent again (its answer was lost) together with the end of the next claim."""
    play(Stage(), 23869, early=True)


def test_a_claim_without_an_answer_is_looked_for_until_the_database_answers():
    """Seed 1146: no maintenance round got so far for thirty seconds, and then none looked any more."""
    play(Stage(), 1146)
