"""The event loop of async jobs: uvloop if it is installed, as in uvicorn, otherwise asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Factory = Callable[[], asyncio.AbstractEventLoop]


def factory() -> Factory:
    """Return what makes a loop; call it after the fork, since a loop has descriptors of its own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def name() -> str:
    """Return the name of the loop for the node's log, and import it before the first fork."""
    made_by = factory()
    return "asyncio" if made_by is asyncio.new_event_loop else "uvloop"
