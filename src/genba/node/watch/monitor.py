"""What a node looks at once a second: the load gate, workers that came and went, a paused write."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from genba.node.timing import PAUSED_LOOKS
from genba.node.watch.load_gate import LoadGate
from genba.node.watch.machine import Machine
from genba.storage.engines.database import WritingProcess
from genba.storage.records import Micros

log = logging.getLogger("genba.node")

_SIGNALS = {int(number): number.name for number in signal.Signals}


def _exit_details(status: int | None) -> dict[str, Any]:
    """Describe a wait status; empty if the zygote died before it could report one."""
    if status is None:
        return {}
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return {"signal": number, "signal_name": _SIGNALS.get(number, f"signal {number}")}
    return {"exit": os.WEXITSTATUS(status)}


class Monitor:
    def __init__(self) -> None:
        self._machine = Machine()
        self.gate_reason: str | None = None  # why nothing is claimed
        self._gate_events: list[tuple[str, dict[str, Any]]] = []
        self._started: list[dict[str, Any]] = []
        self._ended: list[dict[str, Any]] = []
        self._paused: WritingProcess | None = None
        self._paused_looks = 0

    def worker_started(self, slot: int, pid: int) -> None:
        self._started.append({"slot": slot, "pid": pid})

    def worker_ended(self, slot: int, pid: int, status: int | None) -> None:
        self._ended.append({"slot": slot, "pid": pid, **_exit_details(status)})

    def out_of_memory_kill(self) -> bool:
        """Whether the kernel has lately killed a process for want of memory."""
        return self._machine.out_of_memory_kill()

    def check_gate(self, gate: LoadGate, now: Micros) -> bool | None:
        """Give True if the gate has just closed, False if it has opened, else None."""
        self._machine.note_oom_kills()
        if not gate.watched:
            return None
        reason = gate.closed(self._machine.read(now), self.gate_reason is not None)
        changed = (reason is None) != (self.gate_reason is None)
        self.gate_reason = reason
        if not changed:
            return None
        if reason is None:
            log.info("claiming again")
            self._gate_events.append(("gate_opened", {}))
        else:
            log.warning("claiming nothing: %s", reason)
            self._gate_events.append(("gate_closed", {"reason": reason}))
        return reason is not None

    def paused_writer(self, writer: WritingProcess | None) -> int | None:
        """Give the process that has been stopped in a write for two seconds, once.

        The looks are counted, not the time, in which this node may have been suspended itself.
        """
        paused = writer if writer and writer.stopped else None
        self._paused_looks = self._paused_looks + 1 if paused == self._paused else 1
        self._paused = paused
        return paused.pid if paused and self._paused_looks == PAUSED_LOOKS else None

    def take_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Give (kind, details) of what happened since the last call."""
        workers = [
            ("worker_started", {"workers": self._started}),
            ("worker_ended", {"workers": self._ended}),
        ]
        events = self._gate_events + [event for event in workers if event[1]["workers"]]
        self._gate_events, self._started, self._ended = [], [], []
        return events
