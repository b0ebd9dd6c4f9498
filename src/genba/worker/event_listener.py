"""The process of a node that calls the app's event handlers, for events of this node.

The zygote forks it, or starts `python -m genba.worker.event_listener TARGET TITLE PARENT FD` for
apps that a fork would break.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from genba.worker.load_app import load
from genba.worker.zygote import set_title

PDEATHSIG = 1  # PR_SET_PDEATHSIG


def serve(app: Any, title: str, parent: int, ready: int) -> None:
    """Call handlers until the zygote dies; the next zygote starts its own listener.

    The descriptor `ready` is closed as soon as no event can be missed.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return  # it died before the prctl
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the node, which will end the zygote
    set_title(title)
    app.handlers.serve(int(os.environ["GENBA_INCARNATION"]), lambda: os.close(ready))


if __name__ == "__main__":
    serve(load(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
