"""Dead nodes are buried: by the keepers of the living, and by clients in whose way their jobs are."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Collection
from typing import NamedTuple

from genba.storage.clients.sessions import boot_id, born
from genba.storage.jobs.judge import judge_lost_job
from genba.storage.nodes.dead_nodes import find_dead_nodes
from genba.storage.nodes.leftover_processes import INCARNATION, end_leftovers
from genba.storage.nodes.nodes import Nodes, Orphan
from genba.storage.records import Ending, JobId, Micros, NodeRecord


class TakenOverNode(NamedTuple):
    node: NodeRecord
    taken: list[JobId]
    ended: int  # processes that it had left on this machine


class TakeOverResult(NamedTuple):
    suspects: bool  # somebody should be looked at again soon
    here: frozenset[int]  # who lived on this machine, before that
    buried: list[TakenOverNode]


def take_over_dead_nodes(
    members: Nodes,
    me: int,
    boot: str | None,
    lasted: Micros,
    only: Collection[int] | None = None,
) -> TakeOverResult:
    """Bury who is dead, and take over its jobs; `lasted` is how long we have seen the database without a break."""
    living = members.live()
    silence = members.silence(living)
    nodes = [node for node in living if only is None or node.id in only]
    suspects = {node.id for node in members.suspects(nodes, me)}
    gone = {
        node.id for node in nodes if node.host == socket.gethostname() and born(node.pid) is None
    }
    found = find_dead_nodes(nodes, suspects, me, boot, lasted, gone, silence)
    here = frozenset(node.id for node in living if _is_here(node))
    return TakeOverResult(
        bool(suspects), here, [_bury(members, node, here) for node in found if not _is_above(node)]
    )


def _bury(members: Nodes, node: NodeRecord, here: Collection[int]) -> TakenOverNode:
    """First ends what its guard would have ended, had it not been killed, too: its jobs are let go with the burial."""
    ended = end_leftovers([node.id]) if node.id in here else 0
    return TakenOverNode(node, members.declare_dead(node.id, judge_with_jitter), ended)


def _is_here(node: NodeRecord) -> bool:
    return node.host == socket.gethostname() and node.boot_id == boot_id()


def _is_above(node: NodeRecord) -> bool:
    """We belong to one of its jobs, and should be ended with it: so others bury it."""
    return os.environ.get(INCARNATION) == str(node.id)


def judge_with_jitter(orphan: Orphan, now: Micros) -> Ending:
    return judge_lost_job(orphan, now, random.random)
