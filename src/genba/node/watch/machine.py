"""Load, free memory and use of process trees, from /proc and the cgroup of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from genba.domain.duration import SECOND, Micros
from genba.node.decide.worker_state import ResourceUse
from genba.node.processes.guard import children
from genba.node.watch.load_gate import LoadReading

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a huge number for "no limit"
_SMOOTHING = (
    0.1  # the weight of one look: at a look a second, no burst of a few seconds closes a gate
)
_TICK_US = SECOND // os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def use_of(pid: int) -> ResourceUse | None:
    """Give resident memory and CPU time of a process and all below it; None when it is gone.

    Shared pages count for each process.  Of ended processes the CPU time counts that their parents
    have collected.
    """
    memory = cpu = 0
    seen = {pid}
    tree = [pid]
    for member in tree:
        try:
            with open(f"/proc/{member}/stat", "rb") as stat:
                # The name may contain spaces and parentheses.
                words = stat.read().rpartition(b")")[2].split()
        except OSError:
            if member == pid:
                return None
            continue
        cpu += sum(map(int, words[11:15])) * _TICK_US
        memory += int(words[21]) * _PAGE_BYTES
        for child in children(member):
            if child not in seen:
                seen.add(child)
                tree.append(child)
    return ResourceUse(memory, cpu)


class Machine:
    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._version_2 = (cgroups / "cgroup.controllers").exists()
        self._folders = dict(_folders(proc, cgroups, self._version_2))
        self._used: tuple[Micros, Micros] | None = None  # (when, CPU time)
        self._used_part = 0.0
        self._oom_kills = [self._count_oom_kills()] * 2  # at the last two looks
        self._oom_kills_reported = 0

    def read(self, now: Micros) -> LoadReading:
        return LoadReading(self.load(now), self.free_memory())

    # load

    def load(self, now: Micros) -> float:
        """Give the load of the last minute per CPU.

        With a quota of the cgroup, it is at least the part of that in use.
        """
        load = float(_text(self._proc / "loadavg").split()[0]) / (os.cpu_count() or 1)
        quota = self.quota()
        return load if quota is None else max(load, self._update_used_part(quota, now))

    def quota(self) -> float | None:
        """Give how many CPUs the cgroup may use, if it has a quota."""
        quotas = [quota for folder in self._up("cpu") if (quota := self._quota(folder)) is not None]
        return min(quotas, default=None)

    def _quota(self, folder: Path) -> float | None:
        if self._version_2:
            quota, period = (_text(folder / "cpu.max") or "max 1").split()
        else:
            quota = _text(folder / "cpu.cfs_quota_us") or "-1"
            period = _text(folder / "cpu.cfs_period_us") or "1"
        return None if quota in ("max", "-1") else int(quota) / int(period)

    def _update_used_part(self, quota: float, now: Micros) -> float:
        if self._version_2:
            used = _numbers(self._folders["cpu"] / "cpu.stat").get("usage_usec", 0)
        else:
            used = _number(self._folders.get("cpuacct", Path()) / "cpuacct.usage", 0) // 1000
        before, self._used = self._used, (now, used)
        if before is not None and now > before[0]:
            part = (used - before[1]) / (now - before[0]) / quota
            self._used_part += (part - self._used_part) * _SMOOTHING
        return self._used_part

    # memory

    def free_memory(self) -> int:
        """Give the bytes that can still be had, of the machine and within the cgroup's limits."""
        free = [_numbers(self._proc / "meminfo").get("MemAvailable:", 0) * 1024]
        for folder in self._up("memory"):
            left = self._left(folder)
            if left is not None:
                free.append(left)
        return min(free)

    def _left(self, folder: Path) -> int | None:
        limit, used, cache = (
            ("memory.max", "memory.current", "inactive_file")
            if self._version_2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        most = _number(folder / limit, _UNLIMITED_BYTES)
        if most >= _UNLIMITED_BYTES:
            return None
        cached = _numbers(folder / "memory.stat").get(cache, 0)
        return max(0, most - _number(folder / used, 0) + cached)

    # kills by the kernel, for want of memory

    def note_oom_kills(self) -> None:
        """Forget old kills, once a second, so that none is taken for the cause of a new death."""
        self._oom_kills = [self._oom_kills[1], self._count_oom_kills()]
        self._oom_kills_reported = max(self._oom_kills_reported, self._oom_kills[0])

    def out_of_memory_kill(self) -> bool:
        """Whether the kernel has lately killed a process for want of memory.

        Reports each kill once.
        """
        known = max(self._oom_kills_reported, self._oom_kills[0])
        if self._count_oom_kills() <= known:
            return False
        self._oom_kills_reported = known + 1
        return True

    def _count_oom_kills(self) -> int:
        folder = self._folders.get("memory")
        if folder is not None:
            file = "memory.events" if self._version_2 else "memory.oom_control"
            numbers = _numbers(folder / file)
            if "oom_kill" in numbers:
                return numbers["oom_kill"]
        return _numbers(self._proc / "vmstat").get("oom_kill", 0)

    def _up(self, controller: str) -> Iterator[Path]:
        """Give the cgroup and those above it: each may have a limit."""
        folder = self._folders.get(controller)
        while folder is not None and (folder / "cgroup.procs").exists():
            yield folder
            folder = folder.parent


def _folders(proc: Path, cgroups: Path, version_2: bool) -> Iterator[tuple[str, Path]]:
    """Give the cgroup folder of each controller."""
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if version_2 and number == "0":
            yield from dict.fromkeys(("cpu", "memory"), _mounted(cgroups, path)).items()
        elif not version_2 and number != "0":
            for controller in controllers.split(","):
                yield controller, _mounted(cgroups / controller, path)


def _mounted(root: Path, path: str) -> Path:
    """Give the folder of `path`.

    In a container that may be the host's path, with only its end mounted.
    """
    folder = root / path.lstrip("/")
    return folder if folder.is_dir() else root


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path, default: int) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else default


def _numbers(path: Path) -> dict[str, int]:
    """Read a file of "name number" lines."""
    words = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) > 1 and pair[1].isdecimal()}
