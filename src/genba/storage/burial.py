"""Dead nodes are buried: by the keepers of the living, and by clients in whose way their jobs are."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from typing import NamedTuple

from genba.storage.membership import Membership, Orphan
from genba.storage.records import Ending, JobId, Micros, NodeRecord
from genba.storage.rescuer import dead
from genba.storage.sessions import born
from genba.storage.verdicts import judge_orphan


class Burials(NamedTuple):
    suspects: bool  # somebody should be looked at again soon
    buried: list[tuple[NodeRecord, list[JobId]]]


def bury_dead(
    members: Membership, me: int, boot_id: str | None, lasted: Micros, only: Collection[int] | None = None
) -> Burials:
    """Bury who is dead, and take over its jobs; `lasted` is how long we have seen the database without a break."""
    living = members.live()
    silence = members.silence(living)
    nodes = [node for node in living if only is None or node.id in only]
    suspects = {node.id for node in members.suspects(nodes, me)}
    gone = {node.id for node in nodes if node.host == socket.gethostname() and born(node.pid) is None}
    found = dead(nodes, suspects, me, boot_id, lasted, gone, silence)
    return Burials(bool(suspects), [(node, members.bury(node.id, judged)) for node in found])


def judged(orphan: Orphan, now: Micros) -> Ending:
    return judge_orphan(orphan, now, random.random)
