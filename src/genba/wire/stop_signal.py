"""The signal that stops a job.

The node sends it to a worker after it has set the stop flag; a worker passes it on to the process
of a job.  To change it, change it here, and in `_IGNORED` of node/processes/guard.py, which
imports nothing of ours; a test compares the two.
"""

from __future__ import annotations

import signal

STOP_SIGNAL = signal.SIGTERM
