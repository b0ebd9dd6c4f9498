"""Frames on the socket between node and worker.

A frame is four bytes of length and a msgpack array whose first item tells its kind.  Bytes in, messages out;
no socket here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

# node → worker: [BUNCH, serial, jobs], [STOP, seat, place], [EXIT], [SHARE, seats], [ASK, serial, job, conditions],
#                [EACH, serial, jobs]: a bunch, each job in a process of its own
BUNCH, STOP, EXIT, SHARE, CHECK_CONDITIONS, FORK_PER_JOB = range(6)
# worker → node: [READY, pid], [BELL], [RESULTS, [result, …]], [ANSWER, [serial, ways, wait, said, error]]
READY, RESULTS_READY, RESULTS, CONDITIONS_CHECKED = range(4)


RETURNED, RAISED, STOPPED, BAD_ARGUMENTS, APPLIED = range(
    5
)  # how the call ended; APPLIED: the job has written its end itself

_length = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class JobMessage(NamedTuple):
    """A job as it travels to a worker."""

    id: int
    attempt: int
    claim: int
    task: str
    args: bytes
    extra: tuple[Any, ...] | None  # (options, retries, crashes, saved): None when all are as usual


TASK, ARGS = JobMessage._fields.index("task"), JobMessage._fields.index("args")

# A Result without its names: what is made for each job should not cost more than it must.
BareResult = tuple[int, int, int, bytes | None, int, int, int | None, int, dict[str, Any] | None]


class JobResult(NamedTuple):
    """How one call ended; `at` is the job's place in its bunch."""

    serial: int
    at: int
    outcome: int
    payload: bytes | None
    started: int
    ended: int
    cpu: int | None
    peak: int
    extra: dict[str, Any] | None


def frame(message: tuple[Any, ...]) -> bytearray:
    made = bytearray()
    add_frame(made, message)
    return made


def add_frame(stream: bytearray, message: tuple[Any, ...]) -> None:
    """Written where it goes off from: arguments may be long, and each copy of them costs as much as a short job."""
    start = len(stream)
    stream += _length.pack(0)
    _encoder.encode_into(message, stream, -1)
    _length.pack_into(stream, start, len(stream) - start - _length.size)


def unframe(data: bytes) -> list[Any] | None:
    """The message of one frame that came whole; None if it did not."""
    whole = len(data) >= _length.size and len(data) - _length.size >= _length.unpack_from(data)[0]
    if not whole:
        return None
    message: list[Any] = _decoder.decode(memoryview(data)[_length.size :])
    return message


class Frames:
    """Bytes as they come, frames as they are complete.

    All of them come into the same memory: to get pages from the kernel for each anew takes longer than to fill them.
    """

    ROOM = 1 << 18
    KEPT = 1 << 21  # bytes; what was needed beyond that for one frame is given back after it

    def __init__(self) -> None:
        self._view = memoryview(bytearray(self.ROOM))
        self._start = self._end = 0

    def feed(self, data: bytes | bytearray) -> Iterator[list[Any]]:
        self.room(len(data))[: len(data)] = data
        return self.filled(len(data))

    def room(self, least: int = 1) -> memoryview:
        """Where the next bytes may be put, by whoever then says how many they were."""
        start, held = self._start, self._end - self._start
        if not held and len(self._view) > self.KEPT:
            self._view = memoryview(bytearray(self.ROOM))
        wanted = max(held + least, self._size() + _length.size)
        if wanted > len(self._view):
            larger = memoryview(bytearray(wanted))
            larger[:held] = self._view[start : self._end]
            self._view = larger
        elif start:
            self._view[:held] = self._view[start : self._end]
        self._start, self._end = 0, held
        return self._view[held:]

    def filled(self, size: int) -> Iterator[list[Any]]:
        """The frames that are complete with so many bytes more."""
        self._end += size
        return self._complete()

    def _complete(self) -> Iterator[list[Any]]:
        while self._end - self._start >= _length.size:
            start = self._start + _length.size
            end = start + self._size()
            if end > self._end:
                return
            self._start = end
            yield _decoder.decode(self._view[start:end])

    def _size(self) -> int:
        """Of the frame that has begun; 0 as long as that is not known."""
        if self._end - self._start < _length.size:
            return 0
        return int(_length.unpack_from(self._view, self._start)[0])


def token(serial: int) -> bytes:
    """The right to run one job of a bunch.  The whole serial: of many bunches taken back, none is taken for another."""
    return _length.pack(serial & 0xFFFFFFFF)


TOKEN_SIZE = _length.size


def serials(tokens: bytes) -> list[int]:
    return [serial for (serial,) in _length.iter_unpack(tokens)]


def place(serial: int, index: int) -> int:
    """One number for a job in a bunch; what the status word carries above its phase."""
    return (serial & 0xFFFFFFFF) << 24 | index & 0xFFFFFF
