"""What a node sees once a second: gates that close and open, workers that come and go, who is in everybody's way."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from genba.node.watch.load_gate import LoadGate
from genba.node.watch.machine import Machine
from genba.storage.engines.database import WritingProcess
from genba.storage.records import Micros

log = logging.getLogger("genba.node")

PAUSED = 3  # looks, one a second: two seconds, in which we were not suspended ourselves
_SIGNALS = {int(number): number.name for number in signal.Signals}


def _end(status: int | None) -> dict[str, Any]:
    """What waitpid tells of it, in words; nothing if the zygote died, and nobody knows."""
    if status is None:
        return {}
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return {"signal": number, "signal_name": _SIGNALS.get(number, f"signal {number}")}
    return {"exit": os.WEXITSTATUS(status)}


class Monitor:
    def __init__(self) -> None:
        self._machine = Machine()
        self.closed: str | None = None  # why nothing is claimed
        self._gates: list[tuple[str, dict[str, Any]]] = []
        self._came: list[dict[str, Any]] = []
        self._went: list[dict[str, Any]] = []
        self._writer: WritingProcess | None = None
        self._looks = 0

    def came(self, slot: int, pid: int) -> None:
        self._came.append({"slot": slot, "pid": pid})

    def went(self, slot: int, pid: int, status: int | None) -> None:
        self._went.append({"slot": slot, "pid": pid, **_end(status)})

    def starved(self) -> bool:
        """The kernel has killed for memory."""
        return self._machine.starved()

    def look(self, gate: LoadGate, now: Micros) -> bool | None:
        """True if the gate has just closed, False if it has opened."""
        self._machine.look()
        if not gate.watched:
            return None
        why = gate.closed(self._machine.read(now), self.closed is not None)
        turned = (why is None) != (self.closed is None)
        if turned:
            log.warning("claiming nothing: %s", why) if why else log.info("claiming again")
            self._gates.append(("gate_closed", {"reason": why}) if why else ("gate_opened", {}))
        self.closed = why
        return why is not None if turned else None

    def paused(self, writer: WritingProcess | None) -> int | None:
        """The process that has been stopped in a write for two seconds; told once of each."""
        stopped = writer if writer and writer.stopped else None
        self._looks = self._looks + 1 if stopped == self._writer else 1
        self._writer = stopped
        return stopped.pid if stopped and self._looks == PAUSED else None

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        """Events since it was asked last: (kind, more)."""
        events = [
            ("worker_started", {"workers": self._came}),
            ("worker_ended", {"workers": self._went}),
        ]
        told = self._gates + [(kind, more) for kind, more in events if more["workers"]]
        self._gates, self._came, self._went = [], [], []
        return told
