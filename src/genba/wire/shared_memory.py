"""The shared memory of one worker: what node and worker must see even if the other is busy or dead.

It holds the running job, whether it should stop, its progress, its log, and the results that the
node has not read yet.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from genba.wire.frames import BareResult

IDLE, RUNNING, DONE = range(3)  # phases of the status word

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()

# The layout, in bytes: words of the first page, progress, words of the second page, ring, log.
_PROGRESS_AT = 64
_SECOND_PAGE_AT = 4096
_RING_AT = 8192
_RING_SIZE = 1 << 17
_LOG_AT = _RING_AT + _RING_SIZE
LOG_END = 1 << 15  # bytes of a job's output that are kept from its beginning, and from its end
SHARED_MEMORY_SIZE = _LOG_AT + 2 * LOG_END

# Words are eight bytes each, and written in one store.
_STATUS, _STOP, _DRAIN, _STOP_CHECKED, _BEAT, _HEAD, _TAIL, _PROGRESS_VERSION = range(8)
(
    _LOGGED_BYTES,
    _LOCKED,
    _WAITING,
    _WAIT_REFUSED,
    _STARTED,
    _JOB_PID,
    _MARKED_FOR_KILL,
    _SIGNALLED,
    _AWAITED,  # how many; their ids are in the words after it
) = range(_SECOND_PAGE_AT // 8, _SECOND_PAGE_AT // 8 + 9)
MOST_AWAITED = 64  # jobs that are named; a job may wait for more

_PROGRESS = struct.Struct("<QddI")  # place, done, total, bytes of the note
NOTE_LIMIT = 4000  # bytes of the note
_LOW_HALF = 0xFFFFFFFF  # of the head and tail words: bytes; the high half counts results
_NIL = b"\xc0"  # of msgpack
_ARRAY_HEAD = b"\xdd"  # of msgpack, before a length of four bytes


class SharedMemory:
    """The shared memory of one worker, from either side."""

    def __init__(self, fd: int, at: int = 0) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, SHARED_MEMORY_SIZE, offset=at * SHARED_MEMORY_SIZE)
        self._words = memoryview(self._map).cast("Q")
        head = self._words[_HEAD]
        # The writer's own copy of the head of the ring: (bytes, results).
        self._head = head & _LOW_HALF, head >> 32

    @staticmethod
    def create() -> int:
        fd = os.memfd_create("genba-shared-memory", os.MFD_CLOEXEC)
        os.ftruncate(fd, SHARED_MEMORY_SIZE)
        return fd

    @staticmethod
    def grow(fd: int, seats: int) -> None:
        """Make room for the seats of a shared worker; the file never shrinks."""
        os.ftruncate(fd, max(os.fstat(fd).st_size, SHARED_MEMORY_SIZE * (seats + 1)))

    def seat(self, number: int) -> SharedMemory:
        """Return the part that belongs to one seat of a shared worker."""
        return SharedMemory(self._fd, number + 1)

    def close(self) -> None:
        self._words.release()
        self._map.close()

    # The running job

    def begin(self, place: int, started: int = 0) -> None:
        """Set the running job; `started` is in µs by this machine's clock, and written first."""
        self._words[_STARTED] = started
        self._words[_STATUS] = place << 8 | RUNNING

    def started(self) -> int:
        return self._words[_STARTED]

    def set_job_pid(self, pid: int) -> None:
        """Set the process that runs the job, if it is not the worker itself; 0 if it is."""
        self._words[_JOB_PID] = pid

    def pid(self) -> int:
        """Return the process that runs the job; 0 means the worker itself."""
        return self._words[_JOB_PID]

    def done(self, place: int) -> None:
        self._words[_STATUS] = place << 8 | DONE

    def status(self) -> tuple[int, int]:
        """Return (place, phase)."""
        word = self._words[_STATUS]
        return word >> 8, word & 0xFF

    # Stop requests

    def ask_to_stop(self, place: int) -> None:
        self._words[_STOP] = place + 1

    def asked_to_stop(self) -> int | None:
        """Return the place of the job that should stop, or None."""
        word = self._words[_STOP]
        return word - 1 if word else None

    def mark_for_kill(self, place: int) -> None:
        """Have the worker answer its next signal by killing the process of this job."""
        self._words[_MARKED_FOR_KILL] = place + 1

    def marked_for_kill(self) -> int | None:
        word = self._words[_MARKED_FOR_KILL]
        return word - 1 if word else None

    def mark_signalled(self) -> None:
        """Record that the worker was signalled by a process that is not its node."""
        self._words[_SIGNALLED] = 1

    def was_signalled(self) -> bool:
        return self._words[_SIGNALLED] != 0

    def drain(self) -> None:
        """Request all jobs of this worker to stop, without a signal."""
        self._words[_DRAIN] = 1

    def request_stop(self, place: int) -> None:
        """Request this job to stop, without a signal; a drain has requested it already."""
        if self._words[_DRAIN] != 1:
            self._words[_DRAIN] = place + 2

    def should_stop(self, place: int) -> bool:
        """Return whether the running code should stop, and record that it has checked."""
        self._words[_STOP_CHECKED] = place + 1
        return self._words[_STOP] == place + 1 or self._words[_DRAIN] in (1, place + 2)

    def has_checked_stop(self, place: int) -> bool:
        return self._words[_STOP_CHECKED] == place + 1

    # Locks

    def lock(self, place: int) -> None:
        """Record that the job is about to take a lock; the database knows whether it has it."""
        self._words[_LOCKED] = place + 1

    def locked(self, place: int) -> bool:
        return self._words[_LOCKED] == place + 1

    # Waiting for other jobs

    def wait(self, place: int | None) -> None:
        """Record that the job waits for others and lends its slot; None: it waits no longer."""
        self._words[_WAITING] = 0 if place is None else place + 1

    def waits(self, place: int) -> bool:
        return self._words[_WAITING] == place + 1

    def write_awaited(self, ids: Iterable[int]) -> None:
        """Name the jobs that the job waits for, as many as there is room for."""
        named = list(islice(ids, MOST_AWAITED))
        self._words[_AWAITED] = 0
        for index, id in enumerate(named, _AWAITED + 1):
            self._words[index] = id
        self._words[_AWAITED] = len(named)

    def awaited(self) -> tuple[int, ...]:
        count = min(self._words[_AWAITED], MOST_AWAITED)
        return tuple(self._words[_AWAITED + 1 : _AWAITED + 1 + count])

    def allow_wait(self) -> None:
        """Take back a refusal: another wait begins."""
        self._words[_WAIT_REFUSED] = 0

    def refuse(self, place: int) -> None:
        """Tell the job that waits that none of the jobs it waits for could ever run."""
        self._words[_WAIT_REFUSED] = place + 1

    def refused(self, place: int) -> bool:
        return self._words[_WAIT_REFUSED] == place + 1

    # Heartbeat and progress

    def beat(self) -> None:
        self._words[_BEAT] += 1

    def beats(self) -> int:
        return self._words[_BEAT]

    def write_progress(self, place: int, done: float, total: float, note: bytes) -> None:
        """Write the progress of the job.

        The version is odd during the write, and even after it, also if an earlier write failed.
        """
        version = self._words[_PROGRESS_VERSION] | 1
        self._words[_PROGRESS_VERSION] = version
        _PROGRESS.pack_into(self._map, _PROGRESS_AT, place, done, total, len(note))
        if note:
            start = _PROGRESS_AT + _PROGRESS.size
            self._map[start : start + len(note)] = note
        self._words[_PROGRESS_VERSION] = version + 1
        self._words[_BEAT] += 1

    def read_progress(self) -> tuple[int, int, float, float, str] | None:
        """Return (version, place, done, total, note); None during a write, or before the first."""
        version = self._words[_PROGRESS_VERSION]
        if version == 0 or version & 1:
            return None
        place, done, total, size = _PROGRESS.unpack_from(self._map, _PROGRESS_AT)
        start = _PROGRESS_AT + _PROGRESS.size
        note = bytes(self._map[start : start + min(size, NOTE_LIMIT)])
        if self._words[_PROGRESS_VERSION] != version:
            return None
        return version, place, done, total, note.decode(errors="replace")

    # The log of the job, which the node can read after the death of the worker

    def write(self, text: bytes) -> None:
        """Append to the log: first to its beginning, then to a ring for its end."""
        at = self._words[_LOGGED_BYTES]
        self._words[_LOGGED_BYTES] = at + len(text)
        if at < LOG_END:
            head = text[: LOG_END - at]
            self._map[_LOG_AT + at : _LOG_AT + at + len(head)] = head
            text = text[len(head) :]
            at = LOG_END
        skipped = len(text) - LOG_END
        if skipped > 0:
            text, at = text[skipped:], at + skipped
        while text:
            start = (at - LOG_END) % LOG_END
            part = text[: LOG_END - start]
            base = _LOG_AT + LOG_END + start
            self._map[base : base + len(part)] = part
            text, at = text[len(part) :], at + len(part)

    def logged(self) -> int:
        """Return how many bytes the job has written."""
        return self._words[_LOGGED_BYTES]

    def log(self) -> str | None:
        """Return what the job has written; of a long text the beginning and the end."""
        size = self._words[_LOGGED_BYTES]
        if not size:
            return None
        middle, end = _LOG_AT + LOG_END, _LOG_AT + 2 * LOG_END
        text = self._map[_LOG_AT : _LOG_AT + min(size, LOG_END)]
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
        self._words[_LOGGED_BYTES] = 0

    # Results: a ring of msgpack values, one after the other, so that one call decodes all of them

    def put(self, result: BareResult) -> bool:
        """Write a result; False if there is no room, and it must go by the socket."""
        body = _encoder.encode(result)
        size = len(body)
        head, count = self._head
        room = _RING_SIZE - (head - self._words[_TAIL] & _LOW_HALF)
        at = head & _RING_SIZE - 1
        if at + size > _RING_SIZE:
            # There is not enough space up to the end: fill it with nils, and begin at the start.
            skip = _RING_SIZE - at
            if skip + size > room:
                return False
            self._map[_RING_AT + at : _LOG_AT] = _NIL * skip
            head, count, at = head + skip, count + skip, 0
        elif size > room:
            return False
        self._map[_RING_AT + at : _RING_AT + at + size] = body
        head, count = self._head = head + size & _LOW_HALF, count + 1 & _LOW_HALF
        # Both numbers in one store: a worker that dies leaves both or none.
        self._words[_HEAD] = count << 32 | head
        return True

    def take(self) -> list[list[Any]]:
        """Take all results out of the ring."""
        head, tail = self._words[_HEAD], self._words[_TAIL]
        if head == tail:
            return []
        size, count = head - tail & _LOW_HALF, (head >> 32) - (tail >> 32) & _LOW_HALF
        start = _RING_AT + tail % _RING_SIZE
        data, beyond = self._map[start : min(start + size, _LOG_AT)], start + size - _LOG_AT
        if beyond > 0:
            data += self._map[_RING_AT : _RING_AT + beyond]
        results: list[Any] = _decoder.decode(_ARRAY_HEAD + count.to_bytes(4) + data)
        self._words[_TAIL] = head
        return results if beyond <= 0 else [result for result in results if result is not None]
