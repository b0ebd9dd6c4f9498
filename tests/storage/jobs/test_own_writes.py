"""What a running job writes about itself: fenced, and in one commit with what its user writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from tests.storage.builders import (
    CLAIM,
    a_job,
    after,
    claimed,
    connection,
    joined,
    one,
    running,
    settle,
    state,
)

from genba.domain.outcome import AttemptReport, Fence, OutcomeRequest
from genba.errors import LeaseLost, Stopped, StoreError, StoreUnreachable
from genba.storage.engines.database import AnswerLost
from genba.storage.records import Claimed
from genba.storage.store import Store

DONE = OutcomeRequest(wants="succeed", result=b"7")
REPORT = AttemptReport(progress='[1.0,2.0,""]', log="printed", ran=5, pid=4, cpu=3, peak=2)
SECOND = 1_000_000


def fence(job: Claimed) -> Fence:
    return job.id, job.attempt, CLAIM


@pytest.fixture
def job(store: Store) -> Claimed:
    joined(store)
    return running(store)


@pytest.fixture
def notes(url: str) -> Iterator[Any]:
    """A table of the user's; gives what is in it."""
    with connection(url) as conn:
        conn.execute("CREATE TABLE IF NOT EXISTS note (word TEXT UNIQUE)")
        conn.execute("DELETE FROM note")
        yield lambda: sorted(row[0] for row in conn.execute("SELECT word FROM note").fetchall())


def write(conn: Any, word: str) -> None:
    conn.execute(f"INSERT INTO note VALUES ('{word}')")


# checkpoints


def test_a_checkpoint_comes_with_the_next_claim(store: Store, job: Claimed) -> None:
    store.own_writes.save(fence(job), b'{"saved":1}')
    store.own_writes.save(fence(job), b'{"saved":2}')
    store.own_writes.end(fence(job), OutcomeRequest(wants="retry", delay=0, free=True), REPORT, 0.0)

    (again,) = claimed(store)
    assert again.saved == b'{"saved":2}'


@pytest.mark.parametrize("wrong", [(0, 1), (1, 0)])
def test_only_the_owner_saves_and_ends(store: Store, job: Claimed, wrong: tuple[int, int]) -> None:
    other = (job.id, job.attempt + wrong[0], CLAIM + wrong[1])

    with pytest.raises(LeaseLost):
        store.own_writes.save(other, b"{}")
    with pytest.raises(LeaseLost):
        store.own_writes.end(other, DONE, REPORT, 0.0)
    with pytest.raises(LeaseLost):
        store.own_writes.transaction(other, lambda: (DONE, REPORT, 0.0)).__enter__()
    assert state(store, job.id) == "running"
    store.own_writes.save(fence(job), b"{}")


# the end


def test_an_end_is_written_with_its_history_and_only_once(store: Store, job: Claimed) -> None:
    store.own_writes.end(fence(job), DONE, REPORT, 0.0)

    record = store.job(job.id)
    assert record is not None
    assert (record.state, record.result, record.progress, record.claim_id) == (
        "succeeded",
        b"7",
        '[1.0,2.0,""]',
        None,
    )
    (attempt,) = store.attempts_of(job.id)
    assert (attempt.cause, attempt.log, attempt.pid, attempt.cpu, attempt.peak) == (
        "returned",
        "printed",
        4,
        3,
        2,
    )
    assert attempt.node == 1
    assert store.own_writes.ended(fence(job))
    with pytest.raises(LeaseLost):
        store.own_writes.end(fence(job), OutcomeRequest(wants="fail", reason="no"), REPORT, 0.0)
    assert state(store, job.id) == "succeeded"


@pytest.mark.parametrize(
    ("wish", "wanted"),
    [
        (OutcomeRequest(wants="fail", reason="why"), ("failed", "why")),
        (OutcomeRequest(wants="hold", reason="why"), ("held", "why")),
        (
            OutcomeRequest(wants="retry", delay=SECOND, free=True, reason="why"),
            ("scheduled", "why"),
        ),
        (OutcomeRequest(wants="retry", at=0, free=True), ("waiting", None)),
        (OutcomeRequest(wants="retry", delay=0), ("failed", "returned")),  # no budget
    ],
)
def test_a_job_ends_as_it_wishes(
    store: Store, job: Claimed, wish: OutcomeRequest, wanted: tuple[str, str | None]
) -> None:
    store.own_writes.end(fence(job), wish, REPORT, 0.0)

    record = store.job(job.id)
    assert record is not None
    assert (record.state, record.reason) == wanted
    assert (record.retries, record.result) == (0, None)


def test_a_job_that_was_cancelled_meanwhile_ends_so(store: Store, job: Claimed) -> None:
    store.cancel(job.id, "enough")

    store.own_writes.end(fence(job), DONE, REPORT, 0.0)

    record = store.job(job.id)
    assert record is not None
    assert (record.state, record.reason) == ("cancelled", "enough")


def test_children_of_a_job_that_ends_itself_are_let_go(store: Store, job: Claimed) -> None:
    child = one(store, after=after(job.id))

    store.own_writes.end(fence(job), DONE, REPORT, 0.0)

    settle(store)
    assert state(store, child) == "waiting"


