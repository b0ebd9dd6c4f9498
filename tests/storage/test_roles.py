"""Roles on PostgreSQL: each may do what the table in docs/howto/postgres.md says, and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import psycopg
import pytest
from tests.storage.builders import a_job, a_node, after, claimed, joined, one, rows, running, success

from genba.domain.limit import LIMIT, Need, Rule
from genba.errors import BadOption, StoreError
from genba.storage.roles import KINDS, grant
from genba.storage.store import Store, open_store

GPU = {"needs": (Need("gpu", "gpu", LIMIT),), "rules": (Rule("gpu", 1),)}


@pytest.fixture(scope="module")
def stores(databases: Any, template: str) -> Iterator[dict[str, Store]]:
    """The owner's store, and one of each role, on one database."""
    with ExitStack() as stack:
        url = databases.url(stack.enter_context(databases.fresh(template)))
        owner = stack.enter_context(closing(open_store(url)))
        joined(owner)
        found = {"owner": owner}
        conn = stack.enter_context(psycopg.connect(url, autocommit=True))
        for kind in KINDS:
            role = f"genba_{kind}_{uuid.uuid4().hex[:8]}"
            conn.execute(f'CREATE ROLE "{role}"')
            stack.callback(_forget, url, role)
            grant(url, role, kind)
            found[kind] = stack.enter_context(closing(open_store(_as(url, role))))
        yield found


def _as(url: str, role: str) -> str:
    """The same user, who has put on a role and has no rights but those."""
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
    "enqueue with a limit": ({"producer", "worker", "admin"}, lambda s, o: s.enqueue([a_job(**GPU)])),
    "enqueue with a key": ({"producer", "worker", "admin"}, lambda s, o: s.enqueue([a_job(identity=uuid.uuid4().hex)])),
    "enqueue after another, with tags": (
        {"producer", "worker", "admin"}, lambda s, o: s.enqueue([a_job(after=after(one(o)), tags=("x",))])),
    "see states": ({"producer", "worker", "reader", "admin"}, lambda s, o: s.states([one(o)])),
    "read a job": ({"worker", "reader", "admin"}, lambda s, o: s.job(one(o))),
    "read events": ({"worker", "reader", "admin"}, lambda s, o: s.events.page(s.events.end())),
    "read history": ({"worker", "reader", "admin"}, lambda s, o: s.attempts(1)),
    "verify": ({"worker", "reader", "admin"}, lambda s, o: s.verify()),
    "claim": ({"worker", "admin"}, lambda s, o: [one(o), claimed(s)]),
    "end an attempt": ({"worker", "admin"}, _end),
    "be a node": ({"worker", "admin"}, _join),
    "cancel": ({"worker", "admin"}, lambda s, o: s.cancel(one(o, delay=10**9), None)),
    "delete": ({"worker", "admin"}, lambda s, o: s.bulk.delete([one(o, delay=10**9)])),
    "pause a queue": ({"worker", "admin"}, lambda s, o: s.policy.pause("another", None, "me", None)),
    "disable a task": ({"admin"}, lambda s, o: s.policy.switch("shop.pay", False, "me", None, None)),
    "alter a job": ({"worker", "admin"}, _alter),
    "remove the tables": (set(), lambda s, o: s.uninstall()),
}


@pytest.mark.parametrize("what", DEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_role_may_do_what_the_matrix_says_and_nothing_else(stores, kind, what):
    allowed, deed = DEEDS[what]
    if kind in allowed:
        deed(stores[kind], stores["owner"])
        return
    with pytest.raises(StoreError, match=r"permission denied|must be owner"):
        deed(stores[kind], stores["owner"])


def test_a_role_that_is_granted_anew_keeps_no_other_right(stores, databases, template):
    with databases.fresh(template) as name, psycopg.connect(databases.url(name), autocommit=True) as conn:
        url, role = databases.url(name), f"genba_{uuid.uuid4().hex[:8]}"
        conn.execute(f'CREATE ROLE "{role}"')
        try:
            grant(url, role, "admin")
            grant(url, role, "reader")
            held = rows(
                url, f"SELECT DISTINCT privilege_type FROM information_schema.table_privileges WHERE grantee = '{role}'"
            )
            assert held == [("SELECT",)]
        finally:
            _forget(url, role)


def test_what_is_no_kind_no_role_or_no_server_is_told(databases, template, tmp_path):
    with databases.fresh(template) as name:
        with pytest.raises(BadOption, match="producer, worker, reader, admin"):
            grant(databases.url(name), "x", "king")
        with pytest.raises(StoreError, match="cannot make 'nobody' a reader"):
            grant(databases.url(name), "nobody", "reader")
    with pytest.raises(BadOption, match="only PostgreSQL has roles"):
        grant(f"sqlite:///{tmp_path}/x.db", "x", "reader")
