"""Arguments are the same however long they are, and go when their job goes."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.storage.builders import (
    CLAIM,
    HOUR,
    LONG_ARGS,
    TASK,
    a_job,
    claimed,
    connection,
    finish,
    joined,
    one,
    rows,
    success,
)

from genba.storage.engines.database import LONG_ARGUMENTS_BYTES
from genba.storage.jobs.search import Filter
from genba.storage.store import open_store

SHORT = b'{"n": 1}'


@pytest.fixture(autouse=True)
def _node(store):
    joined(store)


def kept_apart(url: str) -> list[int]:
    return [id for (id,) in rows(url, "SELECT job_id FROM genba.argument ORDER BY job_id")]


on_sqlite = pytest.mark.parametrize(
    "engine", ["sqlite"], indirect=True
)  # PostgreSQL keeps them apart by itself


@pytest.mark.parametrize(
    "size",
    [LONG_ARGUMENTS_BYTES - 1, LONG_ARGUMENTS_BYTES, LONG_ARGUMENTS_BYTES + 1, 5_000, 1_000_000],
)
@pytest.mark.parametrize("together", [False, True])
def test_every_claim_or_read_of_a_job_has_its_arguments(store, size, together):
    args = b"x" * size
    if together:
        ids = [
            made.id
            for made in store.enqueue([a_job(args=args), a_job(args=SHORT), a_job(args=args[::-1])])
        ]
    else:
        ids = [one(store, args=each) for each in (args, SHORT, args[::-1])]

    assert [store.job(id).args for id in ids] == [args, SHORT, args[::-1]]
    assert [job.args for job in claimed(store, 4)] == [args, SHORT, args[::-1]]
    assert sorted((job.id, job.args) for job in store.claims.jobs_of_claim(1, CLAIM)) == [
        (ids[0], args),
        (ids[1], SHORT),
        (ids[2], args[::-1]),
    ]


def test_by_whatever_way_a_job_is_found_its_arguments_are_there(store):
    long, short = one(store, args=LONG_ARGS, key="long"), one(store, args=SHORT, key="short")

    assert (store.job(key="long").args, store.job(key="short").args) == (LONG_ARGS, SHORT)
    assert {job.id: job.args for job in store.search.jobs(Filter(), 10)} == {
        long: LONG_ARGS,
        short: SHORT,
    }
    assert store.claims.claim_job(1, CLAIM, long).args == LONG_ARGS


def test_a_dedicated_job_has_its_long_arguments(store):
    one(store, args=LONG_ARGS, options='{"dedicated":true}')

    (job,) = store.claims.claim_dedicated(1, CLAIM, ["default"], [TASK], 1)

    assert job.args == LONG_ARGS


def test_a_job_that_comes_back_has_its_arguments_again(store):
    id = one(store, args=LONG_ARGS)
    finish(store, id)

    store.bulk.requeue([id])

    (job,) = claimed(store)
    assert (job.id, job.args) == (id, LONG_ARGS)


@on_sqlite
def test_a_claim_and_an_end_do_not_write_long_arguments_again(store, url):
    """The row that they write anew does not have them."""
    id = one(store, args=LONG_ARGS)
    (job,) = claimed(store)
    store.finish(1, [success(job)])

    assert rows(url, f"SELECT length(args) FROM genba.job WHERE id = {id}") == [(0,)]
    assert kept_apart(url) == [id]


@on_sqlite
def test_long_arguments_go_with_their_job(store, url, clock):
    pruned, deleted, kept = (one(store, args=LONG_ARGS) for _ in range(3))
    finish(store, pruned)
    clock.advance("2h")

    store.prune(clock.now() - HOUR)
    store.bulk.delete([deleted])

    assert kept_apart(url) == [kept]


@on_sqlite
def test_an_enqueue_that_is_undone_leaves_no_arguments(store, url):
    one(store, args=LONG_ARGS, identity="i", key="k")
    there = kept_apart(url)

    one(store, args=LONG_ARGS[::-1], identity="i", key="k", on_conflict="return")
    with connection(url) as conn, closing(open_store(url)) as other:
        conn.execute("BEGIN IMMEDIATE")
        other.enqueue([a_job(args=LONG_ARGS), a_job(args=LONG_ARGS)], conn=conn)
        conn.execute("ROLLBACK")

    assert kept_apart(url) == there
