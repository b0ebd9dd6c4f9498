"""When a node claims nothing because the machine has enough to do, and how it learns that; files of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.node.watch.load_gate import LoadGate, LoadReading
from genba.node.watch.machine import Machine, use_of
from genba.node.watch.monitor import Monitor

GB = 1 << 30
CPUS = os.cpu_count() or 1


# the decision


def test_a_gate_without_limits_is_open() -> None:
    assert not LoadGate().watched
    assert LoadGate().closed(LoadReading(1000.0, 0), False) is None


@pytest.mark.parametrize(
    ("reading", "word"),
    [
        (LoadReading(2.1, GB), "load per CPU 2.10"),
        (LoadReading(0.1, GB // 4), "256 MB of memory free"),
    ],
)
def test_a_gate_closes_beyond_its_limit_and_says_why(reading: LoadReading, word: str) -> None:
    assert word in str(LoadGate(2.0, GB // 2).closed(reading, False))


def test_a_closed_gate_opens_only_when_it_is_clearly_better() -> None:
    gate = LoadGate(2.0, GB)

    assert gate.closed(LoadReading(1.95, 2 * GB), True)
    assert gate.closed(LoadReading(0.0, GB + GB // 20), True)
    assert gate.closed(LoadReading(1.95, GB + GB // 20), False) is None
    assert gate.closed(LoadReading(1.7, 2 * GB), True) is None


def test_a_gate_is_logged_when_it_closes_and_when_it_opens_and_not_in_between() -> None:
    monitor = Monitor()
    closed, wide = LoadGate(min_free_memory=GB * GB), LoadGate(min_free_memory=1)

    assert [monitor.check_gate(gate, 0) for gate in (wide, closed, closed, wide, wide)] == [
        None,
        True,
        None,
        False,
        None,
    ]
    assert [kind for kind, _ in monitor.take_events()] == ["gate_closed", "gate_opened"]
    assert monitor.take_events() == []


@given(st.floats(0, 10), st.floats(0.1, 10), st.integers(0, 4 * GB), st.integers(1, 4 * GB))
def test_an_open_gate_is_never_stricter_than_a_closed_one(
    load: float, most: float, free: int, least: int
) -> None:
    gate, reading = LoadGate(most, least), LoadReading(load, free)

    if gate.closed(reading, False):
        assert gate.closed(reading, True)


# the machine


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "loadavg").write_text(f"{CPUS * 1.5} 0 0 1/2 3\n")
    (folder / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    (folder / "vmstat").write_text("oom_kill 3\n")
    (folder / "self/cgroup").write_text("")
    return folder


def a_cgroup(place: Path, **files: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for name, text in {"cgroup__procs": "", **files}.items():
        (place / name.replace("__", ".")).write_text(text)
    return place


@pytest.fixture
def second(tmp_path: Path, proc: Path) -> Path:
    """A cgroup of version 2, below one that is more generous."""
    root = tmp_path / "cgroup"
    a_cgroup(root, cgroup__controllers="cpu memory")
    a_cgroup(
        root / "team", memory__max=str(3 * GB), memory__current=str(GB), cpu__max="400000 100000"
    )
    (proc / "self/cgroup").write_text("0::/team/node\n")
    return a_cgroup(
        root / "team/node",
        memory__max=str(2 * GB),
        memory__current=str(GB + GB // 2),
        memory__stat=f"anon 1\ninactive_file {GB // 4}\n",
        memory__events="low 0\noom 1\noom_kill 5\n",
        cpu__max="200000 100000",
        cpu__stat="usage_usec 0\nuser_usec 0\n",
    )


@pytest.fixture
def first(tmp_path: Path, proc: Path) -> Path:
    """Cgroups of version 1."""
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("4:memory:/node\n2:cpu,cpuacct:/node\n0::/\n")
    a_cgroup(root / "cpu/node", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    a_cgroup(root / "cpuacct/node", cpuacct__usage="0")
    return a_cgroup(
        root / "memory/node",
        memory__limit_in_bytes=str(GB),
        memory__usage_in_bytes=str(GB // 2),
        memory__stat="total_inactive_file 0\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
    )


def test_without_cgroups_the_machine_itself_is_asked(proc: Path, tmp_path: Path) -> None:
    machine = Machine(proc, tmp_path / "none")

    assert machine.read(0) == LoadReading(1.5, 4 * GB)
    assert machine.quota() is None


def test_the_limits_of_a_cgroup_and_of_those_above_it_count(proc: Path, second: Path) -> None:
    machine = Machine(proc, second.parents[1])

    assert machine.free_memory() == GB // 2 + GB // 4
    assert machine.quota() == 2.0
    (second / "memory.max").write_text("max")
    assert machine.free_memory() == 2 * GB
    (second / "cpu.max").write_text("max 100000")
    assert machine.quota() == 4.0


def test_old_cgroups_count_alike(proc: Path, first: Path) -> None:
    machine = Machine(proc, first.parents[1])

    assert machine.free_memory() == GB // 2
    assert machine.quota() == 0.5
    (first / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert machine.free_memory() == 4 * GB


def test_with_a_quota_the_part_of_it_in_use_is_the_load_if_that_is_more(
    proc: Path, second: Path
) -> None:
    (proc / "loadavg").write_text("0.0 0 0 1/2 3\n")
    machine = Machine(proc, second.parents[1])
    loads = []
    for seconds in range(60):
        (second / "cpu.stat").write_text(f"usage_usec {seconds * 2_000_000}\n")
        loads.append(machine.load(seconds * 1_000_000))

    assert 0.95 < loads[-1] <= 1.0


@pytest.mark.parametrize("version", ["first", "second"])
def test_a_kill_by_the_kernel_is_reported_once_and_an_old_one_never(
    version: str, proc: Path, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(version)
    file = place / ("memory.events" if version == "second" else "memory.oom_control")
    machine = Machine(proc, place.parents[1])
    assert not machine.out_of_memory_kill()

    file.write_text("oom_kill 9\n")
    if version == "first":
        assert [machine.out_of_memory_kill() for _ in range(3)] == [True, True, False]
    file.write_text("oom_kill 10\n")
    machine.note_oom_kills()
    assert machine.out_of_memory_kill()  # the kernel may report it after the look
    file.write_text("oom_kill 12\n")
    machine.note_oom_kills()
    machine.note_oom_kills()
    assert not machine.out_of_memory_kill()


def test_a_tree_of_processes_is_weighed_as_a_whole() -> None:
    child = "x = b'x' * (80 << 20); print(1, flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        use = use_of(parent.pid)
        parent.communicate(b"\n")

    assert use is not None
    assert use.memory > 85 << 20
    assert use_of(parent.pid) is None


def test_cpu_time_of_children_that_have_ended_counts() -> None:
    child = "import time\nwhile time.process_time() < .2: pass"
    run = f"subprocess.run([sys.executable, '-S', '-c', {child!r}])"
    code = f"import subprocess, sys; {run}; print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        use = use_of(parent.pid)
        parent.communicate(b"\n")

    assert use is not None
    assert use.cpu >= 190_000
