"""Durations by which others decide that a node or a client is dead.

`node/timing.py` has those of the node itself.
"""

from __future__ import annotations

from genba.domain.duration import SECOND, Micros

DEFAULT_LEASE_US: Micros = 15 * SECOND
"""How long a node or client counts as alive after its last renewal, unless the app says
otherwise."""

NODE_RENEWALS_PER_LEASE = 5
"""A node renews its lease this many times before it would end."""

CLIENT_RENEWALS_PER_LEASE = 15
"""A client renews more often than a node: no other process looks after it."""

MIN_SILENCE_US: Micros = 2 * SECOND
"""A node is never dead sooner after its last renewal: its guard needs that long to end its
processes."""

MAX_LOOK_GAP_US: Micros = 3 * SECOND
"""After a longer pause between two looks, the store's clock is no proof of how long another node
was silent."""

DATABASE_GAP_US: Micros = DEFAULT_LEASE_US // 2
"""Not having seen the database for longer than this counts as an outage, in which others could
not renew."""
