"""The answer to a commit may be lost: what was enqueued is there exactly once, whatever the client saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from tests.storage.builders import CLAIM, finish, joined, one, running

from genba.errors import StoreUnreachable
from genba.storage.engines.database import AnswerLost
from genba.storage.jobs.search import Filter
from genba.storage.records import NewJob
from genba.storage.store import Store, open_store

HANG_UP = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE pid <> pg_backend_pid() AND datname = current_database()"
)


@pytest.fixture
def server(databases: Any, template: str) -> Iterator[tuple[Store, str]]:
    with databases.fresh(template) as name:
        store = open_store(databases.url(name))
        yield store, databases.url(name)
        store.close()


def break_frames(store: Store, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    """The next writing frame breaks, before or after its commit."""
    database = store._db
    state = {"left": 1}
    for frame in ("single_write", "transaction"):
        real = getattr(database, frame)

        @contextmanager
        def broken(real: Any = real) -> Iterator[Any]:
            with real() as tx:
                yield tx
                if state["left"] and not after:
                    state["left"] = 0
                    raise AnswerLost("cut before the commit")
            if state["left"]:
                state["left"] = 0
                raise AnswerLost("cut after the commit")

        monkeypatch.setattr(database, frame, broken)


@pytest.mark.parametrize("count", [1, 3])
def test_a_commit_whose_answer_was_lost_is_not_repeated(
    server: tuple[Store, str], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    store, _ = server
    store.install()
    break_frames(store, monkeypatch, after=True)

    done = store.enqueue([NewJob(task="a", args=b"{}") for _ in range(count)])

    assert [made.created for made in done] == [True] * count
    assert store.search.count(Filter()) == count
    assert set(store.states([made.id for made in done]).values()) == {"waiting"}


def test_a_connection_that_the_server_ended_while_idle_is_replaced(
    server: tuple[Store, str],
) -> None:
    store, url = server
    store.enqueue([NewJob(task="a", args=b"{}")])
    with psycopg.connect(url, autocommit=True) as other:
        other.execute(HANG_UP)

    assert store.enqueue([NewJob(task="a", args=b"{}")])[0].created
    assert store.search.count(Filter()) == 2


def ask_while_the_server_hangs_up(store: Store, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as other, store._db.statement() as tx:
        tx.now()
        other.execute(HANG_UP)
        tx.now()


def test_a_connection_that_breaks_in_the_middle_is_tried_once_more(
    server: tuple[Store, str],
) -> None:
    store, url = server
    store.install()
    with pytest.raises(StoreUnreachable):
        ask_while_the_server_hangs_up(store, url)

    assert store.enqueue([NewJob(task="a", args=b"{}")])[0].created


def test_a_start_that_is_marked_again_because_the_answer_was_lost_is_ours_both_times(store):
    joined(store)
    job = running(store)
    start = (job.id, job.attempt, CLAIM, 10)

    assert store.mark_started([start]) == {job.id}
    assert store.mark_started([start]) == {job.id}
    assert store.mark_started([(job.id, job.attempt, CLAIM + 1, 10)]) == set()
    assert store.mark_started([(job.id, job.attempt, CLAIM, 11)]) == set(), (
        "another start of the same attempt"
    )


@pytest.mark.parametrize("verb", ["hold", "resume", "requeue"])
def test_a_commit_does_not_fail_because_no_node_could_be_woken(store, monkeypatch, verb):
    joined(store)
    id = one(store)
    if verb == "resume":
        store.hold(id, "r")
    elif verb == "requeue":
        finish(store, id, "failed")

    def fail(*_: Any) -> None:
        raise StoreUnreachable("cut after the commit")

    monkeypatch.setattr(store.node_wakeups, "wake_nodes", fail)

    assert store.hold(id, "r") if verb == "hold" else getattr(store, verb)(id)


def test_a_message_that_was_received_without_an_answer_is_not_lost_while_the_server_is_still_at_it(
    store, monkeypatch
):
    """It is there when it is looked for again, and gone when it is to be received."""
    joined(store)
    job = running(store)
    fence = (job.id, job.attempt, CLAIM)
    store.messages.send(job.id, b"1")
    break_frames(store, monkeypatch, after=False)
    with pytest.raises(StoreUnreachable):
        store.messages.receive(fence)
    monkeypatch.undo()
    real = store.messages._receive_this

    def late(*given: Any) -> bool:
        with store._db.transaction() as tx:
            tx.one("delete_message", seq=given[1])
        return bool(real(*given))

    monkeypatch.setattr(store.messages, "_receive_this", late)
    assert store.messages.receive(fence) == b"1"
    monkeypatch.undo()
    assert store.messages.receive(fence) is None
