"""Both ends of the line between a node and a worker, over real pipes, sockets and shared memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from tests.support import eventually

from genba import wire
from genba.client import current_job
from genba.client.task import Task
from genba.domain.duration import moment
from genba.errors import FailJob, RetryJob, Stopped
from genba.node.processes.channel import Channel
from genba.options.conditions import Conditions
from genba.options.table import DEFAULT_OPTIONS, DEFAULT_POLICY
from genba.worker import event_loop
from genba.worker.outcome import ERROR_LIMIT, describe
from genba.worker.shared_worker import SharedWorker
from genba.worker.worker import Worker, main

SECOND = 1_000_000


class FakeApp:
    """As much of an app as a worker sees; its tasks are the functions given."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        app: Any = self
        self.lifespans: list[Callable[[], Any]] = []
        self.middlewares: list[Callable[..., Any]] = []
        self.conditions = Conditions()
        self._tasks: dict[str, Task[..., Any]] = {
            fn.__name__: Task(app, fn, fn.__name__, DEFAULT_OPTIONS, DEFAULT_POLICY)
            for fn in functions
        }

    def clone(self, job_id: int, changes: dict[str, Any]) -> bytes:
        raise AssertionError("no copy is expected here")

    def task_table(self) -> dict[str, Task[..., Any]]:
        return self._tasks

    def results_of_parents(self, job_id: int) -> dict[int, Any]:
        return {}

    def options_of(self, job_id: int) -> dict[str, Any]:
        raise AssertionError("no options are expected here")

    def moment(self, value: Any) -> int:
        return moment(value, time.time_ns() // 1000)

    def own_job_writes(self) -> Any:
        raise AssertionError("no job of these tests writes by itself")

    def inbox(self, job: Any) -> Any:
        raise AssertionError("no messages are expected here")

    def threads(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no threads are expected here")


class End:
    """The node's end of a line, and all that was heard there."""

    def __init__(self, line: Channel) -> None:
        self.line = line
        self.results: list[wire.JobResult] = []

    def give(self, serial: int, *jobs: tuple[str, dict[str, Any]]) -> None:
        travelling = [
            wire.JobMessage(i, 1, 7, task, msgspec.json.encode(args), None)
            for i, (task, args) in enumerate(jobs)
        ]
        self.line.give(serial, travelling)

    def hear(self, count: int) -> list[wire.JobResult]:
        def heard() -> bool:
            self.line.flush()
            self.results += [wire.JobResult(*result) for result in self.line.receive()[0]]
            return len(self.results) >= count

        eventually(heard, within=5, every=0.001)
        return self.results

    def run(self, task: str, **args: Any) -> wire.JobResult:
        """The result of one job of a worker that has nothing else."""
        before = len(self.results)
        self.give(before + 1, (task, args))
        return self.hear(before + 1)[-1]


@contextmanager
def in_thread(*functions: Callable[..., Any]) -> Iterator[End]:
    """A worker in a thread of this process, so that its tasks may touch what the test has."""
    line = Channel(1)
    sock, tokens, memory_fd = line.worker_ends()
    worker = Worker(FakeApp(*functions), sock, tokens, wire.SharedMemory(memory_fd))
    thread = threading.Thread(target=worker.serve, name="worker")
    thread.start()
    try:
        yield End(line)
    finally:
        line.send((wire.EXIT,))
        thread.join(5)
        assert not thread.is_alive()
        line.close()


@contextmanager
def in_process(*functions: Callable[..., Any]) -> Iterator[tuple[End, int]]:
    """A worker in a process of its own; gives the pid too."""
    line = Channel(1)
    pid = os.fork()
    if pid == 0:
        line.sock.close()
        try:
            main(FakeApp(*functions), 1, *line.worker_ends())
        finally:
            os._exit(0)
    line.close_worker_end()
    try:
        yield End(line), pid
    finally:
        line.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _ended(pid: int) -> bool:
    """Without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _running(end: End) -> bool:
    return end.line.memory.status()[1] == wire.RUNNING


def add(x: int, y: int = 1) -> int:
    return x + y


# the order of things


def test_a_worker_says_that_it_is_ready_and_runs_what_it_is_given() -> None:
    with in_thread(add) as end:
        ready = eventually(lambda: end.line.receive()[1], within=5)
        end.give(1, ("add", {"x": 1}), ("add", {"x": 1, "y": 5}))
        results = end.hear(2)

    assert ready == os.getpid()
    assert [(r.serial, r.at, r.outcome, r.payload) for r in results] == [
        (1, 0, wire.RETURNED, b"2"),
        (1, 1, wire.RETURNED, b"6"),
    ]
    assert all(r.ended >= r.started for r in results)


def test_jobs_whose_tokens_were_taken_back_are_not_run() -> None:
    gate = threading.Event()
    ran: list[int] = []

    def work(n: int) -> None:
        ran.append(n)
        if n == 1:
            gate.wait(5)

    with in_thread(work) as end:
        end.give(1, *(("work", {"n": n}) for n in (1, 2, 3)))
        end.give(2, *(("work", {"n": n}) for n in (4, 5)))
        eventually(lambda: ran, within=5)

        assert end.line.take_back() == 4
        assert end.line.take_back() == 0
        end.give(3, ("work", {"n": 6}))
        gate.set()
        results = end.hear(2)

    assert ran == [1, 6]
    assert [(r.serial, r.at) for r in results] == [(1, 0), (3, 0)]


def test_of_very_many_bunches_taken_back_none_is_taken_for_the_one_that_stays() -> None:
    """Serials that agree in their low byte, or two bytes, are different bunches."""
    gate = threading.Event()
    ran: list[int] = []

    def work(n: int) -> None:
        ran.append(n)
        if n == 0:
            gate.wait(5)

    with in_thread(work) as end:
        end.give(1, ("work", {"n": 0}), ("work", {"n": -1}))
        eventually(lambda: ran, within=5)
        for serial in [*range(2, 600), 65536 + 1, 65536 + 512]:
            assert end.line.take_back() == 1
            end.give(serial, ("work", {"n": serial}))
        assert end.line.take_back() == 1
        end.give(2 * 65536 + 512, ("work", {"n": 7}), ("work", {"n": 8}))
        gate.set()
        end.hear(3)

    assert ran == [0, 7, 8]


def test_a_result_can_be_read_before_the_next_job_starts() -> None:
    lines: list[Channel] = []
    seen: list[list[Any]] = []
    looked = threading.Event()

    def look() -> None:
        seen.extend(lines[0].memory.take())
        looked.set()

    with in_thread(add, look) as end:
        lines.append(end.line)
        end.give(1, ("add", {"x": 1}), ("look", {}))
        assert looked.wait(10)  # no other thread may take it
        end.hear(1)

    assert [result[:4] for result in seen] == [[1, 0, wire.RETURNED, b"2"]]


def test_the_status_word_tells_what_runs() -> None:
    gate = threading.Event()

    def work() -> None:
        gate.wait(5)

    with in_thread(work) as end:
        end.give(9, ("work", {}), ("work", {}))
        eventually(lambda: _running(end), within=5)
        running = end.line.view()
        gate.set()
        end.hear(2)
        eventually(lambda: not _running(end), within=5)
        after = end.line.view()

    assert (running.place, running.phase) == (wire.place(9, 0), wire.RUNNING)
    assert (after.place, after.phase) == (wire.place(9, 1), wire.DONE)


def test_the_bell_rings_rarely_for_short_jobs_and_always_when_the_worker_runs_dry() -> None:
    with in_thread(add) as end:
        eventually(lambda: end.line.receive()[1], within=5)
        for serial in (1, 2):
            end.give(serial, *(("add", {"x": n}) for n in range(100)))
            frames = wire.Frames()
            bells = 0
            results: list[list[Any]] = []
            started = time.monotonic()
            while len(results) < 100:
                assert time.monotonic() < started + 5
                end.line.sock.setblocking(True)
                end.line.sock.settimeout(5)
                bells += sum(
                    message == [wire.RESULTS_READY]
                    for message in frames.feed(end.line.sock.recv(1 << 16))
                )
                results += (
                    end.line.memory.take()
                )  # all are here at the last bell, or we wait for ever
            most = 2 + (results[-1][5] - results[0][4]) / 2000
            assert 1 <= bells <= most


def test_a_result_too_large_for_the_shared_memory_comes_by_the_socket() -> None:
    def big(n: int) -> str:
        return "x" * n

    with in_thread(big) as end:
        result = end.run("big", n=500_000)

    assert result.payload == b'"' + b"x" * 500_000 + b'"'


def test_a_worker_leaves_when_the_node_hangs_up_also_in_the_middle_of_things() -> None:
    line = Channel(1)
    sock, tokens, memory_fd = line.worker_ends()
    worker = Worker(FakeApp(add), sock, tokens, wire.SharedMemory(memory_fd))
    thread = threading.Thread(target=worker.serve, name="worker")
    line.send((wire.BUNCH, 4, []))
    line.give(
        5, [wire.JobMessage(1, 1, 7, "add", b" " * 5_000_000, None)]
    )  # its token is there, its frame only in part
    assert line.has_unsent
    thread.start()
    eventually(lambda: line.receive()[1], within=5)

    line.sock.close()
    thread.join(5)

    assert not thread.is_alive()
    line.close()


# how a call ends


def test_an_exception_of_a_task_is_reported() -> None:
    def fail(message: str) -> None:
        raise ValueError(message)

    with in_thread(fail) as end:
        result = end.run("fail", message="no")
        nul = end.run("fail", message="a\0b")

    error_data = msgspec.json.decode(result.payload or b"")
    assert (result.outcome, error_data["type"], error_data["message"]) == (
        wire.RAISED,
        "ValueError",
        "no",
    )
    assert "raise ValueError(message)" in error_data["traceback"]
    assert b"\\u0000" not in (nul.payload or b"")


def test_a_job_may_fail_or_want_another_try() -> None:
    def fail() -> None:
        raise FailJob("for\udc80ever")

    def retry(kind: str) -> None:
        delays = {"number": 90, "text": "90s", "timedelta": timedelta(seconds=90)}
        raise RetryJob("later", delay=delays[kind])

    def retry_at() -> None:
        raise RetryJob(at="2030-01-01T00:00:00Z")

    with in_thread(fail, retry, retry_at) as end:
        failed = end.run("fail")
        retried = [end.run("retry", kind=kind) for kind in ("number", "text", "timedelta")]
        at = end.run("retry_at")

    assert failed.extra == {"wants": "fail", "reason": "for?ever"}
    for result in retried:
        assert result.extra == {"wants": "retry", "reason": "later", "delay": 90 * SECOND}
    assert at.extra == {"wants": "retry", "reason": "RetryJob", "at": 1_893_456_000 * SECOND}


def test_a_wish_that_makes_no_sense_is_an_exception_and_not_the_end_of_the_worker() -> None:
    def retry() -> None:
        raise RetryJob(delay="soonish")

    with in_thread(retry, add) as end:
        result = end.run("retry")
        after = end.run("add", x=1)

    assert (result.outcome, result.extra) == (wire.RAISED, None)
    assert b"soonish" in (result.payload or b"")
    assert after.payload == b"2"


def test_arguments_that_no_longer_fit_have_a_cause_of_their_own() -> None:
    with in_thread(add) as end:
        result = end.run("add", z=1)

    assert (result.outcome, result.payload) == (wire.BAD_ARGUMENTS, None)
    assert "arguments that no longer fit" in (result.extra or {})["reason"]


def test_a_task_that_is_gone_is_an_exception() -> None:
    with in_thread(add) as end:
        result = end.run("subtract")

    assert result.outcome == wire.RAISED


def test_a_result_that_cannot_be_kept_is_still_a_success() -> None:
    def odd() -> object:
        return object()

    with in_thread(odd) as end:
        result = end.run("odd")

    assert (result.outcome, result.payload) == (wire.RETURNED, None)
    assert "could not be kept" in (result.extra or {})["reason"]


@pytest.mark.parametrize(
    "way_out", [SystemExit, KeyboardInterrupt, GeneratorExit, Stopped, asyncio.CancelledError]
)
def test_an_unexpected_exit_is_an_exception(way_out: type[BaseException]) -> None:
    def leave() -> None:
        raise way_out

    with in_thread(leave, add) as end:
        result = end.run("leave")
        after = end.run("add", x=1)

    assert result.outcome == wire.RAISED
    assert after.payload == b"2"


def test_a_job_may_stop_itself_when_it_should() -> None:
    gate = threading.Event()

    def watch() -> None:
        gate.wait(5)
        if current_job.current_job().should_stop:
            raise Stopped

    with in_thread(watch) as end:
        end.give(1, ("watch", {}))
        eventually(lambda: _running(end), within=5)
        assert not end.line.view().checked_stop
        end.line.memory.ask_to_stop(wire.place(1, 0))
        gate.set()
        (result,) = end.hear(1)

    assert result.outcome == wire.STOPPED


def test_an_async_task_runs_on_one_loop_for_all() -> None:
    event_loop = []

    async def work(n: int) -> int:
        await asyncio.sleep(0)
        event_loop.append(asyncio.get_running_loop())
        return n

    with in_thread(work) as end:
        results = [end.run("work", n=n) for n in (1, 2)]

    assert [result.payload for result in results] == [b"1", b"2"]
    assert event_loop[0] is event_loop[1]
    event_loop[0].close()


def test_progress_is_seen_while_the_job_runs() -> None:
    gate = threading.Event()

    def work() -> None:
        current_job.current_job().progress(30, note="tile 3")
        gate.wait(5)

    with in_thread(work) as end:
        end.give(1, ("work", {}))
        noted = eventually(lambda: end.line.view().progress, within=5)
        gate.set()
        end.hear(1)

    assert noted is not None
    assert noted[1:] == (wire.place(1, 0), 30.0, 100.0, "tile 3")


# a process that can be signalled


def sleep_long() -> None:
    current_job.current_job().progress(1)
    time.sleep(60)


async def sleep_long_async() -> None:
    current_job.current_job().progress(1)
    await asyncio.sleep(60)


@pytest.mark.parametrize("task", ["sleep_long", "sleep_long_async"])
def test_sigterm_stops_the_job_that_was_asked_to_and_the_worker_goes_on(task: str) -> None:
    with in_process(sleep_long, sleep_long_async, add) as (end, pid):
        end.give(1, (task, {}))
        eventually(lambda: end.line.view().progress, within=5)  # it is in the user's code
        end.line.memory.ask_to_stop(wire.place(1, 0))
        os.kill(pid, signal.SIGTERM)
        (result,) = end.hear(1)
        after = end.run("add", x=1)

    assert result.outcome == wire.STOPPED
    assert after.payload == b"2"


def test_a_sigterm_that_comes_too_late_hits_no_other_job() -> None:
    def nap() -> str:
        time.sleep(0.1)
        return "slept"

    with in_process(nap) as (end, pid):
        end.line.memory.ask_to_stop(wire.place(1, 0))
        end.give(2, ("nap", {}))
        eventually(lambda: _running(end), within=5)
        os.kill(pid, signal.SIGTERM)
        (result,) = end.hear(1)

    assert result.payload == b'"slept"'


def test_after_a_stray_sigterm_the_node_says_what_becomes_of_the_job_and_then_the_worker_leaves() -> (
    None
):
    with in_process(sleep_long) as (end, pid):
        end.give(1, ("sleep_long", {}))
        eventually(lambda: end.line.view().progress, within=5)
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: end.line.view().signalled, within=5)
        assert _running(end)
        end.line.memory.ask_to_stop(wire.place(1, 0))
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: _ended(pid), within=5)
        (result,) = end.hear(1)
        assert end.line.receive() == ([], None)
        assert not end.line.open

    assert result.outcome == wire.STOPPED


def test_an_idle_worker_goes_at_a_sigterm_and_stays_at_a_sigint() -> None:
    with in_process(add) as (end, pid):
        eventually(lambda: end.line.receive()[1], within=5)
        os.kill(pid, signal.SIGINT)
        assert end.run("add", x=1).payload == b"2"
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: _ended(pid), within=5)


def test_what_a_dead_worker_had_done_and_what_it_was_doing_can_still_be_read() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with in_process(add, die) as (end, pid):
        end.give(3, ("add", {"x": 1}), ("die", {}), ("add", {"x": 2}))
        eventually(lambda: _ended(pid), within=5)
        results = end.hear(1)
        view = end.line.view()
        left = end.line.take_back()

    assert [(r.at, r.payload) for r in results] == [(0, b"2")]
    assert (view.place, view.phase) == (wire.place(3, 1), wire.RUNNING)
    assert left == 1


def test_processes_that_a_job_leaves_behind_are_ended_before_its_result_is_sent() -> None:
    def leave() -> int:
        return subprocess.Popen(["sleep", "60"]).pid

    with in_process(leave) as (end, _):
        result = end.run("leave")
        stray = int(result.payload or b"0")

    assert result.extra == {"strays": 1}
    with pytest.raises(ProcessLookupError):
        os.kill(stray, 0)


# a channel with a worker that does not read


def test_what_does_not_fit_into_the_socket_waits_and_nothing_is_lost() -> None:
    line = Channel(1)
    theirs, _, _ = line.worker_ends()
    jobs = [wire.JobMessage(1, 1, 1, "t", b"x" * 100_000, None)] * 60

    line.give(1, jobs)
    assert line.has_unsent
    frames = wire.Frames()
    found: list[list[Any]] = []
    while not found:
        found += list(frames.feed(theirs.recv(1 << 20)))
        line.flush()

    assert not line.has_unsent
    assert found == [[wire.BUNCH, 1, [list(job) for job in jobs]]]
    line.close()


def test_what_waits_for_room_arrives_in_the_order_in_which_it_was_sent() -> None:
    line = Channel(1)
    theirs, _, _ = line.worker_ends()
    jobs = [wire.JobMessage(1, 1, 1, "t", b"x" * 100_000, None)] * 30

    for serial in range(4):
        line.give(serial, jobs)
    line.send((wire.EXIT,))
    frames = wire.Frames()
    found: list[list[Any]] = []
    while len(found) < 5:
        found += list(frames.feed(theirs.recv(1 << 20)))
        line.flush()

    assert [message[1] for message in found[:4]] == [0, 1, 2, 3]
    assert found[4] == [wire.EXIT]
    assert not line.has_unsent
    line.close()


def test_a_message_to_a_dead_worker_is_no_error() -> None:
    line = Channel(1)
    line.close_worker_end()

    line.send((wire.EXIT,))
    assert not line.has_unsent
    assert line.receive() == ([], None)
    assert not line.open
    line.close()


# describe()


def describe_raised(error: BaseException) -> dict[str, Any]:
    """As raised, with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return msgspec.json.decode(describe(caught), type=dict[str, Any])


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("I say nothing")

    __repr__ = __str__


class Rude(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


@pytest.mark.parametrize("kind", [Mute, Rude])
def test_an_exception_without_a_readable_text_is_reported(kind: type[Exception]) -> None:
    error_data = describe_raised(kind())

    assert error_data["type"] == kind.__name__
    assert "str() of it raised" in error_data["message"]
    assert "describe_raised" in error_data["traceback"]


def test_a_chain_of_causes_is_reported_up_to_a_limit() -> None:
    error: Exception = ValueError("root")
    for n in range(1000):
        outer = RuntimeError(f"layer {n}")
        outer.__cause__ = error
        error = outer

    error_data = describe_raised(error)

    assert error_data["message"] == "layer 999"
    assert [cause["message"] for cause in error_data["causes"]] == [
        f"layer {n}" for n in range(998, 978, -1)
    ]


def test_causes_that_form_a_ring_come_to_an_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    error_data = describe_raised(first)

    assert [cause["message"] for cause in error_data["causes"]][:2] == ["b", "a"]


def test_a_suppressed_context_is_not_reported() -> None:
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("shown") from None
    except ValueError as error:
        error_data = msgspec.json.decode(describe(error))

    assert error_data["causes"] == []


def test_a_huge_message_is_cut() -> None:
    error = ValueError("x" * 10_000_000)
    error.__cause__ = KeyError("y" * 10_000_000)

    assert len(describe(error)) < ERROR_LIMIT


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb", "\0", "\x1b[31m", "é😀"])
def test_any_text_can_be_reported_and_stored(text: str) -> None:
    error = ValueError(text)
    error.__cause__ = KeyError(text)

    error_data = describe_raised(error)

    assert error_data["type"] == "ValueError"
    assert len(error_data["causes"]) == 1
    assert "\0" not in str(error_data)
    assert all(isinstance(value, str) for value in error_data["causes"][0].values())


def test_a_recursion_without_end_is_reported() -> None:
    def deeper() -> None:
        deeper()

    with pytest.raises(RecursionError) as caught:
        deeper()
    error_data = msgspec.json.decode(describe(caught.value))

    assert error_data["type"] == "RecursionError"
    assert len(error_data["traceback"]) < ERROR_LIMIT


# what a job has used


def spin(ms: int) -> None:
    until = time.process_time() + ms / 1000
    while time.process_time() < until:
        pass


def nap(ms: int) -> None:
    time.sleep(ms / 1000)


def test_the_cpu_time_of_a_job_is_its_own_also_right_after_tiny_ones() -> None:
    with in_process(add, spin, nap) as (end, _):
        end.give(
            1,
            *[("add", {"x": 1})] * 3000,
            ("spin", {"ms": 50}),
            ("nap", {"ms": 50}),
            ("spin", {"ms": 50}),
        )
        *tiny, spun, slept, again = end.hear(3003)

    used = [each.cpu or 0 for each in (*tiny, spun, slept, again)]
    # What lies between two jobs is counted, too; here that is also what this thread does meanwhile.
    spans = [each.ended - last.ended for last, each in pairwise(tiny)]
    assert all(cpu <= max(1_000, span) for cpu, span in zip(used[1:], spans, strict=False))
    assert 45_000 <= used[-3] <= spun.ended - spun.started + 2_000
    assert used[-2] < 25_000
    assert used[-1] >= 45_000


def report_itself() -> int:
    return current_job.current_job()._host.report(None).cpu or 0


def test_a_job_that_ends_itself_reports_its_own_cpu_time_too() -> None:
    with in_process(add, report_itself) as (end, _):
        end.give(1, *[("add", {"x": 1})] * 3000, ("report_itself", {}))
        *_, last = end.hear(3001)

    assert last.payload is not None
    assert int(last.payload) <= last.ended - last.started + 1_000


@pytest.mark.parametrize("factory", [event_loop.factory(), asyncio.new_event_loop])
def test_a_worker_that_was_shared_still_waits_for_its_node(factory: event_loop.Factory) -> None:
    line = Channel(1)
    sock, tokens, memory = line.worker_ends()
    app = FakeApp()
    shared = SharedWorker(
        Worker(app, sock, tokens, wire.SharedMemory(memory)), app, sock, tokens, wire.Frames()
    )
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(shared.serve(0, [[wire.SHARE, 0]]))

    assert os.get_blocking(sock.fileno())
    line.close()