def test_a_write_after_the_end_is_refused_and_changes_nothing(store: Store, job: Claimed) -> None:
    store.own_writes.end(fence(job), DONE, REPORT, 0.0)

    store.own_writes.afterwards(
        fence(job), '{"type":"ValueError","message":"late"}', "printed, and more"
    )

    assert state(store, job.id) == "succeeded"
    assert store.attempts_of(job.id)[0].log == "printed, and more"
    with store._db.statement() as tx:
        kinds = [
            row[0]
            for row in tx.select("SELECT kind FROM genba.event WHERE job_id = :id", id=job.id)
        ]
    assert kinds.count("error_after_end") == 1


# the transaction


def test_the_users_writes_new_jobs_and_the_end_are_one_commit(
    store: Store, job: Claimed, notes: Any
) -> None:
    own = store.own_writes.transaction(fence(job), lambda: (DONE, REPORT, 0.0))
    with own as conn:
        write(conn, "paid")
        store.own_writes.save(fence(job), b'{"saved":1}', own)
        (child,) = store.enqueue([a_job(after=after(job.id))], conn)

    assert notes() == ["paid"]
    assert state(store, job.id) == "succeeded"
    settle(store)
    assert state(store, child.id) == "waiting"
    assert len(store.attempts_of(job.id)) == 1


def test_an_exception_undoes_all_of_it_and_is_the_users_own(
    store: Store, job: Claimed, notes: Any
) -> None:
    children = []

    def fail(conn: Any) -> None:
        write(conn, "paid")
        children.extend(store.enqueue([a_job()], conn))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        within(store, job, fail)

    assert notes() == []
    assert state(store, job.id) == "running"
    assert store.states([children[0].id]) == {}
    store.own_writes.end(fence(job), DONE, REPORT, 0.0)  # nothing is locked


def test_a_statement_that_failed_raises_what_the_driver_raises(
    store: Store, job: Claimed, notes: Any
) -> None:
    with pytest.raises(Exception, match=r"(?i)unique") as caught:
        within(store, job, lambda conn: conn.execute("INSERT INTO note VALUES ('paid'), ('paid')"))

    assert not isinstance(caught.value, StoreError)
    assert notes() == []


def test_a_job_that_was_asked_to_stop_does_not_begin(store: Store, job: Claimed) -> None:
    store.cancel(job.id, None)

    with pytest.raises(Stopped):
        within(store, job, lambda conn: None)


def test_a_block_that_commits_itself_is_an_error(
    store: Store, job: Claimed, engine: str, notes: Any
) -> None:
    with pytest.raises((StoreError, psycopg.ProgrammingError)):
        within(store, job, lambda conn: conn.execute("COMMIT"))

    assert state(store, job.id) == "running"
    one(store)  # no other process is locked out


def test_a_cancel_that_meets_it_comes_too_late(store: Store, job: Claimed, engine: str) -> None:
    """On SQLite it waits for its turn to write; PostgreSQL takes the wish, and the commit is quicker."""
    with _transaction(store, job):
        asked: list[bool] = []
        other = threading.Thread(target=lambda: asked.append(store.cancel(job.id, "enough")))
        other.start()
        other.join(0.3 if engine == "sqlite" else 10)
        assert asked == ([] if engine == "sqlite" else [True])
    other.join(10)

    assert asked == [engine != "sqlite"]
    assert state(store, job.id) == "succeeded"


def test_on_sqlite_it_ends_when_its_time_is_over(
    store: Store, job: Claimed, engine: str, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine != "sqlite":
        pytest.skip("PostgreSQL has other writers, and deadlines of its own")
    monkeypatch.setattr("genba.storage.jobs.own_writes.OWN_TRANSACTION_SECONDS", 0.2)

    def dawdle(conn: Any) -> None:
        write(conn, "paid")
        one(store)  # gets its turn when ours is over
        write(conn, "unpaid")

    with pytest.raises(StoreError, match=r"more than 0\.2 s"):
        within(store, job, dawdle)

    assert notes() == []
    assert state(store, job.id) == "running"
    endless = (
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n"
    )
    with pytest.raises(StoreError, match=r"more than 0\.2 s"):
        within(store, job, lambda conn: conn.execute(endless).fetchall())
    one(store)


def test_a_lost_answer_to_the_commit_is_looked_up(
    store: Store, job: Claimed, engine: str, notes: Any
) -> None:
    if engine != "postgres":
        pytest.skip("SQLite has no connection that could break")
    own = _transaction(store, job)
    with own as conn:
        write(conn, "paid")
        joint = own._open[0]
        real = joint.commit

        def commit() -> None:
            real()
            raise AnswerLost("cut after the commit")

        joint.commit = commit

    assert state(store, job.id) == "succeeded"
    assert notes() == ["paid"]


def test_a_connection_that_breaks_undoes_all_of_it(
    store: Store, job: Claimed, engine: str, url: str, notes: Any
) -> None:
    if engine != "postgres":
        pytest.skip("SQLite has no connection that could break")

    def hang_up(conn: Any) -> None:
        write(conn, "paid")
        with connection(url) as other:
            other.execute("SELECT pg_terminate_backend(%s)", (conn.info.backend_pid,))

    with pytest.raises(StoreUnreachable):
        within(store, job, hang_up)

    assert notes() == []
    assert state(store, job.id) == "running"
    with _transaction(store, job) as conn:
        write(conn, "paid")
    assert notes() == ["paid"]


def _transaction(store: Store, job: Claimed) -> Any:
    return store.own_writes.transaction(fence(job), lambda: (DONE, REPORT, 0.0))


def within(store: Store, job: Claimed, body: Callable[[Any], Any]) -> None:
    with _transaction(store, job) as conn:
        body(conn)
