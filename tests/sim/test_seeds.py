"""Many small worlds, each out of a seed: whatever goes wrong in them, nothing is lost, and in the end all is done.

A seed that fails is named in the failure, and becomes a test of its own in `test_found.py`.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim.story import KINDS, Story
from tests.sim.world import Stage

EVERY = {
    "kill worker", "kill node", "pause node", "cut node", "outage", "cancel", "hold", "drain",
    "failed before it happened", "failed after it happened", "a read failed",
    "paused at a call", "a tick", "guard", "declared dead",
    "ready", "not ready", "in a shared worker", "a job has a lock", "a session has a lock", "waits for a lock",
    "gave a lock back", "died with a lock", "kill visitor", "pause visitor", *(f"done: {kind}" for kind in KINDS),
}  # fmt: skip


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Nodes in trouble say so, thousands of times."""
    logging.getLogger("genba").setLevel(logging.CRITICAL + 1)
    yield
    logging.getLogger("genba").setLevel(logging.NOTSET)


def play(stage: Stage, seed: int, *, early: bool = False) -> set[str]:
    """What has gone wrong in this world; AssertionError with its number if that has done harm."""
    story = Story(stage.world(seed), early=early)
    gc.disable()  # to look for garbage in so small a world takes a fifth of its time
    try:
        story.play()
        story.check()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    finally:
        gc.enable()
    return story.world.hits


def play_all(first: int, count: int) -> None:
    stage = Stage()
    hits: Counter[str] = Counter()

    for seed in range(first, first + count):
        hits.update(play(stage, seed))

    assert hits.keys() >= EVERY, f"never seen: {EVERY - hits.keys()}"


SOAK = [pytest.param(first, 1_000, marks=pytest.mark.soak) for first in range(2_000, 32_000, 1_000)]


@pytest.mark.parametrize(
    ("first", "count"), [(0, 500), (500, 500), *SOAK]
)  # the rest: test_more_seeds.py
def test_whatever_goes_wrong_nothing_is_lost_or_doubled_and_all_is_done_in_the_end(first, count):
    play_all(first, count)


def test_a_seed_gives_the_same_history_again():
    stage = Stage()
    lives = []
    for _ in range(2):
        story = Story(stage.world(12))
        story.play()
        lives.append(
            [(run.attempt, run.began, run.ended, run.completed) for run in story.world.runs]
        )

    assert lives[0] == lives[1]
    assert lives[0]
