"""Frames, places, tokens, and the memory that a node shares with a worker."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genba import wire
from genba.node.processes import guard
from genba.wire import Frames, SharedMemory
from genba.worker import zygote

items = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=20)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture
def both_ends() -> Iterator[tuple[SharedMemory, SharedMemory]]:
    """One piece of memory, seen by a worker and by its node."""
    fd = SharedMemory.create()
    worker, node = SharedMemory(fd), SharedMemory(fd)
    yield worker, node
    worker.close()
    node.close()
    os.close(fd)


# frames


@settings(max_examples=50)
@given(messages=st.lists(st.lists(items, max_size=4), max_size=6), data=st.data())
def test_frames_are_the_same_wherever_the_bytes_are_split(
    messages: list[list[Any]], data: st.DataObject
) -> None:
    stream = b"".join(wire.frame(tuple(message)) for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames = Frames()

    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += list(frames.feed(stream[start:end]))

    assert found == messages


def test_a_frame_that_broke_off_is_no_message() -> None:
    stream = bytes(wire.frame((1, "a", b"\0" * 300)))

    assert wire.unframe(stream) == [1, "a", b"\0" * 300]
    assert {wire.unframe(stream[:end]) for end in range(len(stream))} == {None}


def test_frames_come_byte_by_byte_too() -> None:
    frames = Frames()
    stream = wire.frame((1, "a", b"\0" * 300)) + wire.frame((2,))

    found = [message for byte in stream for message in frames.feed(bytes((byte,)))]

    assert found == [[1, "a", b"\0" * 300], [2]]


def test_a_reader_that_stops_in_the_middle_loses_no_frame() -> None:
    frames = Frames()
    first = next(iter(frames.feed(wire.frame((1,)) + wire.frame((2,)))))

    assert [first, *frames.feed(b"")] == [[1], [2]]


def test_a_frame_may_be_larger_than_the_memory_that_is_kept_for_them() -> None:
    frames = Frames()
    stream = bytes(wire.frame((1, b"a" * (Frames.KEPT + 1))) + wire.frame((2, b"b")))

    found = []
    while stream:
        room = frames.room()
        size = min(len(room), 100_000, len(stream))
        room[:size] = stream[:size]
        stream = stream[size:]
        found += list(frames.filled(size))

    assert found == [[1, b"a" * (Frames.KEPT + 1)], [2, b"b"]]
    assert len(frames.room()) == Frames.ROOM


def test_what_was_read_stays_as_it_is_when_more_comes_to_the_same_place() -> None:
    frames = Frames()

    (first,) = frames.feed(bytes(wire.frame((1, b"first"))))
    (second,) = frames.feed(bytes(wire.frame((2, b"other"))))

    assert (first, second) == ([1, b"first"], [2, b"other"])


# places and tokens


@given(serial=st.integers(0, 2**32 - 1), index=st.integers(0, 2**24 - 1))
def test_a_place_fits_into_the_status_word_and_tells_serial_and_index(
    serial: int, index: int
) -> None:
    place = wire.place(serial, index)

    assert (place >> 24, place & 0xFFFFFF) == (serial, index)
    assert place << 8 | 0xFF < 2**64


def test_tokens_of_bunches_256_or_65536_apart_differ() -> None:
    assert len({wire.token(serial) for serial in (5, 5 + 256, 5 + 65536)}) == 3
    assert len(wire.token(2**32 - 1) * 3) == 3 * wire.TOKEN_SIZE


# the shared memory


@given(serial=st.integers(0, 2**32 - 1), index=st.integers(0, 2**24 - 1))
@settings(max_examples=30)
def test_what_runs_is_seen_by_the_other_side(serial: int, index: int) -> None:
    fd = SharedMemory.create()
    worker, node = SharedMemory(fd), SharedMemory(fd)
    place = wire.place(serial, index)
    try:
        assert node.status() == (0, wire.IDLE)
        worker.begin(place)
        assert node.status() == (place, wire.RUNNING)
        worker.done(place)
        assert node.status() == (place, wire.DONE)
    finally:
        worker.close()
        node.close()
        os.close(fd)


def test_one_job_is_asked_to_stop_and_its_neighbour_is_not(
    both_ends: tuple[SharedMemory, SharedMemory],
) -> None:
    worker, node = both_ends
    first, second = wire.place(0, 0), wire.place(0, 1)
    assert node.asked_to_stop() is None
    assert not worker.should_stop(first)

    node.ask_to_stop(first)

    assert worker.asked_to_stop() == first
    assert worker.should_stop(first)
    assert not worker.should_stop(second)


def test_a_drain_stops_every_job(both_ends: tuple[SharedMemory, SharedMemory]) -> None:
    worker, node = both_ends
    node.drain()

    assert worker.should_stop(wire.place(1, 1))
    assert worker.should_stop(wire.place(9, 9))
    assert worker.asked_to_stop() is None


def test_a_job_that_has_taken_locks_is_known(both_ends: tuple[SharedMemory, SharedMemory]) -> None:
    node, worker = both_ends
    place = wire.place(3, 1)
    assert not node.locked(place)
    worker.lock(place)

    assert node.locked(place)
    assert not node.locked(wire.place(3, 2))


def test_a_job_that_has_read_the_stop_flag_is_known(
    both_ends: tuple[SharedMemory, SharedMemory],
) -> None:
    worker, node = both_ends
    place = wire.place(0, 0)
    assert not node.has_checked_stop(place)

    worker.should_stop(place)

    assert node.has_checked_stop(place)
    assert not node.has_checked_stop(wire.place(0, 1))


def test_signs_of_life_are_counted(both_ends: tuple[SharedMemory, SharedMemory]) -> None:
    worker, node = both_ends
    worker.beat()
    worker.beat()
    worker.write_progress(1, 0, 100, b"")

    assert node.beats() == 3


# progress


def test_progress_is_seen_whole_or_not_at_all(both_ends: tuple[SharedMemory, SharedMemory]) -> None:
    worker, node = both_ends
    assert node.read_progress() is None

    worker.write_progress(7, 1, 4, "é".encode())
    first = node.read_progress()
    worker.write_progress(8, 2, 4, b"")
    second = node.read_progress()

    assert first is not None
    assert second is not None
    assert (first[1:], second[1:]) == ((7, 1.0, 4.0, "é"), (8, 2.0, 4.0, ""))
    assert second[0] > first[0]


def test_a_note_cut_in_the_middle_of_a_letter_can_be_read(
    both_ends: tuple[SharedMemory, SharedMemory],
) -> None:
    worker, node = both_ends
    worker.write_progress(7, 1, 4, ("é" * wire.NOTE_LIMIT).encode()[: wire.NOTE_LIMIT - 1])

    noted = node.read_progress()
    assert noted is not None
    assert noted[4].endswith("é�")


def test_a_note_that_failed_half_way_is_not_seen_and_spoils_none_after_it(
    both_ends: tuple[SharedMemory, SharedMemory],
) -> None:
    worker, node = both_ends
    worker.write_progress(7, 1, 4, b"")
    with pytest.raises(struct.error):
        worker.write_progress(7, 10**400, 10**401, b"")
    assert node.read_progress() is None

    worker.write_progress(7, 2, 4, b"")

    noted = node.read_progress()
    assert noted is not None
    assert noted[2] == 2.0


# the ring


def a_result(n: int, size: int) -> wire.JobResult:
    return wire.JobResult(n, 0, wire.RETURNED, bytes((n % 251,)) * size, n, n, 0, 0, None)


# "take", or the size of a result to put: many small ones, and some near the size of the ring
steps = st.lists(
    st.just("take")
    | st.integers(0, 200)
    | st.integers(20_000, 70_000)
    | st.integers(131_000, 131_100),
    max_size=60,
)


@settings(max_examples=50)
@given(steps=steps)
def test_the_ring_loses_nothing_and_keeps_the_order(steps: list[int | str]) -> None:
    fd = SharedMemory.create()
    worker, node = SharedMemory(fd), SharedMemory(fd)
    put: list[list[Any]] = []
    taken: list[list[Any]] = []
    try:
        for n, step in enumerate(steps):
            if isinstance(step, str):
                taken += node.take()
                assert taken == put
            elif worker.put(a_result(n, step)):
                put.append(list(a_result(n, step)))
            else:
                assert step > 20_000 or put[len(taken) :]  # refused only for want of room
        taken += node.take()
        assert taken == put
        assert node.take() == []
    finally:
        worker.close()
        node.close()
        os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 57, 999, 4096, 30_011])
def test_the_ring_goes_round_many_times(
    both_ends: tuple[SharedMemory, SharedMemory], size: int
) -> None:
    worker, node = both_ends
    count = 3 * wire.SHARED_MEMORY_SIZE // (size + 20) + 3

    for n in range(count):
        assert worker.put(a_result(n, size))
        assert node.take() == [list(a_result(n, size))]


def test_a_full_ring_refuses_and_takes_again_when_it_is_read(
    both_ends: tuple[SharedMemory, SharedMemory],
) -> None:
    worker, node = both_ends
    count = 0
    while worker.put(a_result(count, 1000)):
        count += 1
    assert 100 < count < 131

    assert not worker.put(a_result(count, 1000))
    assert node.take() == [list(a_result(n, 1000)) for n in range(count)]
    assert worker.put(a_result(count, 1000))
    assert node.take() == [list(a_result(count, 1000))]


def test_a_result_greater_than_the_ring_is_refused(
    both_ends: tuple[SharedMemory, SharedMemory],
) -> None:
    worker, node = both_ends

    assert not worker.put(a_result(1, 1 << 17))
    assert worker.put(a_result(2, 100))
    assert node.take() == [list(a_result(2, 100))]


def test_what_is_in_the_ring_outlives_its_writer() -> None:
    fd = SharedMemory.create()
    worker = SharedMemory(fd)
    worker.put(a_result(1, 10))
    worker.begin(5)
    worker.close()

    node = SharedMemory(fd)
    assert node.take() == [list(a_result(1, 10))]
    assert node.status() == (5, wire.RUNNING)
    node.close()
    os.close(fd)


# the log


@given(st.lists(st.binary(max_size=3 * wire.LOG_END), max_size=6))
def test_of_what_a_job_writes_the_beginning_and_the_end_are_kept(parts: list[bytes]) -> None:
    fd = SharedMemory.create()
    memory = SharedMemory(fd)
    for part in parts:
        memory.write(part.replace(b"\0", b"x").translate(_ASCII))
    whole = b"".join(parts).replace(b"\0", b"x").translate(_ASCII).decode()

    log = memory.log()

    assert memory.logged() == len(whole)
    if not whole:
        assert log is None
    elif len(whole) <= 2 * wire.LOG_END:
        assert log == whole
    else:
        left_out = len(whole) - 2 * wire.LOG_END
        marker = f"\n[genba: {left_out} bytes left out]\n"
        assert log == whole[: wire.LOG_END] + marker + whole[-wire.LOG_END :]
    memory.forget_log()
    assert memory.log() is None
    memory.close()
    os.close(fd)


_ASCII = bytes(byte & 0x7F or 0x78 for byte in range(256))


def test_what_a_log_says_can_be_stored_whatever_it_is(
    both_ends: tuple[SharedMemory, SharedMemory],
) -> None:
    worker, node = both_ends
    worker.write(b"a\0b\xff")

    assert node.log() == "a\ufffdb\ufffd"


def test_the_guard_and_the_zygote_ignore_the_signal_that_stops_a_job() -> None:
    assert wire.STOP_SIGNAL in guard._IGNORED
    assert wire.STOP_SIGNAL in zygote._IGNORED
