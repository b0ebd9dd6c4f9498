"""Declare dead nodes dead and take over their jobs.

Done by the maintenance of living nodes, and by clients that wait for a lock of such a job.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Collection
from typing import NamedTuple

from genba.storage.clients.sessions import boot_id, process_start
from genba.storage.jobs.judge import judge_lost_job
from genba.storage.nodes.dead_nodes import find_dead_nodes
from genba.storage.nodes.leftover_processes import INCARNATION, end_leftovers
from genba.storage.nodes.nodes import Nodes, Orphan
from genba.storage.records import Ending, JobId, Micros, NodeRecord


class TakenOverNode(NamedTuple):
    node: NodeRecord
    jobs: list[JobId]
    ended_processes: int  # that it had left on this machine


class TakeOverResult(NamedTuple):
    has_suspects: bool  # then look again soon
    on_this_machine: frozenset[int]  # nodes that were alive here before
    taken_over: list[TakenOverNode]


def take_over_dead_nodes(
    nodes: Nodes,
    me: int,
    boot: str | None,
    in_contact: Micros,
    only: Collection[int] | None = None,
) -> TakeOverResult:
    """Declare dead nodes dead, and take over their jobs.

    `in_contact` is how long we have reached the database without a break.
    """
    living = nodes.live()
    silence = nodes.silence(living)
    candidates = [node for node in living if only is None or node.id in only]
    suspects = {node.id for node in nodes.suspects(candidates, me)}
    gone = {
        node.id
        for node in candidates
        if node.host == socket.gethostname() and process_start(node.pid) is None
    }
    dead = find_dead_nodes(candidates, suspects, me, boot, in_contact, gone, silence)
    on_this_machine = frozenset(node.id for node in living if _is_on_this_machine(node))
    taken_over = [
        _take_over(nodes, node, on_this_machine) for node in dead if not _runs_this_process(node)
    ]
    return TakeOverResult(bool(suspects), on_this_machine, taken_over)


def _take_over(nodes: Nodes, node: NodeRecord, on_this_machine: Collection[int]) -> TakenOverNode:
    """First end what its guard would have ended, because its jobs may start again afterwards."""
    ended = end_leftovers([node.id]) if node.id in on_this_machine else 0
    return TakenOverNode(node, nodes.declare_dead(node.id, judge_with_jitter), ended)


def _is_on_this_machine(node: NodeRecord) -> bool:
    return node.host == socket.gethostname() and node.boot_id == boot_id()


def _runs_this_process(node: NodeRecord) -> bool:
    """Whether we belong to one of its jobs and would be ended with it: another process does it."""
    return os.environ.get(INCARNATION) == str(node.id)


def judge_with_jitter(orphan: Orphan, now: Micros) -> Ending:
    return judge_lost_job(orphan, now, random.random)
