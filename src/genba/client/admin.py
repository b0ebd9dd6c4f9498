"""AdminClient: what a client does with the database and the nodes as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from genba.client.async_methods import async_method
from genba.client.connection import ClientConnection, RunningTest
from genba.client.job import Job
from genba.client.lock import LockState, lock_states
from genba.client.operators import current_account
from genba.domain.clock import Clock
from genba.domain.duration import Micros
from genba.domain.pool_settings import PoolSettings, check_changes, check_pool
from genba.domain.untrusted_json import read_json
from genba.domain.url import mask_password
from genba.errors import BadOption, GenbaError
from genba.options.parse import KeepTimes
from genba.options.table import DEFAULT_POLICY
from genba.reports.doctor import Finding, examine
from genba.reports.overview import Overview, read_overview
from genba.storage.engines.postgres.create import create_database
from genba.storage.engines.postgres.roles import grant
from genba.storage.operators import keep_of
from genba.storage.records import NodeRecord
from genba.storage.store import Store
from genba.storage.verify import VerifyReport

T = TypeVar("T")


class _Kept(msgspec.Struct):
    """The part of a definition that says how long final jobs are kept."""

    keep: KeepTimes = DEFAULT_POLICY.keep


class AdminClient:
    """The database, the nodes and the locks, without anything about single jobs."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    @property
    def url(self) -> str:
        return self._connection.settings.url

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return mask_password(self.url)

    @property
    def namespace(self) -> str:
        return self._connection.settings.namespace

    @property
    def store(self) -> Store:
        return self._connection.store

    @property
    def is_open(self) -> bool:
        """Whether a call since the last `close` has opened the store."""
        return self._connection.is_open

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
        self._connection.close()

    async def threads(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run a blocking call in one of a few threads of our own."""
        return await self._connection.threads(call, *args, **kwargs)

    def moment(self, value: Any) -> Micros:
        """Read a moment by this machine's clock, in micros."""
        return self._connection.moment(value)

    # for tests

    def another_store(self, url: str, clock: Clock) -> Store:
        """Open another store with the same namespace."""
        return self._connection.another_store(url, clock)

    def swap(
        self, store: Store | None, clock: Clock, test: RunningTest | None
    ) -> tuple[Store | None, Clock]:
        """Use another store and another clock; returns the ones before."""
        return self._connection.swap(store, clock, test)

    # the database

    def install(
        self, create: bool = False, tell: Callable[[int, int], None] = lambda done, of: None
    ) -> list[str]:
        """Make the schema current, and return the steps applied; `create` makes the database too.

        `tell` is called before each step with how many are done, and of how many.
        """
        if create:
            create_database(self.url)
        return self.store.upgrade(tell)

    def installed(self) -> list[str]:
        """Return our tables and sequences in the database: what `uninstall` removes."""
        return self.store.objects()

    def grant(self, role: str, kind: str) -> None:
        """On PostgreSQL: make `role` a producer, worker, reader or admin of our tables only."""
        grant(self.url, role, kind)

    def verify(self) -> VerifyReport:
        """Replay the history, and report what is wrong: jobs lost, finished twice, over a limit."""
        return self.store.verify()

    def uninstall(self) -> list[str]:
        """Remove our objects, with all jobs, and nothing else; returns their names."""
        removed = self.store.uninstall()
        self.close()
        return removed

    # reports

    def overview(self, limit: int = 20) -> Overview[Job[Any]]:
        """Return queues, nodes, and the newest `limit` of the running and of the failed jobs."""
        connection = self._connection

        return read_overview(
            self.store, limit, lambda record: Job(connection, record.id, record=record)
        )

    aoverview = async_method(overview)

    def doctor(self) -> list[Finding]:
        """Examine database and nodes; what is wrong comes first, then what else to know."""
        return examine(self.store)

    adoctor = async_method(doctor)

    # nodes

    def nodes(self) -> list[NodeRecord]:
        """Return the nodes that are alive."""
        self.store.install()
        return self.store.nodes.live()

    anodes = async_method(nodes)

    def node_names(self) -> dict[int, str]:
        """Return the names of living and of recently ended nodes, by the ids that attempts have."""
        self.store.install()
        return self.store.nodes.names()

    anode_names = async_method(node_names)

    def tell_node(self, name: str, verb: str, changes: Mapping[str, Any] | None = None) -> None:
        """Make a living node "drain", "stop" (drain without grace), or "set" pool, min or max."""
        store = self.store
        store.install()
        if verb not in ("drain", "stop", "set"):
            raise BadOption(f"tell_node takes drain, stop or set, not {verb!r}")
        living = {node.name: node for node in store.nodes.live()}
        if name not in living:
            hint = f"there are {', '.join(sorted(living))}" if living else "none is alive"
            raise GenbaError(f"no living node is called {name!r}: {hint}")
        if changes:
            check_changes(changes)
            pool = read_json(living[name].pool, PoolSettings, PoolSettings())
            after = msgspec.structs.replace(pool, **changes)
            check_pool(after.pool, after.min, after.max)
        written = msgspec.json.encode(changes).decode() if changes else None
        store.nodes.command(living[name].id, verb, written)

    atell_node = async_method(tell_node)

    def wake(self) -> None:
        """Wake idle nodes, after the commit of a transaction that `conn=` enqueued in."""
        self._connection.wake()

    awake = async_method(wake)

    # locks and limits

    def locks(self) -> list[LockState]:
        """Return all locks that are held or waited for, by name."""
        self.store.install()
        return lock_states(self.store.locks.holders(), self.store.locks.waiters())

    alocks = async_method(locks)

    def break_lock(
        self, name: str, *, token: int | None = None, by: str | None = None
    ) -> list[int]:
        """Take a lock from its holders, and return the tokens that are void now.

        The holders themselves are not stopped.
        """
        self.store.install()
        return self.store.locks.break_(name, token, by or current_account())

    abreak_lock = async_method(break_lock)

    def set_limit(self, template: str, n: int | None) -> None:
        """Let `n` jobs of each bucket of `Limit(template, …)` run; None: as many as the code says.

        A smaller n stops no job, but starts none either until there is room.  BadOption if there is
        no such limit.
        """
        self.store.operators.set_limit(template, n, current_account())

    aset_limit = async_method(set_limit)


def prune(store: Store, age: Micros | None, keep_in_code: Mapping[str, KeepTimes]) -> int:
    """Delete final jobs older than `age`, or than their task keeps them; return their number.

    Definitions that nodes have written win over `keep_in_code`.
    """
    store.install()
    now, pruned = store.now(), 0
    if age is not None:
        while some := store.prune(now - age + 1):
            pruned += some
        return pruned
    keep_times = dict(keep_in_code)
    for record in store.operators.tasks():
        keep = read_json(record.definition, _Kept, _Kept()).keep
        keep_times[record.name] = keep_of(keep, read_json(record.override, dict[str, Any], {}))
    store.pruner.begin(keep_times, now, whole=True)
    while (some_or_none := store.pruner.step()) is not None:
        pruned += some_or_none
    return pruned
