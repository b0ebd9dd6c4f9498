"""Frames on the socket between node and worker.

A frame is four bytes of length and a msgpack array whose first item is its kind.  This module turns
bytes into messages and back; it has no socket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

# node → worker:
#   [BUNCH, serial, jobs]
#   [FORK_PER_JOB, serial, jobs]: a bunch, each job in a process of its own
#   [STOP, seat, place]: stop the job of this seat
#   [EXIT]: end when the jobs in hand have ended
#   [SHARE, seats]: become a shared worker; with 0 seats, an ordinary one again
#   [CHECK_CONDITIONS, serial, job, conditions]
BUNCH, STOP, EXIT, SHARE, CHECK_CONDITIONS, FORK_PER_JOB = range(6)
# worker → node:
#   [READY, pid]
#   [RESULTS_READY]: there are results in the shared memory
#   [RESULTS, [result, …]]: results that did not fit into it
#   [CONDITIONS_CHECKED, [serial, ways, wait, reason, error]]
READY, RESULTS_READY, RESULTS, CONDITIONS_CHECKED = range(4)

# How a call ended; APPLIED: the job has written its end itself.
RETURNED, RAISED, STOPPED, BAD_ARGUMENTS, APPLIED = range(5)

_length = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class JobMessage(NamedTuple):
    """A job as it is sent to a worker."""

    id: int
    attempt: int
    claim: int
    task: str
    args: bytes
    extra: tuple[Any, ...] | None  # (options, retries, crashes, saved); None: all usual


TASK, ARGS = JobMessage._fields.index("task"), JobMessage._fields.index("args")

# A JobResult as a plain tuple: it is made for every job, and a tuple costs less.
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
    stream = bytearray()
    add_frame(stream, message)
    return stream


def add_frame(stream: bytearray, message: tuple[Any, ...]) -> None:
    """Append a frame to `stream`.

    It is written in place: arguments may be long, and a copy of them costs as much as a short job.
    """
    start = len(stream)
    stream += _length.pack(0)
    _encoder.encode_into(message, stream, -1)
    _length.pack_into(stream, start, len(stream) - start - _length.size)


def unframe(data: bytes) -> list[Any] | None:
    """Return the message of one frame, or None if the frame is not complete."""
    whole = len(data) >= _length.size and len(data) - _length.size >= _length.unpack_from(data)[0]
    if not whole:
        return None
    message: list[Any] = _decoder.decode(memoryview(data)[_length.size :])
    return message


class Frames:
    """Collects received bytes, and gives the frames that are complete.

    All bytes go into the same memory: new pages from the kernel cost more than filling them does.
    """

    ROOM = 1 << 18  # bytes
    KEPT = 1 << 21  # bytes; a larger buffer, made for one frame, is freed after it

    def __init__(self) -> None:
        self._view = memoryview(bytearray(self.ROOM))
        self._start = self._end = 0

    def feed(self, data: bytes | bytearray) -> Iterator[list[Any]]:
        self.room(len(data))[: len(data)] = data
        return self.filled(len(data))

    def room(self, least: int = 1) -> memoryview:
        """Return the memory for the next bytes; call `filled` when they are there."""
        start, held = self._start, self._end - self._start
        if not held and len(self._view) > self.KEPT:
            self._view = memoryview(bytearray(self.ROOM))
        needed = max(held + least, self._size() + _length.size)
        if needed > len(self._view):
            larger = memoryview(bytearray(needed))
            larger[:held] = self._view[start : self._end]
            self._view = larger
        elif start:
            self._view[:held] = self._view[start : self._end]
        self._start, self._end = 0, held
        return self._view[held:]

    def filled(self, size: int) -> Iterator[list[Any]]:
        """Give the frames that are complete now that `size` bytes more have come."""
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
        """Return the size of the frame that has begun; 0 until its length has come."""
        if self._end - self._start < _length.size:
            return 0
        return int(_length.unpack_from(self._view, self._start)[0])


def token(serial: int) -> bytes:
    """Return the token for one job of a bunch.

    It is the whole serial, so that no bunch is taken for another after many were taken back.
    """
    return _length.pack(serial & 0xFFFFFFFF)


TOKEN_SIZE = _length.size


def serials(tokens: bytes) -> list[int]:
    return [serial for (serial,) in _length.iter_unpack(tokens)]


def place(serial: int, index: int) -> int:
    """Return one number for a job in a bunch; the status word has it above the phase."""
    return (serial & 0xFFFFFFFF) << 24 | index & 0xFFFFFF
