"""How a node joins: its row in the database, and the end of what dead nodes left on its machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from genba.node.settings import NodeSettings
from genba.storage.clients.sessions import process_start
from genba.storage.nodes.leftover_processes import end_leftovers
from genba.storage.nodes.nodes import TaskChanges
from genba.storage.nodes.take_over import judge_with_jitter
from genba.storage.records import Micros, NewNode
from genba.storage.schedules.rows import declared_schedules
from genba.storage.store import Store

log = logging.getLogger("genba.node")


def join(
    store: Store, id: int, settings: NodeSettings, lease: Micros, tasks: Sequence[dict[str, Any]]
) -> None:
    """Register the node, after ending what dead nodes of this machine have left running."""
    node = NewNode(
        id=id,
        name=settings.name,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        slots=settings.slots,
        pool=settings.pool_settings,
        lease=lease,
        queues=tuple(settings.queues),
        tasks=tuple(tasks),
        version=version(),
    )
    unlocked = [
        other
        for other in store.nodes.live()
        if other.host == node.host and store.node_wakeups.lock_is_free(other)
    ]
    gone = [
        other for other in unlocked if other.name == node.name or process_start(other.pid) is None
    ]
    past = store.nodes.ended_on_host(node.host, node.boot_id)
    ended = end_leftovers([*past, *(other.id for other in gone)])
    if ended:
        log.warning("ended %d processes that dead nodes had left behind", ended)
    for other in gone:
        if other.name == node.name:
            store.nodes.declare_dead(other.id, judge_with_jitter)
    log_task_changes(store.nodes.join(node))


def log_task_changes(changed: TaskChanges) -> None:
    """Log one line if tasks differ from those of earlier nodes.

    The events have the old and new values.
    """
    if changed:
        tasks = "; ".join(f"{task} ({', '.join(diff)})" for task, diff in sorted(changed.items()))
        log.info("the code of this node has changed tasks: %s", tasks)


def queues_of(contents: Mapping[str, Any]) -> set[str]:
    """Give the queues that the tasks and schedules of an app name."""
    named = {task.get("queue", "default") for task in contents["tasks"]}
    return named | {schedule.job.queue for schedule in declared_schedules(contents)}


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def set_title(title: str) -> None:
    os.environ["SPT_NOENV"] = "1"  # or it wipes the environment, with the incarnation in it
    from setproctitle import setproctitle

    setproctitle(title)


def version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("genba")
    except PackageNotFoundError:
        return "0"
