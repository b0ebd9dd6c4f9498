"""Every duration of a node's liveness, once, with its unit in the name.

`domain/liveness.py` has what storage and clients need too: the default lease, how often it is
renewed, and the patience with a node or client that is silent.  `processes/guard.py` has the
durations of the guard, which can import nothing.  How long jobs wait for each other in a commit or
a worker is no matter of liveness: see `decide/dispatch.py` and `database/writer.py`.
"""

from __future__ import annotations

from genba.domain.duration import SECOND, Micros
from genba.domain.liveness import NODE_RENEWALS_PER_LEASE

# the lease

RENEWAL_JITTER = (0.9, 1.1)
"""Each renewal comes after this part of its interval, at random, so that nodes do not renew
together."""

GUARD_PART = 0.8
"""The guard ends everything when the loop has been silent for this part of the lease."""

SHORTEST_GUARD_SECONDS = 1.0
"""... but never after less than this."""

LOST_CLAIM_US: Micros = 30 * SECOND
"""How long a claim without an answer may still be carried out; the server gives a statement ten
seconds."""


def renewal_us(lease: Micros) -> Micros:
    """Give the time between two renewals, and between two beats to the guard."""
    return lease // NODE_RENEWALS_PER_LEASE


def guard_seconds(lease: Micros) -> float:
    """Give how long the guard waits for the next beat."""
    return max(SHORTEST_GUARD_SECONDS, lease / SECOND * GUARD_PART)


def safe_us(lease: Micros) -> Micros:
    """Give how long after a renewal a job may start that must not run twice."""
    return lease * 3 // 4


def dead_us(lease: Micros) -> Micros:
    """Give how long after a renewal such a job may run; others may take it over a little later."""
    return lease * 9 // 10


# the loop

TICK_US: Micros = SECOND // 20
"""Between two looks at workers while a job has a timer or is being stopped."""

SLOW_TICK_US: Micros = SECOND // 4
"""Between two looks at workers while a job runs."""

MONITOR_US: Micros = SECOND
"""Between two looks at the machine."""

PAUSED_LOOKS = 3
"""A process stopped in the middle of a write is ended at this look of the monitor: after two
seconds."""

# workers

MARK_AFTER_US: Micros = SECOND
"""A job that has run for this long gets its start written down, so that its loss counts as a
crash."""

CONDITION_CHECK_US: Micros = SECOND
"""How long a worker may take to check a job's conditions."""

WORKER_EXIT_US: Micros = 10 * SECOND
"""How long a dismissed worker may take to exit: its app may have to clean up."""

IDLE_WORKER_US: Micros = 10 * SECOND
"""How long a worker that the pool need not keep may be idle."""

SIGNALLED_ALONE_US: Micros = SECOND // 2
"""If the node gets no signal within this time, a signal was sent to a worker alone."""

KILL_BY_WORKER_US: Micros = SECOND // 2
"""How long a worker may take to kill the process of its job before it is killed itself."""

PEER_SECONDS = 1.0
"""How long guard or zygote may leave their socket full before they are killed."""

KILL_SECONDS = 5.0
"""How long killed processes may take to disappear."""

# the end

DRAIN_KILL_US: Micros = SECOND
"""After the grace, stopped jobs have this long before they are killed; another second is for the
last writes."""

DRAIN_LEAVE_US: Micros = SECOND * 7 // 4
"""A node exits this long after its grace: a quarter of a second is left for a machine slow to
end a process."""

FINISH_SECONDS = 10.0
"""How long each database thread may take to write what is left."""

# maintenance

SWEEP_SECONDS = 2.0
"""Between two looks for dead nodes and clients."""

SWEEP_SUSPECT_SECONDS = 0.5
"""... while one of them is suspect."""

PROBE_SECONDS = 5.0
"""How long the listening connection may take to answer."""

PROBE_SOON_SECONDS = 0.5
"""... after trouble, when it is suspect."""

LIMITS_SECONDS = 1.0
"""Between two looks at the queues of limits."""

PARK_SECONDS = 5.0
"""Between two looks for jobs that no live node can run."""

PRUNE_SECONDS = 60.0
"""Between two starts of pruning."""

PRUNE_STEP_SECONDS = 0.05
"""How long pruning may take at a time: the lease has to be renewed too."""

PRUNE_PAUSE_SECONDS = 0.2
"""Between two steps of pruning."""

REPLAN_SECONDS = 60.0
"""Between two looks at whether the schedules still have their next tick."""

ABANDONED_SECONDS = 300.0
"""A schedule that no live node declares is paused after this: nodes may come back late after a
suspended night."""

SET_BACK_US: Micros = SECOND
"""A store's clock that goes back by less has not been set."""

SET_BACK_SECONDS = 20.0
"""How long schedules are planned anew after the clock was set back: longer than a lease, until
all nodes know it."""

RETRY_SECONDS = 0.5
"""Between two tries of maintenance when the database does not answer."""

SHORTEST_PAUSE_SECONDS = 0.05
"""Maintenance pauses for this long before a renewal that is late."""

KEEP_TOPICS_US: Micros = 3_600 * SECOND
"""A slow listener loses messages that are older."""

KEEP_EVENTS_US: Micros = 7 * 86_400 * SECOND
"""How long events are kept, unless the app says otherwise."""

# the metrics server

METRICS_CLIENT_SECONDS = 5.0
"""How long a client of the metrics server may take for its request."""

STALE_IMPORT_SECONDS = 60.0
"""A loop that has not come round for this long is stuck, while the app is imported."""

SHORTEST_STALE_SECONDS = 5.0
"""... and later the guard's time, but not less than this."""
