"""Node and worker: frames on a socket, and one piece of shared memory per worker.

A frame is four bytes of length and a msgpack array whose first item tells its kind.  The shared memory has what
must be seen although one of the two is busy or dead: which job runs, whether it should stop, its progress, and
the results that the node has not read yet.  Bytes in, messages out; no socket here.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

BUNCH, STOP, EXIT = range(3)  # node → worker: [BUNCH, serial, jobs], [STOP, place], [EXIT]
READY, BELL, RESULTS = range(3)  # worker → node: [READY, pid], [BELL], [RESULTS, [result, …]]

IDLE, RUNNING, DONE = range(3)  # phases of the status word

RETURNED, RAISED, STOPPED, UNFIT = range(4)  # how the call ended, as the worker saw it

_length = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class Job(NamedTuple):
    """A job as it travels to a worker."""

    id: int
    attempt: int
    claim: int
    task: str
    args: bytes
    extra: tuple[Any, ...] | None  # (options, retries, crashes, saved): None when all are as usual


class Result(NamedTuple):
    """How one call ended; `at` is the job's place in its bunch."""

    serial: int
    at: int
    outcome: int
    payload: bytes | None
    started: int
    ended: int
    cpu: int
    peak: int
    extra: dict[str, Any] | None


def frame(message: tuple[Any, ...]) -> bytes:
    body = _encoder.encode(message)
    return _length.pack(len(body)) + body


class Frames:
    """Bytes as they come, frames as they are complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        self._buffer += data
        start = 0
        view = self._buffer
        try:
            while len(view) - start >= 4:
                (size,) = _length.unpack_from(view, start)
                if len(view) - start - 4 < size:
                    break
                message = _decoder.decode(bytes(view[start + 4 : start + 4 + size]))
                start += 4 + size
                yield message
        finally:
            del view[:start]


def token(serial: int) -> bytes:
    """The right to run one job of a bunch.  The whole serial: of many bunches taken back, none is taken for another."""
    return _length.pack(serial & 0xFFFFFFFF)


TOKEN_SIZE = _length.size


def place(serial: int, index: int) -> int:
    """One number for a job in a bunch; what the status word carries above its phase."""
    return (serial & 0xFFFFFFFF) << 24 | index & 0xFFFFFF


# words of the shared memory, eight bytes each, written in one store
_STATUS, _STOP, _DRAIN, _SEEN, _BEAT, _HEAD, _TAIL, _TURN = range(8)
_PROGRESS = 64
_NOTE = struct.Struct("<QddI")
NOTE_LIMIT = 4000
_RING = 8192
_RING_SIZE = 1 << 17
_SKIP = 0xFFFFFFFF
SIZE = _RING + _RING_SIZE


class Slate:
    """The shared memory of one worker, from either side."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        self._words = memoryview(self._map).cast("Q")

    @staticmethod
    def create() -> int:
        fd = os.memfd_create("genba-slate", os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        return fd

    def close(self) -> None:
        self._words.release()
        self._map.close()

    # what runs

    def begin(self, place: int) -> None:
        self._words[_STATUS] = place << 8 | RUNNING

    def done(self, place: int) -> None:
        self._words[_STATUS] = place << 8 | DONE

    def status(self) -> tuple[int, int]:
        """(place, phase)"""
        word = self._words[_STATUS]
        return word >> 8, word & 0xFF

    # what should stop

    def ask_to_stop(self, place: int) -> None:
        self._words[_STOP] = place + 1

    def asked_to_stop(self) -> int | None:
        """The place of the job that should stop."""
        word = self._words[_STOP]
        return word - 1 if word else None

    def drain(self) -> None:
        self._words[_DRAIN] = 1

    def should_stop(self, place: int) -> bool:
        """Asked by running code; that it asked is noted."""
        self._words[_SEEN] = place + 1
        return self._words[_STOP] == place + 1 or self._words[_DRAIN] != 0

    def has_looked(self, place: int) -> bool:
        return self._words[_SEEN] == place + 1

    # signs of life

    def beat(self) -> None:
        self._words[_BEAT] += 1

    def beats(self) -> int:
        return self._words[_BEAT]

    def note(self, place: int, done: float, total: float, text: bytes) -> None:
        """Progress; the turn is odd while it is being written (and even after it, whatever went wrong before)."""
        turn = self._words[_TURN] | 1
        self._words[_TURN] = turn
        _NOTE.pack_into(self._map, _PROGRESS, place, done, total, len(text))
        if text:
            start = _PROGRESS + _NOTE.size
            self._map[start : start + len(text)] = text
        self._words[_TURN] = turn + 1
        self._words[_BEAT] += 1

    def noted(self) -> tuple[int, int, float, float, str] | None:
        """(turn, place, done, total, text), or None if it is just being written or never was."""
        turn = self._words[_TURN]
        if turn == 0 or turn & 1:
            return None
        place, done, total, size = _NOTE.unpack_from(self._map, _PROGRESS)
        start = _PROGRESS + _NOTE.size
        text = bytes(self._map[start : start + min(size, NOTE_LIMIT)])
        if self._words[_TURN] != turn:
            return None
        return turn, place, done, total, text.decode(errors="replace")

    # results: a ring that outlives its writer

    def put(self, result: Result) -> bool:
        """False if there is no room: send it by the socket."""
        body = _encoder.encode(result)
        head, tail = self._words[_HEAD], self._words[_TAIL]
        need = 4 + len(body)
        at = head % _RING_SIZE
        if at + need + 4 > _RING_SIZE:  # not enough up to the end: leave a mark and begin anew
            skip = _RING_SIZE - at
            if head + skip + need - tail > _RING_SIZE:
                return False
            _length.pack_into(self._map, _RING + at, _SKIP)
            head += skip
            at = 0
        elif head + need - tail > _RING_SIZE:
            return False
        start = _RING + at
        _length.pack_into(self._map, start, len(body))
        self._map[start + 4 : start + need] = body
        self._words[_HEAD] = head + need
        return True

    def take(self) -> list[list[Any]]:
        """All results that are there."""
        head, tail = self._words[_HEAD], self._words[_TAIL]
        found = []
        while tail < head:
            at = tail % _RING_SIZE
            (size,) = _length.unpack_from(self._map, _RING + at)
            if size == _SKIP:
                tail += _RING_SIZE - at
                continue
            start = _RING + at + 4
            found.append(_decoder.decode(self._map[start : start + size]))
            tail += 4 + size
        self._words[_TAIL] = tail
        return found
