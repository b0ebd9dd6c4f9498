"""Mutexes and semaphores in the store: places, their order, and when they are free again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.storage.builders import (
    CLAIM,
    LEASE,
    connection,
    ending,
    joined,
    loss,
    running,
    success,
    together,
    transaction,
)

from genba.domain.clock import ManualClock
from genba.errors import BadOption, LeaseLost, LockLost, StoreError
from genba.storage.clients.locks import LockOwner, LockTaken, LockWaiting, SessionOver
from genba.storage.clients.sessions import SessionRecord, is_session_dead
from genba.storage.records import Claimed
from genba.storage.store import Store

SECOND = 1_000_000
BELL = 5


def session(store: Store, id: int = 1, pid: int = 10) -> LockOwner:
    """A client process that lives on another machine."""
    with store._db.single_write() as tx:
        tx.run(
            "open_session",
            id=id,
            lease=15 * SECOND,
            pid=pid,
            born=1,
            namespace="default",
            host="afar",
            machine="afar",
        )
    return LockOwner(None, None, None, id, pid)


def owner_of(job: Claimed, pid: int = 20) -> LockOwner:
    return LockOwner(job.id, job.attempt, CLAIM, None, pid)


def take(store: Store, owner: LockOwner, name: str = "a", n: int = 1, seq: int | None = 0) -> Any:
    return store.locks.take(owner, name, n, seq, BELL)


def test_one_has_it_and_the_others_get_it_in_the_order_of_asking(store: Store) -> None:
    me, you, third = (session(store, id) for id in (1, 2, 3))

    first = take(store, me)
    waiting = [take(store, you), take(store, third)]
    assert isinstance(first, LockTaken)
    assert [type(one) for one in waiting] == [LockWaiting, LockWaiting]
    assert take(store, third, seq=waiting[1].seq) == LockWaiting(waiting[1].seq, 1)

    store.locks.release("a", first.token)
    assert isinstance(take(store, third, seq=waiting[1].seq), LockWaiting)  # although it is free
    assert isinstance(take(store, session(store, 4), seq=None), LockWaiting)
    second = take(store, you, seq=waiting[0].seq)
    assert second.token > first.token
    store.locks.release("a", second.token)
    assert take(store, third, seq=waiting[1].seq).token > second.token


def test_a_waiter_that_was_called_and_does_not_come_is_passed_and_keeps_its_place(
    store: Store, clock: ManualClock
) -> None:
    me, sleeper, third = (session(store, id) for id in (1, 2, 3))
    held = take(store, me)
    first, second = take(store, sleeper), take(store, third)
    store.locks.release("a", held.token)

    clock.advance("2.1s")
    passed = take(store, third, seq=second.seq)
    assert isinstance(passed, LockTaken)
    assert take(store, sleeper, seq=first.seq) == LockWaiting(first.seq, 0)
    late = take(store, session(store, 4))
    store.locks.release("a", passed.token)

    assert isinstance(take(store, session(store, 4 + 1), seq=late.seq), LockWaiting)
    assert isinstance(take(store, sleeper, seq=first.seq), LockTaken)


def test_a_semaphore_has_n_places_and_all_must_agree_on_n(store: Store) -> None:
    owners = [session(store, id) for id in range(1, 5)]

    assert [type(take(store, owner, n=3)) for owner in owners] == [
        LockTaken,
        LockTaken,
        LockTaken,
        LockWaiting,
    ]
    for n in (1, 2, 4):
        with pytest.raises(BadOption, match="has 3 places"):
            take(store, owners[0], n=n)
    assert isinstance(take(store, owners[0], "b", n=7), LockTaken)


def test_it_is_reentrant_inside_one_job_but_not_between_jobs_or_sessions(store: Store) -> None:
    joined(store)
    one, other = running(store), running(store)

    assert take(store, owner_of(one)) == take(store, owner_of(one))
    assert isinstance(take(store, owner_of(other)), LockWaiting)
    assert isinstance(take(store, owner_of(one, pid=21)), LockWaiting)  # a forked child of the job
    me = session(store)
    assert isinstance(take(store, me, "b"), LockTaken)
    assert isinstance(take(store, me, "b"), LockWaiting)


def test_an_attempt_that_is_over_takes_nothing(store: Store) -> None:
    joined(store)
    job = running(store)
    store.finish(1, [success(job)])

    with pytest.raises(LeaseLost, match=f"job {job.id}"):
        take(store, owner_of(job))
    with pytest.raises(SessionOver):
        take(store, LockOwner(None, None, None, 99, 1))


@pytest.mark.parametrize("how", ["end", "bury", "inside", "finish"])
def test_the_locks_of_an_attempt_go_with_it(store: Store, how: str) -> None:
    joined(store)
    job = running(store)
    held = take(store, owner_of(job))
    take(store, owner_of(job), "other")
    you = session(store)
    line = take(store, you)

    if how == "end":
        store.end(1, [ending(job, locks=True)])
    elif how == "bury":
        store.nodes.declare_dead(1, lambda orphan, now: _with_locks(loss(orphan, now)))
    elif how == "inside":
        from genba.domain.outcome import AttemptReport, OutcomeRequest

        store.own_writes.end(
            (job.id, job.attempt, CLAIM),
            OutcomeRequest(wants="succeed", result=b"1"),
            AttemptReport(),
            0.0,
        )
    else:  # a process that could not know of them has ended it
        store.finish(1, [success(job)])
        assert store.locks.held("a", held.token)
        assert store.locks.sweep() == 2

    assert not store.locks.held("a", held.token)
    assert isinstance(take(store, you, seq=line.seq), LockTaken)
    assert [row.name for row in store.locks.holders()] == ["a"]


def _with_locks(end: Any) -> Any:
    from dataclasses import replace

    return replace(end, locks=True)


def test_a_waiter_that_is_ended_leaves_the_line(store: Store) -> None:
    joined(store)
    job = running(store)
    held = take(store, session(store, 1))
    take(store, owner_of(job))
    last = take(store, session(store, 2))
    store.end(1, [ending(job, locks=True)])
    store.locks.release("a", held.token)

    assert isinstance(take(store, LockOwner(None, None, None, 2, 10), seq=last.seq), LockTaken)


def test_a_session_that_is_over_frees_all_it_has(store: Store) -> None:
    me, you = session(store, 1), session(store, 2)
    held = take(store, me)
    take(store, me, "b")
    line = take(store, you)
    store.sessions.close(1)

    assert not store.locks.held("a", held.token)
    assert isinstance(take(store, you, seq=line.seq), LockTaken)
    assert isinstance(take(store, you, "b"), LockTaken)
    assert not store.sessions.renew(1)


def test_a_session_that_cannot_renew_is_ended_when_its_lease_is_over(
    store: Store, clock: ManualClock
) -> None:
    held = take(store, session(store))
    session(store, 2)
    clock.advance("16s")
    assert store.sessions.renew(2)
    store.sessions.sweep(in_contact=16 * SECOND)

    assert not store.locks.held("a", held.token)
    assert [one.id for one in store.sessions.all()] == [2]


def seen(silent: float) -> SessionRecord:
    return SessionRecord(
        1, 10, 1, "afar", "afar", 0, 15 * SECOND, 15 * SECOND, int(silent * SECOND)
    )


@pytest.mark.parametrize(
    ("silent", "gone", "suspect", "lasted", "dead"),
    [
        (0, True, False, 0, True),  # its process is not there any more
        (0.5, False, True, 60, False),  # a free lock alone is no reason
        (1.6, False, True, 60, True),  # ... with a missed beat it is
        (1.6, False, True, 1, False),  # ... if we were there all the time
        (14, False, False, 60, False),
        (15, False, False, 60, True),
        (15, False, False, 14, False),  # perhaps no node could renew
    ],
)
def test_when_a_session_is_dead(
    silent: float, gone: bool, suspect: bool, lasted: float, dead: bool
) -> None:
    assert (
        is_session_dead(seen(silent), int(silent * SECOND), gone, suspect, int(lasted * SECOND))
        is dead
    )


def test_a_broken_lock_is_lost_and_goes_to_the_next(store: Store, url: str) -> None:
    me, you = session(store, 1), session(store, 2)
    held = take(store, me)
    line = take(store, you)

    assert store.locks.break_("a", None, "test") == [held.token]
    assert store.locks.break_("a", held.token, "test") == []
    assert not store.locks.held("a", held.token)
    assert not store.locks.release("a", held.token)
    assert isinstance(take(store, you, seq=line.seq), LockTaken)


def test_a_fence_in_the_users_transaction_keeps_others_out_until_its_end(
    store: Store, url: str
) -> None:
    if url.startswith("sqlite"):
        return _fence_on_sqlite(store, url)
    held = take(store, session(store, 1))
    with transaction(url) as conn:
        store.locks.assert_held(conn, "a", held.token)
        store.sessions.close(1)  # taken for dead in the middle of its transaction
        assert isinstance(take(store, session(store, 2), seq=None), LockWaiting)
        store.locks.sweep()
        assert isinstance(take(store, LockOwner(None, None, None, 2, 10), seq=None), LockWaiting)
        conn.execute("COMMIT")
    store.locks.sweep()
    assert isinstance(take(store, LockOwner(None, None, None, 2, 10)), LockTaken)
    with transaction(url) as conn, pytest.raises(LockLost):
        store.locks.assert_held(conn, "a", held.token)
    return None


def _fence_on_sqlite(store: Store, url: str) -> None:
    """There the transaction keeps every other writer out."""
    held = take(store, session(store, 1))
    with connection(url) as conn, connection(url) as other:
        conn.execute("BEGIN")  # not even immediate
        store.locks.assert_held(conn, "a", held.token)
        other.set_busy_timeout(10)
        with pytest.raises(Exception, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        conn.execute("COMMIT")
    store.locks.release("a", held.token)
    with transaction(url) as conn, pytest.raises(LockLost):
        store.locks.assert_held(conn, "a", held.token)


def test_many_at_once_never_have_it_together(store: Store) -> None:
    owners = [session(store, id) for id in range(1, 7)]
    tokens: list[int] = []
    inside: list[int] = []

    def work(i: int) -> None:
        for _ in range(5):
            seq = 0
            while isinstance(got := take(store, owners[i], seq=seq), LockWaiting):
                seq = got.seq
            inside.append(i)
            assert inside == [i]
            tokens.append(got.token)
            inside.remove(i)
            store.locks.release("a", got.token)

    together(6, work)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 30


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.booleans()), max_size=25)
)
def test_tokens_only_grow_and_no_more_than_n_are_held(
    store: Store, steps: list[tuple[str, int, bool]]
) -> None:
    for id in (1, 2, 3):
        store.sessions.close(id)
        session(store, id)
    last = 0
    for name, id, gives in steps:
        mine = [row for row in store.locks.holders() if row.name == name]
        if gives and mine:
            store.locks.release(name, mine[0].number)
            continue
        got = take(store, LockOwner(None, None, None, id, 10), name, 2, seq=None)
        assert isinstance(got, LockTaken) is (len(mine) < 2)
        if isinstance(got, LockTaken):
            assert got.token > last
            last = got.token


def test_holders_and_waiters_can_be_seen(store: Store) -> None:
    joined(store, lease=LEASE)
    job = running(store)
    take(store, owner_of(job, pid=77))
    take(store, session(store, pid=78))

    (holder,), (waiter,) = store.locks.holders(), store.locks.waiters()
    assert (holder.name, holder.job_id, holder.node, holder.pid) == ("a", job.id, "node-1", 77)
    assert (waiter.name, waiter.job_id, waiter.host, waiter.pid) == ("a", None, "afar", 78)


def test_what_is_sent_at_once_happens_as_a_whole_or_not_at_all(store: Store) -> None:
    me = session(store)
    place = {
        "namespace": "default",
        "name": "whole",
        "place": 0,
        "n": 1,
        "token": 1,
        **me._asdict(),
    }

    with pytest.raises(StoreError):
        store._db.pipeline(
            ("insert_lock", place), ("insert_lock", place)
        )  # the second one is there already

    assert store.locks.holders() == []
    first = take(store, me, "whole")
    store.locks.release("whole", first.token)
    assert take(store, me, "whole").token > first.token  # also where the number comes from a table


def test_a_wish_that_is_withdrawn_takes_its_own_rows_along_and_no_others(store: Store) -> None:
    me, you = session(store, 1), session(store, 2)
    lost, other = me._replace(claim_id=7), me._replace(claim_id=8)
    take(store, lost)
    line = take(store, lost)
    assert isinstance(line, LockWaiting)
    assert isinstance(take(store, other, "b"), LockTaken)
    next_ = take(store, you)

    store.locks.withdraw("a", lost)

    assert isinstance(take(store, you, seq=next_.seq), LockTaken)
    assert [(row.name, row.pid) for row in store.locks.holders()] == [("a", you.pid), ("b", me.pid)]
    assert store.locks.waiters() == []


def test_a_session_can_be_opened_again_when_the_answer_was_lost(store: Store) -> None:
    store.sessions.open(3)
    store.sessions.open(3)

    assert [one.id for one in store.sessions.all()] == [3]
