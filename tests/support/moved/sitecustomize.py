"""Python imports this at the start of a process that has this folder in PYTHONPATH: its wall clock is wrong by as much
as a file says, for all that runs in it, and goes on being so in what it starts.  Its steady clocks are right.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

with open(os.environ["GENBA_TEST_CLOCK"], "rb") as file:
    _wrong_by = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)

_time_ns, _gettime_ns = time.time_ns, time.clock_gettime_ns


def time_ns() -> int:
    wrong_by: int = struct.unpack("<q", _wrong_by)[0]
    return _time_ns() + wrong_by * 1_000


def clock_gettime_ns(clock: int) -> int:
    return time_ns() if clock == time.CLOCK_REALTIME else _gettime_ns(clock)


time.time_ns = time_ns
time.time = lambda: time_ns() / 1e9
time.clock_gettime_ns = clock_gettime_ns
time.clock_gettime = lambda clock: clock_gettime_ns(clock) / 1e9
