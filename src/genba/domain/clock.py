"""Where the time comes from: the machine, or a test."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from genba.domain.duration import Duration, Micros, duration


class Clock(Protocol):
    def now(self) -> Micros:
        """The wall time, UTC; it may jump."""
        ...

    def boot(self) -> Micros:
        """Time since some start; it never jumps, and goes on while the machine sleeps."""
        ...


_CLOSE = 50_000  # µs: clocks of different machines that are kept by NTP are closer than that


def skew(theirs: Micros, ours: Micros, journey: Micros) -> Micros:
    """How far their clock is ahead of ours, which was read when the answer was here; 0 if they may be equal.

    They read theirs at any moment of the journey, there and back.
    """
    ahead = theirs - ours
    return 0 if -_CLOSE - journey < ahead < _CLOSE else ahead


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
    """A clock that stands still until it is told to move; moments are micros."""

    def __init__(self, start: Micros) -> None:
        self._now = start
        self._boot: Micros = 0

    def now(self) -> Micros:
        return self._now

    def boot(self) -> Micros:
        return self._boot

    def advance(self, by: Duration) -> None:
        """Let `by` pass, on both clocks; a number is seconds."""
        step = duration(by)
        self._now += step
        self._boot += step

    def set(self, moment: Micros) -> None:
        """Let the wall time jump, forward or back, while no time passes."""
        self._now = moment
