"""Which event loop async jobs run on: uvloop's if it is installed, as uvicorn does it, or else asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Factory = Callable[[], asyncio.AbstractEventLoop]


def factory() -> Factory:
    """To be called after the fork: a loop has descriptors of its own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def name() -> str:
    """In the words of the node's log; what is needed for it is imported now, before the first fork."""
    made_by = factory()
    return "asyncio" if made_by is asyncio.new_event_loop else "uvloop"
