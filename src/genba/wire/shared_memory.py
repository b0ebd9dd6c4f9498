"""The shared memory of one worker: what must be seen although node or worker is busy or dead.

It has the job that runs, whether it should stop, its progress, and the results that the node has not read yet.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

import msgspec

from genba.wire.frames import BareResult

IDLE, RUNNING, DONE = range(3)  # phases of the status word

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()

# words of the shared memory, eight bytes each, written in one store
_STATUS, _STOP, _DRAIN, _SEEN, _BEAT, _HEAD, _TAIL, _TURN = range(8)
_PROGRESS = 64
_NOTE = struct.Struct("<QddI")
NOTE_LIMIT = 4000
_RING = 8192
_RING_SIZE = 1 << 17
_LOW = 0xFFFFFFFF
_NOTHING, _ARRAY = (
    b"\xc0",
    b"\xdd",
)  # of msgpack: nil, and the head of an array with a length of four bytes
_LOGGED = 4096 // 8  # words of another page: how many bytes the job has written,
_WAITING, _REFUSED = (
    _LOGGED + 2,
    _LOGGED + 3,
)  # ... the job that waits for others, and that it must not
_LOCKED = _LOGGED + 1
_STARTED, _PID, _DOOMED, _HIT = range(_LOGGED + 4, _LOGGED + 8)
_LOG = _RING + _RING_SIZE
LOG_END = (
    1 << 15
)  # of what a job writes, so much from the beginning and so much from the end is kept
SHARED_MEMORY_SIZE = _LOG + 2 * LOG_END


class SharedMemory:
    """The shared memory of one worker, from either side."""

    def __init__(self, fd: int, at: int = 0) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, SHARED_MEMORY_SIZE, offset=at * SHARED_MEMORY_SIZE)
        self._words = memoryview(self._map).cast("Q")
        head = self._words[_HEAD]
        self._head = (
            head & _LOW,
            head >> 32,
        )  # of the ring, if it is we who write: bytes, and results

    @staticmethod
    def create() -> int:
        fd = os.memfd_create("genba-slate", os.MFD_CLOEXEC)
        os.ftruncate(fd, SHARED_MEMORY_SIZE)
        return fd

    @staticmethod
    def grow(fd: int, seats: int) -> None:
        """For so many jobs at a time; it never gets smaller."""
        os.ftruncate(fd, max(os.fstat(fd).st_size, SHARED_MEMORY_SIZE * (seats + 1)))

    def seat(self, number: int) -> SharedMemory:
        """That of one job among several."""
        return SharedMemory(self._fd, number + 1)

    def close(self) -> None:
        self._words.release()
        self._map.close()

    # what runs

    def begin(self, place: int, started: int = 0) -> None:
        """`started`: micros by this machine's clock; there before the job is said to run."""
        self._words[_STARTED] = started
        self._words[_STATUS] = place << 8 | RUNNING

    def started(self) -> int:
        return self._words[_STARTED]

    def set_job_pid(self, pid: int) -> None:
        """From now on jobs run in that process, and not in the worker itself."""
        self._words[_PID] = pid

    def pid(self) -> int:
        """0: that of the worker."""
        return self._words[_PID]

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

    def doom(self, place: int) -> None:
        """The next signal is the death of this job, which has a process of its own."""
        self._words[_DOOMED] = place + 1

    def marked_for_kill(self) -> int | None:
        word = self._words[_DOOMED]
        return word - 1 if word else None

    def mark_signalled(self) -> None:
        """Somebody else than the node has told this worker to go."""
        self._words[_HIT] = 1

    def was_signalled(self) -> bool:
        return self._words[_HIT] != 0

    def drain(self) -> None:
        self._words[_DRAIN] = 1

    def bow_out(self, place: int) -> None:
        """Let this job come to an end by itself; whoever drains is told so already."""
        if self._words[_DRAIN] != 1:
            self._words[_DRAIN] = place + 2

    def should_stop(self, place: int) -> bool:
        """Asked by running code; that it asked is noted."""
        self._words[_SEEN] = place + 1
        return self._words[_STOP] == place + 1 or self._words[_DRAIN] in (1, place + 2)

    def has_checked_stop(self, place: int) -> bool:
        return self._words[_SEEN] == place + 1

    # what it holds

    def lock(self, place: int) -> None:
        """The job is about to take a lock; whether it has it, and still has it, the database knows."""
        self._words[_LOCKED] = place + 1

    def locked(self, place: int) -> bool:
        return self._words[_LOCKED] == place + 1

    # what waits for other jobs

    def wait(self, place: int | None) -> None:
        """It needs its worker and not its slot, until None is said."""
        self._words[_WAITING] = 0 if place is None else place + 1

    def waits(self, place: int) -> bool:
        return self._words[_WAITING] == place + 1

    def refuse(self, place: int) -> None:
        """There is no slot to lend any more."""
        self._words[_REFUSED] = place + 1

    def refused(self, place: int) -> bool:
        return self._words[_REFUSED] == place + 1

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

    # what the job writes: it outlives its writer, too

    def write(self, text: bytes) -> None:
        at = self._words[_LOGGED]
        self._words[_LOGGED] = at + len(text)
        if at < LOG_END:
            head = text[: LOG_END - at]
            self._map[_LOG + at : _LOG + at + len(head)] = head
            text = text[len(head) :]
            at = LOG_END
        skipped = len(text) - LOG_END
        if skipped > 0:
            text, at = text[skipped:], at + skipped
        while text:
            start = (at - LOG_END) % LOG_END
            part = text[: LOG_END - start]
            base = _LOG + LOG_END + start
            self._map[base : base + len(part)] = part
            text, at = text[len(part) :], at + len(part)

    def logged(self) -> int:
        """How many bytes the job has written."""
        return self._words[_LOGGED]

    def log(self) -> str | None:
        """What the job has written; of a long text the beginning and the end."""
        size = self._words[_LOGGED]
        if not size:
            return None
        middle, end = _LOG + LOG_END, _LOG + 2 * LOG_END
        text = self._map[_LOG : _LOG + min(size, LOG_END)]
        if size <= 2 * LOG_END:
            text += self._map[middle : middle + max(0, size - LOG_END)]
        else:
            turn = middle + size % LOG_END
            left_out = size - 2 * LOG_END
            text += (
                b"\n[genba: %d bytes left out]\n" % left_out
                + self._map[turn:end]
                + self._map[middle:turn]
            )
        return text.decode(errors="replace").replace("\0", "\ufffd")

    def forget_log(self) -> None:
        self._words[_LOGGED] = 0

    # results: a ring that outlives its writer, one after the other, so that all that is there can be read at once

    def put(self, result: BareResult) -> bool:
        """False if there is no room: send it by the socket."""
        body = _encoder.encode(result)
        size = len(body)
        head, count = self._head
        room = _RING_SIZE - (head - self._words[_TAIL] & _LOW)
        at = head & _RING_SIZE - 1
        if (
            at + size > _RING_SIZE
        ):  # not enough up to the end: fill that with nothings, and begin anew
            skip = _RING_SIZE - at
            if skip + size > room:
                return False
            self._map[_RING + at : _LOG] = _NOTHING * skip
            head, count, at = head + skip, count + skip, 0
        elif size > room:
            return False
        self._map[_RING + at : _RING + at + size] = body
        head, count = self._head = head + size & _LOW, count + 1 & _LOW
        self._words[_HEAD] = count << 32 | head  # in one store: whoever dies leaves both or none
        return True

    def take(self) -> list[list[Any]]:
        """All results that are there."""
        head, tail = self._words[_HEAD], self._words[_TAIL]
        if head == tail:
            return []
        size, count = head - tail & _LOW, (head >> 32) - (tail >> 32) & _LOW
        start = _RING + tail % _RING_SIZE
        data, beyond = self._map[start : min(start + size, _LOG)], start + size - _LOG
        if beyond > 0:
            data += self._map[_RING : _RING + beyond]
        found: list[Any] = _decoder.decode(_ARRAY + count.to_bytes(4) + data)
        self._words[_TAIL] = head
        return found if beyond <= 0 else [each for each in found if each is not None]
