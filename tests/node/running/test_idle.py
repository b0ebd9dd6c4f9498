"""An idle node says that it is alive, and writes nothing else, whatever lies in the queue for later."""

from __future__ import annotations

from tests.storage.builders import connection
from tests.support import eventually

TABLES = (
    *(
        "job",
        "tag",
        "attempt",
        "event",
        "dependency",
        "unsettled",
        "question",
        "bucket",
        "bucket_limit",
        "recheck",
    ),
    *(
        "lock",
        "waiter",
        "schedule",
        "tick",
        "task",
        "queue",
        "fair",
        "node",
        "control",
        "message",
        "session",
    ),
    "listener",
)


def watch(url: str) -> None:
    """Note every written row in the table `written` from now on."""
    lite = url.startswith("sqlite")
    with connection(url) as conn:
        conn.execute("CREATE TABLE written (name text)")
        if not lite:
            conn.execute(
                "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN INSERT INTO public.written VALUES (TG_TABLE_NAME); RETURN NULL; END $$"
            )
        for table in TABLES:
            for what in ("INSERT", "UPDATE", "DELETE"):
                deed = (
                    f"BEGIN INSERT INTO written VALUES ('{table}'); END"
                    if lite
                    else "EXECUTE FUNCTION note()"
                )
                name = f"genba_{table}" if lite else f"genba.{table}"
                each = "" if lite else "FOR EACH ROW"
                conn.execute(
                    f"CREATE TRIGGER note_{table}_{what} AFTER {what} ON {name} {each} {deed}"
                )


def written(url: str) -> list[str]:
    with connection(url) as conn:
        return [row[0] for row in conn.execute("SELECT name FROM written").fetchall()]


def test_regression_08_an_idle_node_with_a_thousand_future_jobs_writes_nothing_but_its_beat(
    jobs, url, start_node
):
    start_node("jobs:app", url, "--pool", "static", "--min", "1", env={"GENBA_LEASE": "8"})
    eventually(jobs.app.nodes, within=40)
    jobs.app.enqueue_many([jobs.add.using(at="+1 day").call(n) for n in range(1000)])
    jobs.add.enqueue(1).wait(30)  # it is up, and has nothing to do
    eventually(lambda: list(jobs.app.events(kinds=["worker_started"])), within=20)
    watch(url)
    before = len(written(url))  # what it was about to write when we began

    eventually(lambda: written(url)[before:].count("node") >= 2, within=40)

    assert set(written(url)[before:]) == {"node"}
    jobs.add.using(at="+1 day").enqueue(1)
    assert {"job", "event"} <= set(written(url))  # so it would have been seen
