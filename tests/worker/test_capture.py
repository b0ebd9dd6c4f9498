"""What a worker does with what is printed."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator

import pytest

from genba import wire
from genba.node.processes.channel import OtherOutput
from genba.worker.capture import Capture, Stream


@pytest.fixture
def memory() -> Iterator[wire.SharedMemory]:
    fd = wire.SharedMemory.create()
    memory = wire.SharedMemory(fd)
    yield memory
    memory.close()
    os.close(fd)


@pytest.fixture
def before() -> Iterator[tuple[int, int]]:
    """Where output went so far: the end to read from, and the other."""
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


@pytest.fixture
def stream(memory: wire.SharedMemory, before: tuple[int, int]) -> Iterator[Stream]:
    capture = Capture(memory)
    stream = Stream(capture, sys.stdout, before[1])
    capture.on = True
    yield stream
    stream.outside.stream.close()


def test_what_is_printed_while_a_job_runs_is_its_log(
    memory: wire.SharedMemory, stream: Stream, before: tuple[int, int]
) -> None:
    print("words", 7, file=stream, flush=True)
    stream.buffer.write(b"bytes\n")
    handler = logging.StreamHandler(stream)
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "record %d", (8,), None))

    assert memory.log() == "words 7\nbytes\nrecord 8\n"
    assert (stream.fileno(), stream.isatty(), stream.writable()) == (before[1], False, True)


def test_between_jobs_it_goes_where_it_always_went(
    memory: wire.SharedMemory, stream: Stream, before: tuple[int, int]
) -> None:
    stream._capture.on = False
    print("to the node", file=stream, flush=True)

    assert memory.log() is None
    assert os.read(before[0], 100) == b"to the node\n"


def test_a_huge_text_is_cut_before_it_costs_anything(
    memory: wire.SharedMemory, stream: Stream
) -> None:
    stream.write("a" + "é" * 50_000_000 + "z")

    log = memory.log()
    assert log is not None
    assert len(log) < 70_000
    assert (log[0], log[-1]) == ("a", "z")


def test_what_comes_from_other_processes_follows_and_all_is_bounded() -> None:
    output = OtherOutput()
    assert not output
    for _ in range(1000):
        output.add(b"x" * 999 + b"\n")

    captured = output.after("y" * 70_000)

    assert len(captured) < 2 * wire.LOG_END + 500
    assert captured.startswith("yyy")
    assert captured.endswith("x\n")
    assert captured.count("left out]") == 2
    assert "from other processes" in captured


@pytest.mark.parametrize(
    "sizes", [[5], [OtherOutput.ROOM], [OtherOutput.ROOM + 3, 4], [1, 2 * OtherOutput.ROOM - 1]]
)
def test_a_short_murmur_is_kept_whole(sizes: list[int]) -> None:
    output = OtherOutput()
    for i, size in enumerate(sizes):
        output.add(b"%d" % i * size)

    assert output.after(None) == "".join(str(i) * size for i, size in enumerate(sizes))
