"""Jobs come in: durable, all or nothing, and one per identity."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from typing import Any

import pytest
from tests.storage.builders import (
    HOUR,
    LONG_ARGS,
    TASK,
    a_job,
    after,
    claimed,
    connection,
    ending,
    enqueue_the_same,
    enqueued,
    finish,
    in_processes,
    joined,
    one,
    rows,
    running,
    settle,
    state,
    states,
    success,
    together,
    transaction,
)

from genba.domain.rank import rank
from genba.errors import JobNotFound, KeyTaken, StoreError
from genba.storage.jobs.search import Filter
from genba.storage.operators import RulesChanged
from genba.storage.records import Edge, UniformJobs
from genba.storage.store import open_store

on_postgres = pytest.mark.parametrize(
    "engine", ["postgres"], indirect=True
)  # SQLite has one writer at a time


def count(store, **given) -> int:
    return store.search.count(Filter(**given))


def test_a_job_is_there_when_enqueue_returns(store, clock, url):
    (made,) = store.enqueue(
        [a_job(queue="q", priority=3, args=b'{"x": 1}', options='{"timeout": 5}', parent_id=7)]
    )

    assert made.created
    job = store.job(made.id)
    assert (job.state, job.task, job.queue, job.priority, job.args) == (
        "waiting",
        TASK,
        "q",
        3,
        b'{"x": 1}',
    )
    assert (job.options, job.parent_id, job.attempt) == ('{"timeout": 5}', 7, 0)
    assert (job.created_at, job.due_at, job.rank) == (
        clock.now(),
        clock.now(),
        clock.now() - 3 * HOUR,
    )
    assert rows(url, "SELECT kind, job_id FROM genba.event") == [("waiting", made.id)]


# What COPY or a statement could misread.
AWKWARD = [
    "plain",
    "",
    " tab\there ",
    "line\nline\r",
    "back\\slash \\N \\.",
    "%s :name 'quote' \"",
    "現場 – ✓ 😀",
]


@pytest.mark.parametrize("several", [False, True], ids=["one", "many"])
def test_texts_and_bytes_come_back_as_they_were(store, several):
    jobs = [a_job(key=text, tags=(text,)) for text in AWKWARD]
    blobs = [a_job(args=blob) for blob in (b"", b"\\x00", bytes(range(256)))]

    made = (
        store.enqueue([*jobs, *blobs])
        if several
        else [store.enqueue([job])[0] for job in (*jobs, *blobs)]
    )

    found = [store.job(one.id) for one in made]
    assert [job.key for job in found[: len(jobs)]] == AWKWARD
    assert [job.args for job in found[len(jobs) :]] == [job.args for job in blobs]
    tagged = [store.search.jobs(Filter(tags=[text]), 5)[0].id for text in AWKWARD]
    assert tagged == [one.id for one in made[: len(jobs)]]


def test_one_alone_and_one_of_many_make_the_same_row(store, clock):
    given = {
        "priority": -2,
        "delay": HOUR,
        "expires_in": 2 * HOUR,
        "key": "k",
        "tags": ("a", "b"),
        "options": "{}",
    }
    alone = store.job(one(store, **given))
    of_many = store.job(enqueued(store, 2, **given)[1])

    differ = [name for name in alone.__slots__ if getattr(alone, name) != getattr(of_many, name)]
    assert differ == ["id"]


def test_a_simple_job_makes_the_same_row_as_any_other(store, url):
    given = {"priority": 2, "options": '{"timeout":5}', "queue": "q"}
    first, soon_after = (store.job(one(store, **given)) for _ in range(2))
    of_many = store.job(enqueued(store, 2, **given)[1])
    elaborate = store.job(one(store, **given, expires_in=HOUR))

    for job in (first, soon_after, elaborate):
        differ = [name for name in job.__slots__ if getattr(job, name) != getattr(of_many, name)]
        assert differ == (["id", "expires_at"] if job is elaborate else ["id"])
    whole = rows(url, "SELECT * FROM genba.job ORDER BY id")
    assert len({tuple(row[1:]) for row in whole[:4]}) == 1
    reported = "SELECT job_id, kind, at, node, namespace FROM genba.event WHERE job_id IS NOT NULL ORDER BY job_id"
    events = rows(url, reported)
    assert [event[:2] for event in events] == [
        (job.id, "waiting") for job in (first, soon_after, elaborate)
    ]
    assert len({event[2:] for event in events}) == 1


def test_jobs_that_are_alike_make_the_same_rows_as_others(store):
    args = [text.encode() for text in AWKWARD] + [
        b"\\x00",
        bytes(range(256)),
        LONG_ARGS,
        b"{}",
    ] * 150
    given = {"priority": 2, "options": '{"timeout":5}', "queue": "back\\slash", "delay": HOUR}
    jobs = [a_job(args=text, **given) for text in args]
    alike, others = store.enqueue(UniformJobs(jobs)), store.enqueue(jobs)

    for made, other, wanted in zip(alike, others, args, strict=True):
        found, like_it = store.job(made.id), store.job(other.id)
        assert found.args == wanted
        assert [
            name for name in found.__slots__ if getattr(found, name) != getattr(like_it, name)
        ] == ["id"]


def test_a_simple_job_is_not_there_when_the_rules_have_changed(store):
    epoch = store.operators.rules().epoch
    for _ in range(2):  # also soon after another one
        with pytest.raises(RulesChanged):
            store.enqueue([a_job()], None, epoch + 1)
    assert count(store) == 0
    assert store.enqueue([a_job()], None, epoch)[0].created


def test_many_jobs_come_in_at_once_and_in_order(store):
    made = store.enqueue([a_job(args=str(i).encode()) for i in range(1500)])

    ids = [one.id for one in made]
    assert ids == sorted(set(ids))
    assert count(store) == 1500
    joined(store)
    assert [job.args for job in claimed(store, 1024)] == [str(i).encode() for i in range(1024)]


def test_none_at_all_is_no_error(store):
    assert store.enqueue([]) == []


def test_a_batch_is_all_or_nothing(store, url):
    one(store, identity="taken")
    batch = [a_job(tags=("x",)), a_job(), a_job(identity="taken", on_conflict="raise")]

    with pytest.raises(KeyTaken):
        store.enqueue(batch)
    with pytest.raises(JobNotFound, match="987654"):
        store.enqueue([a_job(), a_job(after=after(987654))])

    assert count(store) == 1
    assert rows(url, "SELECT count(*) FROM genba.tag")[0][0] == 0


def test_a_namespace_does_not_see_the_jobs_of_another(store, url, clock):
    id = one(store, key="k", identity="i")
    with closing(open_store(url, namespace="other", clock=clock)) as other:
        assert other.job(id) is None
        assert other.job(key="k") is None
        assert other.states([id]) == {}
        assert not other.cancel(id, None)
        assert other.enqueue([a_job(identity="i")])[0].created
        with pytest.raises(JobNotFound):
            other.enqueue([a_job(after=after(id))])


def test_a_moment_ahead_makes_a_job_scheduled(store, clock):
    now = clock.now()
    ids = [
        one(store, delay=HOUR),
        one(store, due_at=now + HOUR),
        one(store, due_at=now - HOUR),
        *enqueued(store, 2, delay=HOUR),
        *enqueued(store, 2, due_at=now - HOUR),
    ]

    assert states(store, ids) == [
        "scheduled",
        "scheduled",
        "waiting",
        *["scheduled"] * 2,
        *["waiting"] * 2,
    ]
    assert {store.job(id).due_at for id in ids} == {now, now + HOUR}
    assert store.due.next_due() == now + HOUR
    clock.advance("1h")
    assert store.promote() == 4
    assert store.due.next_due() is None
    assert store.job(ids[0]).rank == now + HOUR


def test_a_promoted_job_stands_where_its_moment_and_priority_put_it(store, clock):
    joined(store)
    plain = one(store, delay=HOUR)
    high = one(store, delay=2 * HOUR, priority=2)
    clock.advance("2h")
    store.promote()

    assert [job.id for job in claimed(store, 2)] == [high, plain]


def test_every_way_into_the_line_ranks_by_the_age_step_of_the_store_also_the_largest_priorities(
    url, clock
):
    """2**31 - 1 steps of two hours do not fit 64 bits."""
    step, high, low = 2 * HOUR, 2**31 - 1, -(2**31)
    with closing(open_store(url, clock=clock, age_step=step)) as store:
        joined(store)
        now = clock.now()

        def ranked(id: int, priority: int) -> bool:
            record = store.job(id)
            return record is not None and record.rank == rank(now, priority, step)

        assert ranked(one(store, priority=3), 3)
        assert all(
            ranked(id, low)
            for id in [one(store, priority=low, tags=("x",)), *enqueued(store, 2, priority=low)]
        )
        held, child, late = (
            one(store, priority=high),
            one(store, priority=high),
            one(store, priority=low, delay=HOUR),
        )
        store.hold(held, "why")
        store.resume(held)
        assert ranked(held, high)
        waits = one(store, priority=high, after=after(child))
        finish(store, child)
        settle(store)
        store.requeue(child)
        assert ranked(child, high)
        assert ranked(waits, high)
        assert store.bulk.change(held, {"priority": low}, lambda options: options)
        assert ranked(held, low)
        clock.advance("1h")
        now = clock.now()
        store.promote()
        assert ranked(late, low)
        lowered = next(job for job in claimed(store, 64) if job.id == waits)
        store.end(
            1, [ending(lowered, "waiting", "signal 9", wait=0, crashes=1, rank_priority=high - 1)]
        )
        assert ranked(waits, high - 1)


# identity


def test_a_taken_identity_gives_the_job_that_has_it(store):
    first = one(store, identity="i")

    assert store.enqueue([a_job(identity="i")]) == [(first, False)]
    assert store.enqueue([a_job(), a_job(identity="i"), a_job(identity="new")])[1] == (first, False)
    assert count(store) == 3


def test_a_taken_identity_is_refused_with_the_id_of_its_holder(store):
    first = one(store, key="order 7", identity="i")

    with pytest.raises(KeyTaken, match=f"job {first} .*'order 7'") as caught:
        store.enqueue([a_job(key="order 7", identity="i", on_conflict="raise")])
    assert caught.value.job_id == first


def test_the_same_identity_twice_in_a_batch_is_one_job(store):
    first, second = store.enqueue([a_job(identity="i"), a_job(identity="i")])

    assert (first.created, second) == (True, (first.id, False))


def test_a_final_job_gives_its_identity_free(store):
    joined(store)
    for end in ("succeeded", "failed", "cancelled"):
        job = running(store, identity="i")
        if end == "succeeded":
            store.finish(1, [success(job)])
        else:
            store.end(1, [ending(job, end)])
        made = store.enqueue([a_job(identity="i")])[0]
        assert made.created, end
        store.cancel(made.id, None)


def test_open_jobs_keep_their_identity(store, clock):
    joined(store)
    job = running(store, identity="i")
    assert not store.enqueue([a_job(identity="i")])[0].created
    store.end(1, [ending(job, "scheduled", due_at=clock.now() + HOUR)])
    assert not store.enqueue([a_job(identity="i")])[0].created
    store.hold(job.id, "why")
    assert not store.enqueue([a_job(identity="i")])[0].created


def test_unique_for_keeps_the_identity_beyond_the_end(store, clock):
    joined(store)
    job = running(store, identity="i", unique_for=HOUR)
    store.finish(1, [success(job)])

    assert store.enqueue([a_job(identity="i")]) == [(job.id, False)]
    clock.advance("1h")
    assert store.enqueue([a_job(identity="i")])[0].created


def test_a_job_unique_while_it_waits_makes_room_when_it_starts(store):
    joined(store)
    first = one(store, identity="i", once_waiting=True)
    assert not store.enqueue([a_job(identity="i", once_waiting=True)])[0].created
    claimed(store)

    second = store.enqueue([a_job(identity="i", once_waiting=True)])[0]
    assert second.created
    assert states(store, [first, second.id]) == ["running", "waiting"]


def test_a_call_that_is_once_while_waiting_ignores_a_running_job(store):
    joined(store)
    old = running(store, identity="i")
    assert store.enqueue([a_job(identity="i")]) == [(old.id, False)]

    (new,) = store.enqueue([a_job(identity="i", once_waiting=True)])

    assert new.created
    assert states(store, [old.id, new.id]) == ["running", "waiting"]
    assert store.enqueue([a_job(identity="i", once_waiting=True)]) == [(new.id, False)]
    assert store.finish(1, [success(old)]) == {old.id}


def test_a_waiting_job_is_replaced(store):
    joined(store)
    old = one(store, identity="i")
    child = one(store, after=after(old, wants="finished"))

    (new,) = store.enqueue([a_job(identity="i", on_conflict="replace")])

    assert new.created
    assert (store.job(old).state, store.job(old).reason) == (
        "cancelled",
        f"replaced by job {new.id}",
    )
    assert [job.id for job in claimed(store, 4)] == [new.id]
    store.settle()
    assert state(store, child) == "waiting"


def test_a_running_job_is_asked_to_stop_and_never_runs_beside_its_replacement(store):
    joined(store)
    old = running(store, identity="i")

    (new,) = store.enqueue([a_job(identity="i", on_conflict="replace")])

    assert states(store, [old.id, new.id]) == ["running", "blocked"]
    assert [(c.job_id, c.verb) for c in store.nodes.commands(1)] == [(old.id, "cancel")]
    assert store.enqueue([a_job(identity="i")]) == [(new.id, False)]
    store.end(1, [ending(old, "cancelled", "cancelled")])
    store.settle()
    assert state(store, new.id) == "waiting"


@on_postgres
def test_a_job_that_starts_while_it_is_replaced_does_not_run_beside_its_replacement(store, url):
    """The claim commits between our look at the job and our cancel of it."""
    joined(store)
    old = one(store, identity="i")
    with connection(url) as conn:
        # The first to touch the row waits for us; then it is running.
        conn.execute("BEGIN")
        conn.execute("SELECT 1 FROM genba.job WHERE id = %s FOR UPDATE", (old,))
        conn.execute(
            "UPDATE genba.job SET state = 'running', attempt = 1, claim_id = 77, node = 1 WHERE id = %s",
            (old,),
        )

        def act(i: int) -> Any:
            if i == 0:
                return store.enqueue([a_job(identity="i", on_conflict="replace")])[0]
            with connection(url) as eye:  # until the other one waits for the row
                while not eye.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone():
                    pass
            return conn.execute("COMMIT")

        new, _ = together(2, act)

    assert states(store, [old, new.id]) == ["running", "blocked"]
    assert store.job(old).cancel_requested == "cancel"


def test_regression_06_fifty_threads_make_one_job(store):
    store.install()

    made = together(50, lambda _: store.enqueue([a_job(identity="same")])[0])

    assert len({one.id for one in made}) == 1
    assert [one.created for one in made].count(True) == 1


def test_eight_processes_of_six_threads_make_one_job(store, url):
    store.install()

    made = [one for answers in in_processes(8, enqueue_the_same, url) for one in answers]

    assert len(made) == 48
    assert len({one.id for one in made}) == 1
    assert [one.created for one in made].count(True) == 1


@pytest.mark.parametrize(
    ("producers", "inserts", "keys"),
    [(8, 12, 5), pytest.param(32, 1_000, 50, marks=pytest.mark.soak)],
)
def test_producers_of_the_same_jobs_that_partly_roll_back_never_get_a_job_that_is_not_there(
    store, url, producers, inserts, keys
):
    """FAULTS F35: a producer refused because of a job that was then rolled back has made its own."""
    store.install()

    def produce(which: int) -> list[tuple[int, int]]:
        chance, reported = random.Random(which), []
        for _ in range(inserts):
            key = chance.randrange(keys)
            if chance.random() < 0.3:
                with transaction(url) as conn:
                    store.enqueue([a_job(identity=f"k{key}")], conn=conn)
                    conn.execute("ROLLBACK")
            else:
                reported.append((key, store.enqueue([a_job(identity=f"k{key}")])[0].id))
        return reported

    reported = {pair for answers in together(producers, produce) for pair in answers}

    there = [id for (id,) in rows(url, "SELECT id FROM genba.job")]
    assert sorted(id for _, id in reported) == sorted(
        there
    )  # one for each key, and no producer got another
    assert len(reported) == len({key for key, _ in reported}) <= keys


def test_threads_that_replace_each_other_leave_one_open_job(store):
    store.install()

    made = together(8, lambda _: store.enqueue([a_job(identity="same", on_conflict="replace")])[0])

    assert all(one.created for one in made)
    assert sorted(states(store, [one.id for one in made])) == ["cancelled"] * 7 + ["waiting"]


# the caller's own transaction


def test_a_job_in_the_callers_transaction_comes_with_its_commit(store, url):
    store.install()
    with transaction(url) as conn:
        (made,) = store.enqueue([a_job(tags=("x",), identity="i")], conn=conn)
        assert store.job(made.id) is None
        conn.execute("COMMIT")

    assert state(store, made.id) == "waiting"


def test_a_job_in_the_callers_transaction_goes_with_its_rollback(store, url):
    store.install()
    with transaction(url) as conn:
        made = store.enqueue(
            [a_job(), a_job(identity="i"), a_job(after=(Edge(0, inside=True),))], conn=conn
        )
        conn.execute("ROLLBACK")

    assert store.states([one.id for one in made]) == {}
    assert count(store) == 0
    assert rows(url, "SELECT count(*) FROM genba.dependency")[0][0] == 0
    assert store.enqueue([a_job(identity="i")])[0].created


def test_the_first_call_of_a_process_may_be_inside_a_transaction(store, url, clock):
    store.install()
    with closing(open_store(url, clock=clock)) as fresh, transaction(url) as conn:
        (made,) = fresh.enqueue([a_job()], conn=conn)
        conn.execute("COMMIT")

    assert state(store, made.id) == "waiting"


def test_a_connection_without_a_transaction_is_refused(store, url):
    with connection(url) as conn, pytest.raises(StoreError, match="no open transaction"):
        store.enqueue([a_job()], conn=conn)
    assert count(store) == 0


def test_a_connection_of_another_kind_is_refused(store):
    with closing(sqlite3.connect(":memory:")) as conn, pytest.raises(StoreError, match="sqlite3"):
        store.enqueue([a_job()], conn=conn)


def test_a_connection_of_the_standard_library_needs_its_driver(tmp_path):
    with closing(open_store(f"sqlite:///{tmp_path / 'own.db'}?driver=sqlite3")) as store:
        store.install()
        with closing(sqlite3.connect(tmp_path / "own.db", isolation_level=None)) as conn:
            conn.execute("BEGIN IMMEDIATE")
            (gone,) = store.enqueue([a_job()], conn=conn)
            conn.execute("ROLLBACK")
            conn.execute("BEGIN IMMEDIATE")
            (made,) = store.enqueue([a_job()], conn=conn)
            conn.execute("COMMIT")
        assert (gone.id, store.states([made.id])) == (made.id, {made.id: "waiting"})


def test_the_drivers_can_do_the_same(tmp_path, clock):
    """The whole way of a job, through the standard library's sqlite3."""
    with closing(
        open_store(f"sqlite:///{tmp_path / 'own.db'}?driver=sqlite3", clock=clock)
    ) as store:
        joined(store)
        parent, child = store.enqueue(
            [a_job(identity="i", tags=("x",)), a_job(after=(Edge(0, inside=True),))]
        )
        (job,) = claimed(store, 4)
        assert store.finish(1, [success(job)]) == {parent.id}
        assert store.settle() == 1
        (job,) = claimed(store)
        assert store.end(1, [ending(job, "held")]) == {child.id}
        assert [a.cause for a in store.attempts_of(child.id)] == ["exception"]
        assert store.promote() == 0


# looking for jobs


def test_jobs_are_found_by_what_they_are(store, clock):
    a = one(store, task="a", queue="q", tags=("x", "y"), key="k")
    clock.advance(10)
    b, c = enqueued(store, 2, task="b", tags=("y",), parent_id=a)
    store.hold(c, "why")

    def found(**given) -> list[int]:
        return [job.id for job in store.search.jobs(Filter(**given), 10)]

    assert found() == [c, b, a]
    assert found(tasks=["a", "b"], states=frozenset({"waiting"})) == [b, a]
    assert found(tags=["x"]) == [a]
    assert found(tags=["x", "y"]) == [c, b, a]
    assert found(queues=["q"]) == found(keys=["k"]) == found(ids=[a]) == [a]
    assert found(parents=[a], last_id=c) == [b]
    assert found(since=clock.now()) == [c, b]
    assert found(tasks=[]) == found(tags=[]) == found(states=frozenset()) == []
    assert store.job(key="k").id == a
    assert store.ahead(store.job(c)) == 1
