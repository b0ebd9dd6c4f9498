"""What the machine says: its load, its free memory, what a process tree uses; limits of our cgroup included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from genba.domain.duration import Micros
from genba.node.decide.worker_state import ResourceUse
from genba.node.processes.guard import children
from genba.node.watch.load_gate import LoadReading

_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "no limit"
_SMOOTH = 0.1  # what one look counts: with a look a second, a burst of a few seconds closes no gate
_TICK = 1_000_000 // os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def use_of(pid: int) -> ResourceUse | None:
    """Resident memory and CPU time of a process and all below it; None when it is gone.

    Pages that they share count for each of them.  Processes that have ended count by the CPU time that who waited
    for them has got from them.
    """
    memory = cpu = 0
    seen = {pid}
    tree = [pid]
    for one in tree:
        try:
            with open(f"/proc/{one}/stat", "rb") as stat:
                words = (
                    stat.read().rpartition(b")")[2].split()
                )  # the name may contain spaces and parentheses
        except OSError:
            if one == pid:
                return None
            continue
        cpu += sum(map(int, words[11:15])) * _TICK
        memory += int(words[21]) * _PAGE
        for child in children(one):
            if child not in seen:
                seen.add(child)
                tree.append(child)
    return ResourceUse(memory, cpu)


class Machine:
    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._new = (cgroups / "cgroup.controllers").exists()  # version 2
        self._places = dict(_places(proc, cgroups, self._new))
        self._used: tuple[Micros, Micros] | None = None
        self._part = 0.0
        self._kills = [self._oom_kills()] * 2  # at the last two looks
        self._told = 0

    def read(self, now: Micros) -> LoadReading:
        return LoadReading(self.load(now), self.free_memory())

    # load

    def load(self, now: Micros) -> float:
        """Of the machine in the last minute, per CPU; where our cgroup has a quota, at least the part of it in use."""
        load = float(_text(self._proc / "loadavg").split()[0]) / (os.cpu_count() or 1)
        quota = self.quota()
        return load if quota is None else max(load, self._used_part(quota, now))

    def quota(self) -> float | None:
        """How many CPUs our cgroup may use, if it says so."""
        found = [quota for place in self._up("cpu") if (quota := self._quota(place)) is not None]
        return min(found, default=None)

    def _quota(self, place: Path) -> float | None:
        if self._new:
            quota, period = (_text(place / "cpu.max") or "max 1").split()
        else:
            quota = _text(place / "cpu.cfs_quota_us") or "-1"
            period = _text(place / "cpu.cfs_period_us") or "1"
        return None if quota in ("max", "-1") else int(quota) / int(period)

    def _used_part(self, quota: float, now: Micros) -> float:
        if self._new:
            used = _lines(self._places["cpu"] / "cpu.stat").get("usage_usec", 0)
        else:
            used = _number(self._places.get("cpuacct", Path()) / "cpuacct.usage", 0) // 1000
        before, self._used = self._used, (now, used)
        if before is not None and now > before[0]:
            part = (used - before[1]) / (now - before[0]) / quota
            self._part += (part - self._part) * _SMOOTH
        return self._part

    # memory

    def free_memory(self) -> int:
        """Bytes that can still be had, here and within our cgroup's limits."""
        free = _lines(self._proc / "meminfo").get("MemAvailable:", 0) * 1024
        return min(
            [
                free,
                *(left for place in self._up("memory") if (left := self._left(place)) is not None),
            ]
        )

    def _left(self, place: Path) -> int | None:
        limit, used, cache = (
            ("memory.max", "memory.current", "inactive_file")
            if self._new
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        most = _number(place / limit, _UNLIMITED)
        if most >= _UNLIMITED:
            return None
        return max(0, most - _number(place / used, 0) + _lines(place / "memory.stat").get(cache, 0))

    # the kernel's own kills

    def look(self) -> None:
        """Once in a while, so that an old kill is not taken for the cause of a new death."""
        self._kills = [self._kills[1], self._oom_kills()]
        self._told = max(self._told, self._kills[0])

    def starved(self) -> bool:
        """Whether the kernel has lately killed one of us for want of memory; each kill is told once."""
        if self._oom_kills() <= max(self._told, self._kills[0]):
            return False
        self._told = max(self._told, self._kills[0]) + 1
        return True

    def _oom_kills(self) -> int:
        place = self._places.get("memory")
        if place is not None:
            found = _lines(place / ("memory.events" if self._new else "memory.oom_control"))
            if "oom_kill" in found:
                return found["oom_kill"]
        return _lines(self._proc / "vmstat").get("oom_kill", 0)

    def _up(self, controller: str) -> Iterator[Path]:
        """Our cgroup and those above it: each may have a limit."""
        place = self._places.get(controller)
        while place is not None and (place / "cgroup.procs").exists():
            yield place
            place = place.parent


def _places(proc: Path, cgroups: Path, new: bool) -> Iterator[tuple[str, Path]]:
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if new and number == "0":
            yield from dict.fromkeys(("cpu", "memory"), _there(cgroups, path)).items()
        elif not new and number != "0":
            for controller in controllers.split(","):
                yield controller, _there(cgroups / controller, path)


def _there(root: Path, path: str) -> Path:
    """In a container the path may be that of the host, and only its end is mounted."""
    place = root / path.lstrip("/")
    return place if place.is_dir() else root


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path, default: int) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else default


def _lines(path: Path) -> dict[str, int]:
    """A file of "name number" lines."""
    words = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdecimal()}
