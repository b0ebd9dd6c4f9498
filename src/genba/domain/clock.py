"""The source of time: the machine's clocks, or a clock that a test moves."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from genba.domain.duration import Duration, Micros, duration


class Clock(Protocol):
    def now(self) -> Micros:
        """Return the wall time in UTC; it may jump."""
        ...

    def boot(self) -> Micros:
        """Return the time since some start; it never jumps and counts while the machine sleeps."""
        ...


_NTP_TOLERANCE: Micros = 50_000  # clocks of two machines that run NTP differ by less than this


def skew(theirs: Micros, ours: Micros, round_trip: Micros) -> Micros:
    """Return how far their clock is ahead of ours, or 0 if the two may be equal.

    Our clock was read when the answer arrived.  Theirs was read at an unknown moment of the
    round trip.
    """
    ahead = theirs - ours
    return 0 if -_NTP_TOLERANCE - round_trip < ahead < _NTP_TOLERANCE else ahead


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> Micros:
        return time.time_ns() // 1_000

    def boot(self) -> Micros:
        nanos = (
            time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            if sys.platform == "linux"
            else time.monotonic_ns()
        )
        return nanos // 1_000


class ManualClock:
    """A clock that moves only by `advance` and `set`; moments are microseconds."""

    def __init__(self, start: Micros) -> None:
        self._now = start
        self._boot: Micros = 0

    def now(self) -> Micros:
        return self._now

    def boot(self) -> Micros:
        return self._boot

    def advance(self, by: Duration) -> None:
        """Move both clocks forward by `by`; a number is seconds."""
        step = duration(by)
        self._now += step
        self._boot += step

    def set(self, moment: Micros) -> None:
        """Set the wall time, forward or back; the boot clock does not move."""
        self._now = moment
