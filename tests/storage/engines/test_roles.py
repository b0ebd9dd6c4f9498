"""Roles on PostgreSQL: each may do what the table in docs/howto/postgres.md says, and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import psycopg
import pytest
from tests.storage.builders import (
    a_job,
    a_node,
    after,
    claimed,
    joined,
    one,
    rows,
    running,
    success,
)

from genba import Genba, Limit, Rate
from genba.domain.limits import LIMIT, LimitRule, SlotNeed
from genba.errors import BadOption, StoreError
from genba.storage.engines.postgres.roles import ROLE_KINDS, grant
from genba.storage.store import Store, open_store

GPU = {"needs": (SlotNeed("gpu", "gpu", LIMIT),), "rules": (LimitRule("gpu", 1),)}


@pytest.fixture(scope="module")
def urls(databases: Any, template: str) -> Iterator[dict[str, str]]:
    """The owner's database, and the same for one of each role."""
    with ExitStack() as stack:
        url = databases.url(stack.enter_context(databases.fresh(template)))
        found = {"owner": url}
        conn = stack.enter_context(psycopg.connect(url, autocommit=True))
        for kind in ROLE_KINDS:
            role = f"genba_{kind}_{uuid.uuid4().hex[:8]}"
            conn.execute(f'CREATE ROLE "{role}"')
            stack.callback(_forget, url, role)
            grant(url, role, kind)
            found[kind] = _as(url, role)
        yield found


@pytest.fixture(scope="module")
def stores(urls: dict[str, str]) -> Iterator[dict[str, Store]]:
    with ExitStack() as stack:
        found = {kind: stack.enter_context(closing(open_store(url))) for kind, url in urls.items()}
        joined(found["owner"])
        yield found


