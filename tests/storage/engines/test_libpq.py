"""Statements of ours on PostgreSQL go straight through libpq, and mean what a cursor would mean."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from genba.storage.engines.postgres.libpq import MAX_PREPARED, LibpqConnection
from genba.storage.store import Store, open_store


@pytest.fixture
def conn(shared_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_database, autocommit=True) as conn:
        yield conn


@pytest.fixture(params=[True, False], ids=["prepared", "plain"])
def direct(conn, request) -> LibpqConnection:
    return LibpqConnection(psycopg, conn, prepare=request.param)


VALUES = {
    "int": 2**62,
    "small": -1,
    "text": "a%b",
    "none": None,
    "bytes": b"\0\xff",
    "yes": True,
    "list": [1, 2],
}
ECHO = (
    "SELECT %(int)s::bigint, %(small)s::int, %(text)s::text, %(none)s::text, %(bytes)s::bytea, %(yes)s::boolean, "
    "%(list)s::int[], %(text)s::text LIKE 'a%%'"
)


def test_values_and_rows_are_those_of_a_cursor(direct, conn):
    by_cursor = conn.cursor(binary=True).execute(ECHO, VALUES).fetchall()

    for _ in range(3):  # prepared, and again
        assert direct.execute(ECHO, VALUES).fetchall() == by_cursor
    assert by_cursor == [(2**62, -1, "a%b", None, b"\0\xff", True, [1, 2], True)]


def test_the_same_text_with_other_types_is_another_statement(direct):
    assert direct.execute("SELECT %(x)s", {"x": 1}).fetchone() == (1,)
    assert direct.execute("SELECT %(x)s", {"x": "one"}).fetchone() == ("one",)
    assert direct.execute("SELECT %(x)s", {"x": 2**40}).fetchone() == (2**40,)


def test_it_says_how_many_rows_a_statement_has_changed_and_whether_it_gives_any(direct):
    direct.begin()
    made = direct.execute(
        "CREATE TEMP TABLE t ON COMMIT DROP AS SELECT generate_series(1, 5) AS n", {}
    )
    gone = direct.execute("DELETE FROM t WHERE n > %(n)s", {"n": 2})
    none = direct.execute("SELECT n FROM t WHERE n > %(n)s", {"n": 2})
    direct.rollback()

    assert (made.description, gone.rowcount, gone.description) == (False, 3, False)
    assert (none.fetchall(), none.fetchone(), none.description) == ([], None, True)


def test_no_more_statements_stay_prepared_than_it_can_name(conn):
    direct = LibpqConnection(psycopg, conn, prepare=True)
    for n in range(MAX_PREPARED + 20):
        assert direct.execute(f"SELECT {n}", {}).fetchone() == (n,)

    assert conn.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (MAX_PREPARED,)


def test_a_wrong_statement_raises_what_a_cursor_raises_and_leaves_the_connection_usable(direct):
    for begin in (False, True):
        if begin:
            direct.begin()
        with pytest.raises(psycopg.errors.UndefinedTable):
            direct.execute("SELECT * FROM nowhere", {})
        direct.rollback()
        with pytest.raises(psycopg.errors.DivisionByZero):
            direct.execute("SELECT 1 / %(zero)s::int", {"zero": 0})
        assert direct.execute("SELECT 1", {}).fetchone() == (1,)


@contextmanager
def notes(conn: Any) -> Iterator[None]:
    conn.execute("CREATE TABLE public.note (n int PRIMARY KEY)")
    try:
        yield
    finally:
        conn.execute("DROP TABLE public.note")


def kept(conn: Any) -> list[int]:
    return [n for (n,) in conn.execute("SELECT n FROM public.note ORDER BY n").fetchall()]


PUT = "INSERT INTO public.note VALUES (%(n)s)"


def test_a_transaction_is_all_or_nothing(direct, conn, shared_database):
    with notes(conn), psycopg.connect(shared_database, autocommit=True) as other:
        direct.begin()
        direct.execute(PUT, {"n": 1})
        direct.execute(PUT, {"n": 2})
        assert kept(other) == []
        direct.commit()
        assert kept(other) == [1, 2]

        direct.begin()
        direct.execute(PUT, {"n": 3})
        direct.rollback()
        direct.begin()
        direct.commit()  # of nothing

        assert kept(other) == [1, 2]


def test_a_transaction_in_which_a_statement_has_failed_is_not_said_to_be_kept(direct, conn):
    with notes(conn):
        direct.begin()
        direct.execute(PUT, {"n": 1})
        with pytest.raises(psycopg.errors.UniqueViolation):
            direct.execute(PUT, {"n": 1})

        with pytest.raises(psycopg.InternalError, match="all of the transaction was undone"):
            direct.commit()

        assert kept(conn) == []


def test_what_is_sent_at_once_is_one_transaction(direct, conn):
    with notes(conn):
        steps = [(PUT, {"n": 1}), ("SELECT n FROM public.note", {}), (PUT, {"n": 2})]
        assert [answer.rows for answer in direct.pipeline(steps)] == [[], [(1,)], []]

        with pytest.raises(psycopg.errors.UniqueViolation):
            direct.pipeline([(PUT, {"n": 3}), (PUT, {"n": 1}), (PUT, {"n": 4})])

        assert kept(conn) == [1, 2]
        assert direct.execute("SELECT 1", {}).fetchone() == (1,)


def test_much_goes_both_ways(direct):
    """More than the kernel holds for us, while the server's answer waits to be read."""
    much = b"x" * 30_000_000
    direct.begin()

    assert direct.execute("SELECT %(much)s::bytea, %(much)s::bytea", {"much": much}).fetchone() == (
        much,
        much,
    )


@pytest.mark.parametrize("begin", [False, True])
def test_a_server_that_hangs_up_is_an_error(conn, shared_database, begin):
    direct = LibpqConnection(psycopg, conn, prepare=True)
    with psycopg.connect(shared_database, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", (conn.info.backend_pid,))
    if begin:
        direct.begin()

    with pytest.raises(psycopg.OperationalError):
        direct.execute("SELECT pg_sleep(1)", {})
    direct.rollback()

    assert conn.closed


@pytest.mark.parametrize("begin", [False, True])
def test_it_does_not_wait_for_ever(conn, begin):
    direct = LibpqConnection(psycopg, conn, prepare=False)
    conn.limit = 0.2  # as connections of ours have one
    if begin:
        direct.begin()

    with pytest.raises(psycopg.OperationalError, match=r"no answer within 0\.2 s"):
        direct.execute("SELECT pg_sleep(30)", {})

    assert conn.closed


def test_a_connection_that_a_signal_has_cut_off_is_not_used_again(store_of_its_own):
    """As a job is stopped in the middle of a statement of genba's."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def wait(*, stopped_after: float) -> None:
        ring = threading.Timer(
            stopped_after, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)
        )
        with store._db.transaction() as tx:
            sessions.append(tx.execute("SELECT pg_backend_pid()", {}).fetchone())
            ring.start()
            tx.execute("SELECT pg_sleep(30)", {})

    store, sessions = store_of_its_own, []
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait(stopped_after=0.3)
    finally:
        signal.signal(signal.SIGUSR1, before)

    with store._db.statement() as tx:
        assert tx.execute("SELECT pg_backend_pid()", {}).fetchone() not in sessions


@pytest.fixture
def store_of_its_own(shared_database: str) -> Iterator[Store]:
    with closing(open_store(shared_database)) as store:
        yield store
