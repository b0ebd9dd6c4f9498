"""Values for the tests of the store; each hides what a test is not about."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar
from urllib.parse import urlsplit

import apsw
import psycopg

from genba.storage.nodes.nodes import Orphan
from genba.storage.records import Claimed, Edge, Ending, Enqueued, JobId, NewJob, NewNode, Success
from genba.storage.store import Store, open_store

T = TypeVar("T")

SECOND = 1_000_000
HOUR = 3_600 * SECOND
LEASE = 48 * HOUR  # time that passes is mostly not about leases
CLAIM = 77
TASK = "shop.pay"
LONG_ARGS = b'{"text": "%s"}' % (b"x" * 10_000)
OTHERS_ERROR = '{"type":"ValueError","message":"50%_off!"}'


def a_job(**given: Any) -> NewJob:
    return NewJob(**{"task": TASK, "args": b"{}", **given})


def after(*jobs: int, wants: str = "success") -> tuple[Edge, ...]:
    return tuple(Edge(job, wants) for job in jobs)


def enqueued(store: Store, count: int = 1, **given: Any) -> list[JobId]:
    return [made.id for made in store.enqueue([a_job(**given) for _ in range(count)])]


def one(store: Store, **given: Any) -> JobId:
    return enqueued(store, **given)[0]


def a_node(id: int = 1, **given: Any) -> NewNode:
    return NewNode(
        **{
            "id": id,
            "name": f"node-{id}",
            "host": "here",
            "boot_id": "b",
            "pid": 100 + id,
            "slots": 2,
            "lease": LEASE,
            "queues": ("default",),
            "tasks": ({"name": TASK},),
            "version": "0",
            **given,
        }
    )


def joined(store: Store, id: int = 1, **given: Any) -> int:
    """A live node's id."""
    store.install()
    store.nodes.join(a_node(id, **given))
    return id


def claimed(store: Store, count: int = 1, *, node: int = 1, claim: int = CLAIM) -> list[Claimed]:
    return store.claim(node, claim, {"default": count}, [TASK])


def running(store: Store, **given: Any) -> Claimed:
    """A new job, claimed by node 1 (which must have joined)."""
    one(store, **given)
    (job,) = claimed(store)
    return job


def success(job: Claimed, *, claim: int = CLAIM, **given: Any) -> Success:
    fence = {"id": job.id, "attempt": job.attempt, "claim": claim, "claimed": job.claimed_at}
    return Success(
        **{
            **fence,
            "result": b"3",
            "started": 10,
            "ended": 20,
            "pid": 4,
            "cpu": 5,
            "peak": 6,
            "limited": True,
            **given,
        }
    )


def ending(job: Claimed, state: str = "failed", cause: str = "exception", **given: Any) -> Ending:
    return Ending(
        **{
            "id": job.id,
            "attempt": job.attempt,
            "claim": CLAIM,
            "state": state,
            "cause": cause,
            **given,
        }
    )


def loss(orphan: Orphan, now: int) -> Ending:
    """The judge of a test: back into the queue, one loss more."""
    return Ending(
        id=orphan.id,
        attempt=orphan.attempt,
        claim=orphan.claim,
        state="waiting",
        cause="node lost",
        losses=orphan.losses + 1,
        happened=orphan.started_mark is not None,
    )


def state(store: Store, id: JobId) -> str:
    return store.states([id])[id]


def states(store: Store, ids: Iterable[JobId]) -> list[str]:
    return [state(store, id) for id in ids]


def finish(store: Store, id: JobId, end: str = "succeeded", *, node: int = 1) -> None:
    """Claims what waits until it has `id`, and ends that one."""
    for job in claimed(store, 64, node=node):
        if job.id != id:
            store.end(node, [ending(job, "waiting", "drain", happened=False)])
        elif end == "succeeded":
            assert store.finish(node, [success(job)]) == {id}
        else:
            assert store.end(node, [ending(job, end)]) == {id}
    assert state(store, id) == end


def settle(store: Store) -> None:
    """Until nothing is left to look at."""
    while store.settle():
        pass


@contextmanager
def connection(url: str) -> Iterator[Any]:
    """A connection that is not the store's: apsw or psycopg, each statement its own commit."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        lite = apsw.Connection(parts.path[1:])
        lite.set_busy_timeout(5000)
        try:
            yield lite
        finally:
            lite.close()
        return
    with psycopg.connect(url, autocommit=True) as server:
        yield server


def rows(url: str, query: str) -> Sequence[tuple[Any, ...]]:
    """`query` names tables as the migrations do: genba.job."""
    with connection(url) as conn:
        return conn.execute(spoken(url, query)).fetchall()


def spoken(url: str, text: str) -> str:
    """A statement as the engine takes it: tables are genba.job, and NO_ARGS stands for the bytes of {}."""
    if url.startswith("postgres"):
        return text.replace("NO_ARGS", "'{}'::bytea")
    return text.replace("genba.", "genba_").replace("NO_ARGS", "X'7B7D'")


@contextmanager
def transaction(url: str) -> Iterator[Any]:
    """A transaction of the caller's own, as `conn=` takes it; the test commits or rolls back by SQL."""
    with connection(url) as conn:
        conn.execute("BEGIN IMMEDIATE" if url.startswith("sqlite") else "BEGIN")
        yield conn


def together(count: int, act: Callable[[int], T]) -> list[T]:
    """What `count` threads get from `act`, all started at the same moment."""
    start = threading.Barrier(count)

    def run(i: int) -> T:
        start.wait()
        return act(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def in_processes(count: int, act: Callable[[str], T], url: str) -> list[T]:
    """What `act(url)` gives in each of `count` fresh processes; `act` must be importable."""
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(act, url) for _ in range(count)]]


def enqueue_the_same(url: str) -> list[Enqueued]:
    with closing(open_store(url)) as store:
        return together(6, lambda _: store.enqueue([a_job(identity="same")])[0])


def install(url: str) -> int:
    """How many migrations the database has afterwards."""
    with closing(open_store(url)) as store:
        store.install()
    return len(rows(url, "SELECT version FROM genba.migration"))