def _as(url: str, role: str) -> str:
    """The same user after SET ROLE, with no other rights."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    return parts._replace(query=urlencode({**query, "options": f"-crole={role}"})).geturl()


def _forget(url: str, role: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(f'DROP OWNED BY "{role}"')
        conn.execute(f'DROP ROLE "{role}"')


def _end(store: Store, owner: Store) -> Any:
    job = running(owner)
    return store.finish(1, [success(job)])


def _join(store: Store, owner: Store) -> None:
    number = 10 + uuid.uuid4().int % 1_000_000
    store.nodes.join(a_node(number))
    store.nodes.leave(number)


def _alter(store: Store, owner: Store) -> Any:
    id = one(owner, delay=10**9)
    with store._db.transaction() as tx:
        return tx.select("UPDATE genba.job SET args = '{}' WHERE id = :id RETURNING id", id=id)


Deed = Callable[[Store, Store], Any]
DEEDS: dict[str, tuple[set[str], Deed]] = {
    "enqueue": ({"producer", "worker", "admin"}, lambda s, o: s.enqueue([a_job()])),
    "enqueue many": ({"producer", "worker", "admin"}, lambda s, o: s.enqueue([a_job(), a_job()])),
    "enqueue with a limit": (
        {"producer", "worker", "admin"},
        lambda s, o: s.enqueue([a_job(**GPU)]),
    ),
    "enqueue with a key": (
        {"producer", "worker", "admin"},
        lambda s, o: s.enqueue([a_job(identity=uuid.uuid4().hex)]),
    ),
    "enqueue after another, with tags": (
        {"producer", "worker", "admin"},
        lambda s, o: s.enqueue([a_job(after=after(one(o)), tags=("x",))]),
    ),
    "see states": ({"producer", "worker", "reader", "admin"}, lambda s, o: s.states([one(o)])),
    "read a job": ({"worker", "reader", "admin"}, lambda s, o: s.job(one(o))),
    "read events": ({"worker", "reader", "admin"}, lambda s, o: s.events.page(s.events.end())),
    "read history": ({"worker", "reader", "admin"}, lambda s, o: s.attempts_of(1)),
    "verify": ({"worker", "reader", "admin"}, lambda s, o: s.verify()),
    "claim": ({"worker", "admin"}, lambda s, o: [one(o), claimed(s)]),
    "end an attempt": ({"worker", "admin"}, _end),
    "be a node": ({"worker", "admin"}, _join),
    "cancel": ({"worker", "admin"}, lambda s, o: s.cancel(one(o, delay=10**9), None)),
    "delete": ({"worker", "admin"}, lambda s, o: s.bulk.delete([one(o, delay=10**9)])),
    "pause a queue": (
        {"worker", "admin"},
        lambda s, o: s.operators.pause("another", None, "me", None),
    ),
    "disable a task": (
        {"admin"},
        lambda s, o: s.operators.switch("shop.pay", False, "me", None, None),
    ),
    "alter a job": ({"worker", "admin"}, _alter),
    "remove the tables": (set(), lambda s, o: s.uninstall()),
}


@pytest.mark.parametrize("what", DEEDS)
@pytest.mark.parametrize("kind", ROLE_KINDS)
def test_each_role_may_do_what_the_matrix_says_and_nothing_else(stores, kind, what):
    allowed, deed = DEEDS[what]
    if kind in allowed:
        deed(stores[kind], stores["owner"])
        return
    with pytest.raises(StoreError, match=r"permission denied|must be owner"):
        deed(stores[kind], stores["owner"])


# What each role may do with each table: "siud", a capital letter for all columns, a small one for some: SOME has those.
TABLE_RIGHTS = {
    "producer": {
        "migration": "S",
        "namespace": "S",
        "job": "siu",
        "event": "I",
        "tag": "SI",
        "dependency": "SI",
        "unsettled": "SI",
        "recheck": "SI",
        "bucket_limit": "SI",
        "bucket": "SIu",
        "question": "SIu",
        "fair": "SIu",
        "node": "Su",
        "task": "S",
        "queue": "S",
        "attempt": "",
        "lock": "",
        "waiter": "",
        "schedule": "",
        "tick": "",
        "control": "",
        "message": "",
        "session": "",
        "listener": "",
    },
    "worker": {
        "migration": "S",
        "task": "SIu",
        "queue": "SIu",
        "bucket_limit": "SIu",
    },  # and all of the others
    "reader": {},  # looks at all
    "admin": {"migration": "S"},
}
USUAL = {"producer": "", "worker": "SIUD", "reader": "S", "admin": "SIUD"}
SOME = {
    ("producer", "job", "i"): (
        "id created_at due_at due_from rank state expires_at unique_until parent_id priority open_deps once_waiting "
        "namespace queue task key key_hash tags options args buckets parked_on capped"
    ),
    ("producer", "job", "u"): "parked_on granted_at rank buckets capped fair_key key_hash",
    ("producer", "bucket", "u"): "taken owner full_at next_at",
    ("producer", "question", "u"): "look_at",
    ("producer", "fair", "u"): "last",
    ("producer", "node", "u"): "hungry",
    ("worker", "task", "u"): "title definition changed_at changed_by",
    ("worker", "queue", "u"): "vtime fair_by paused paused_until changed_at changed_by",
    ("worker", "bucket_limit", "u"): "n most ordered per burst",
}
HIDDEN = {"args", "result", "saved", "error", "progress"}


@pytest.mark.parametrize("kind", ROLE_KINDS)
def test_each_role_has_these_rights_on_each_table_and_no_other(stores, kind):
    found: dict[str, str] = {}
    some: dict[tuple[str, str, str], list[str]] = {}
    with stores["owner"]._db.transaction() as tx:
        columns: dict[str, list[str]] = {}
        for table, column in tx.select(
            "SELECT table_name::text, column_name::text FROM information_schema.columns WHERE table_schema = 'genba'"
        ):
            columns.setdefault(table, []).append(column)
    system = "OVERRIDING SYSTEM VALUE SELECT NULL"
    for table, names in sorted(columns.items()):
        allowed = {
            "s": [
                one
                for one in names
                if may(stores[kind], f"SELECT {one} FROM genba.{table} LIMIT 0")
            ],
            "i": [
                one
                for one in names
                if may(stores[kind], f"INSERT INTO genba.{table} ({one}) {system} LIMIT 0")
            ],
            "u": [
                one
                for one in names
                if may(stores[kind], f"UPDATE genba.{table} SET {one} = DEFAULT WHERE false")
            ],
            "d": names if may(stores[kind], f"DELETE FROM genba.{table} WHERE false") else [],
        }
        found[table] = "".join(
            r.upper() if mine == names else r for r, mine in allowed.items() if mine
        )
        some |= {(kind, table, r): mine for r, mine in allowed.items() if mine and mine != names}

    assert found == {table: TABLE_RIGHTS[kind].get(table, USUAL[kind]) for table in columns}
    assert set(some.pop(("producer", "job", "s"), HIDDEN)) in (set(columns["job"]) - HIDDEN, HIDDEN)
    assert {what: sorted(names) for what, names in some.items()} == {
        what: sorted(names.split()) for what, names in SOME.items() if what[0] == kind
    }


def may(store: Store, text: str) -> bool:
    """Whether PostgreSQL lets it do that; what else is wrong with it is no matter of rights."""
    try:
        with store._db.transaction() as tx:
            tx.select(text)
    except StoreError as error:
        return "permission denied" not in str(error)
    return True


@pytest.fixture(scope="module")
def shop(urls: dict[str, str], stores: dict[str, Store]) -> Iterator[Any]:
    """Tasks of every kind, as a producer has them."""
    with closing(Genba(urls["producer"])) as app:
        said: dict[str, dict[str, Any]] = {
            "plain": {},
            "limited": {"limits": [Limit("b{x}", 1)]},
            "ordered": {"limits": [Limit("o", 1, ordered=True)]},
            "rated": {"limits": [Rate("r", "1/h")]},
            "single": {"max_running": 1},
            "capped": {"max_waiting": 1_000},
            "asking": {"ready": [app.condition(asks)]},
            "fair": {"queue": "turns", "fair_by": "x"},
        }
        stores["owner"].nodes.join(
            a_node(9, tasks=({"name": "t.fair", "queue": "turns", "fair_by": "x"},))
        )
        yield {
            name: app.task(name=f"t.{name}", **options)(lambda x: None)
            for name, options in said.items()
        }


def asks(job: Any) -> bool:
    return True


@pytest.mark.parametrize(
    "task", ["plain", "limited", "ordered", "rated", "single", "capped", "asking", "fair"]
)
def test_a_producer_may_enqueue_whatever_its_task_says(shop, urls, task):
    one = shop[task]
    jobs = [one.enqueue(1), one.enqueue(1), *one.app.enqueue_many([one.call(x) for x in range(5)])]
    jobs += [
        one.using(**more).enqueue(1)
        for more in ({"delay": 9}, {"after": [jobs[0]]}, {"parent": jobs[0].id})
    ]
    jobs += [
        one.using(**more).enqueue(1)
        for more in ({"tags": ["x"]}, {"expires": 60}, {"key": f"{task}-key"})
    ]
    assert one.using(key=f"{task}-key").enqueue(1).id == jobs[-1].id
    with psycopg.connect(urls["producer"]) as conn, conn.transaction():
        jobs += one.app.enqueue_many([one.call(1)], conn=conn)

    assert len({job.id for job in jobs}) == len(jobs)


def test_a_producer_may_use_a_key_again_but_replaces_nothing(shop, stores):
    """To replace a job is to cancel it, and that is not for producers."""
    first = shop["plain"].using(key="again").enqueue(1)
    stores["owner"].cancel(first.id, None)

    second = shop["plain"].using(key="again").enqueue(1)
    assert second.id != first.id
    with pytest.raises(StoreError, match="permission denied for table job"):
        shop["plain"].using(key="again", on_conflict="replace").enqueue(1)


def test_a_role_that_is_granted_anew_keeps_no_other_right(stores, databases, template):
    with (
        databases.fresh(template) as name,
        psycopg.connect(databases.url(name), autocommit=True) as conn,
    ):
        url, role = databases.url(name), f"genba_{uuid.uuid4().hex[:8]}"
        conn.execute(f'CREATE ROLE "{role}"')
        try:
            grant(url, role, "admin")
            grant(url, role, "reader")
            held = rows(
                url,
                f"SELECT DISTINCT privilege_type FROM information_schema.table_privileges WHERE grantee = '{role}'",
            )
            assert held == [("SELECT",)]
        finally:
            _forget(url, role)


def test_an_unknown_kind_role_or_server_is_an_error(databases, template, tmp_path):
    with databases.fresh(template) as name:
        with pytest.raises(BadOption, match="producer, worker, reader, admin"):
            grant(databases.url(name), "x", "king")
        with pytest.raises(StoreError, match="cannot make 'nobody' a reader"):
            grant(databases.url(name), "nobody", "reader")
    with pytest.raises(BadOption, match="only PostgreSQL has roles"):
        grant(f"sqlite:///{tmp_path}/x.db", "x", "reader")
