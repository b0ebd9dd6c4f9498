"""A writer: when it writes."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
from tests.storage.builders import TASK, claimed, enqueued, joined, state, states, success

from genba.domain.clock import SystemClock
from genba.node.database.events import EndingsWritten, JobsClaimed
from genba.node.database.lost_claims import LostClaims
from genba.node.database.pending_writes import MANY
from genba.node.database.writer import FLOW, Writer
from genba.storage.records import Success
from genba.storage.store import Store

LONG = 600.0  # seconds, in which the test would have failed
SOON = 30.0


@pytest.fixture
def posts() -> queue.Queue:
    return queue.Queue()


@pytest.fixture
def writer(store: Store, posts: queue.Queue) -> Iterator[Writer]:
    joined(store, 1)
    writer = Writer("writer", store, 1, [TASK], LostClaims(SystemClock()), posts.put)
    writer.start()
    yield writer
    writer.finish(SOON)
    assert not writer.is_alive()


def ends(store: Store, count: int) -> list[Success]:
    return [success(job) for job in claimed(store, count)]


def nothing_is_said(posts: queue.Queue) -> bool:
    with pytest.raises(queue.Empty):
        posts.get(timeout=0.2)
    return True


def test_successes_that_can_wait_are_written_with_the_next_that_cannot(store, writer, posts):
    ids = enqueued(store, 2)
    first, second = ends(store, 2)

    writer.write_successes([first], patience=LONG)
    assert nothing_is_said(posts)
    writer.write_successes([second])

    assert isinstance(posts.get(timeout=SOON), EndingsWritten)
    assert states(store, ids) == ["succeeded", "succeeded"]
    assert posts.empty()  # it was one commit


def test_an_urgent_write_does_not_wait_for_those_that_can_wait(store, posts):
    joined(store, 1)
    enqueued(store, 2)
    first, second = ends(store, 2)
    writer = Writer("writer", store, 1, [TASK], LostClaims(SystemClock()), posts.put)
    writer.write_successes([first])
    writer.write_successes([second], patience=LONG)

    writer.start()  # it finds both

    assert isinstance(posts.get(timeout=SOON), EndingsWritten)
    writer.finish(SOON)


def test_they_wait_no_longer_than_they_may(store, writer, posts):
    (id,) = enqueued(store, 1)

    writer.write_successes(ends(store, 1), patience=0.01)

    assert isinstance(posts.get(timeout=SOON), EndingsWritten)
    assert state(store, id) == "succeeded"


def test_nor_longer_than_it_takes_to_have_many(store, writer, posts):
    enqueued(store, MANY)
    many = ends(store, MANY)

    for at in range(0, MANY, 100):
        writer.write_successes(many[at : at + 100], patience=LONG)

    assert isinstance(posts.get(timeout=SOON), EndingsWritten)


def test_a_claim_does_not_wait_for_them(store, writer, posts):
    enqueued(store, 2)

    writer.write_successes(ends(store, 1), patience=LONG)
    writer.claim({"default": 1})

    assert isinstance(posts.get(timeout=SOON), EndingsWritten)
    claimed = posts.get(timeout=SOON)
    assert isinstance(claimed, JobsClaimed)
    assert len(claimed.jobs) == 1


def test_nor_in_full_flow_for_more_of_them(store, writer, posts, monkeypatch):
    monkeypatch.setattr("genba.node.database.writer.GATHER_SECONDS", LONG)
    enqueued(store, FLOW + 2)
    writer.write_successes(ends(store, FLOW))
    assert isinstance(posts.get(timeout=SOON), EndingsWritten)

    writer.write_successes(ends(store, 1))
    assert nothing_is_said(posts)
    writer.claim({"default": 1})

    assert isinstance(posts.get(timeout=SOON), EndingsWritten)
    assert len(posts.get(timeout=SOON).jobs) == 1


def test_a_desk_that_ends_writes_them(store, writer, posts):
    (id,) = enqueued(store, 1)
    writer.write_successes(ends(store, 1), patience=LONG)

    writer.finish(SOON)

    assert state(store, id) == "succeeded"


def test_a_desk_that_is_called_while_it_still_says_that_it_is_hungry_says_so_again(
    store, writer, posts, monkeypatch
):
    """It once took the answer for the flag, which the caller had cleared, and was not woken any more."""
    answers: list[bool] = []
    say = store.nodes.hungry

    def say_and_be_called(node: int, hungry: bool) -> None:
        say(node, hungry)
        if not answers:
            say(node, False)  # as an enqueue does
            writer.on_wakeup()
        answers.append(hungry)

    monkeypatch.setattr(store.nodes, "hungry", say_and_be_called)
    for _ in range(2):
        writer.claim({"default": 1})
        claims = iter(lambda: posts.get(timeout=SOON), None)
        assert next(post for post in claims if isinstance(post, JobsClaimed)).jobs == []

    assert answers == [True, True]
