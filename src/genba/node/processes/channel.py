"""The line to one worker: its socket, its tokens, its shared memory."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from genba import wire
from genba.node.decide.worker_state import WorkerView

AT_ONCE = (
    1 << 17
)  # bytes of frames that are made before they are sent: few enough that they are still in the cache


class OtherOutput:
    """What other processes of a job, and code that is not Python, have written: the beginning and the end of it."""

    ROOM = 8 << 10

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""
        self._size = 0

    def __bool__(self) -> bool:
        return self._size > 0

    def add(self, text: bytes) -> None:
        self._size += len(text)
        room = self.ROOM - len(self._head)
        self._head += text[:room]
        self._tail = (self._tail + text[room:])[-self.ROOM :]

    def after(self, log: str | None) -> str:
        """Both in one, not longer than a log may be."""
        left_out = self._size - len(self._head) - len(self._tail)
        cut = b"\n[genba: %d bytes left out]\n" % left_out if left_out else b""
        told = (self._head + cut + self._tail).decode(errors="replace").replace("\0", "\ufffd")
        if log is None:
            return told
        room = wire.LOG_END - self.ROOM
        if len(log) > 2 * room:
            log = f"{log[:room]}\n[genba: {len(log) - 2 * room} characters left out]\n{log[-room:]}"
        return f"{log}[genba: from other processes]\n{told}"


class Channel:
    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.sock, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        for end in (self.sock, self._theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._tokens, self._token_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._memory_fd = wire.SharedMemory.create()
        self.memory = wire.SharedMemory(self._memory_fd)
        self._frames = wire.Frames()
        self._unsent: deque[tuple[Any, ...]] = deque()
        self._part = memoryview(b"")  # of what is unsent, the next bytes
        self.seats: list[SeatChannel] = []
        self.answers: list[list[Any]] = []
        self.open = True
        self._news = False  # has it said anything yet?
        self.outside = -1  # what its descriptors 1 and 2 lead to, once it is ready
        self.silent = False  # nobody can write there any more
        self.overheard = False
        self._murmur = OtherOutput()

    def ends(self) -> tuple[socket.socket, int, int]:
        """What the worker gets."""
        return self._theirs, self._tokens, self._memory_fd

    def handed_over(self) -> None:
        """The worker has its ends now."""
        self._theirs.close()

    def give(self, serial: int, jobs: list[wire.JobMessage], each: bool = False) -> None:
        """Tokens first: a worker that sees the frame must find them."""
        os.write(self._token_in, wire.token(serial) * len(jobs))
        self.send((wire.FORK_PER_JOB if each else wire.BUNCH, serial, jobs))

    def ask(self, serial: int, job: wire.JobMessage, conditions: Sequence[str]) -> None:
        self.send((wire.CHECK_CONDITIONS, serial, job, conditions))

    def share(self, slots: Sequence[int]) -> list[SeatChannel]:
        """Let it run so many jobs at a time, each at a seat."""
        wire.SharedMemory.grow(self._memory_fd, len(slots))
        self.seats = [SeatChannel(slot, self, number) for number, slot in enumerate(slots)]
        self.send((wire.SHARE, len(slots)))
        return self.seats

    def unshare(self) -> None:
        self.send((wire.SHARE, 0))
        self.seats = []

    def take_back(self) -> int:
        """How many tokens the worker has not read; the jobs they stand for are ours again."""
        try:
            return len(os.read(self._tokens, 1 << 16)) // wire.TOKEN_SIZE
        except BlockingIOError:
            return 0

    def send(self, message: tuple[Any, ...]) -> None:
        self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        """As much as there is room for; the rest is made into frames when there is, and not copied before."""
        try:
            while self._part or self._unsent:
                self._part = self._part or self._next_part()
                self._part = self._part[self.sock.send(self._part) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()  # its death will be told
            self._part = memoryview(b"")

    def _next_part(self) -> memoryview:
        stream = bytearray()
        while self._unsent and len(stream) < AT_ONCE:
            wire.add_frame(stream, self._unsent.popleft())
        return memoryview(stream)

    @property
    def stuffed(self) -> bool:
        """True if something waits for room in the socket."""
        return bool(self._part or self._unsent)

    def receive(self) -> tuple[list[list[Any]], int | None]:
        """(results, pid if it has just said that it is ready)"""
        results: list[list[Any]] = []
        ready: int | None = None
        while self.open:
            whole = self._news  # a message with a descriptor comes alone, whatever is behind it
            try:
                data = self._hear()
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.open = False
                break
            for message in self._frames.feed(data):
                if message[0] == wire.RESULTS:
                    results += message[1]
                elif message[0] == wire.READY:
                    ready = message[1]
                elif message[0] == wire.CONDITIONS_CHECKED:
                    self.answers.append(message[1])
            if whole and len(data) < 1 << 18:
                break
        results = self.memory.take() + results
        self._overhear(results)
        return results, ready

    def _hear(self) -> bytes:
        if self._news:
            return self.sock.recv(1 << 18)
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, 1, socket.MSG_CMSG_CLOEXEC)
        self._news = bool(data)
        if fds:
            self.outside = fds[0]
            os.set_blocking(self.outside, False)
        return data

    def _overhear(self, results: list[list[Any]]) -> None:
        """What came from other processes of a job goes to its log: it was written before the result was."""
        for _ in range(16 if self.outside != -1 and not self.silent else 0):
            try:
                text = os.read(self.outside, 1 << 16)
            except BlockingIOError:
                break
            self.silent = not text
            if self.silent:
                break
            self._murmur.add(text)
        if self.seats:
            self._murmur = OtherOutput()  # nobody can tell which of several jobs it is from
        if results and self._murmur:
            extra = results[-1][-1] or {}
            results[-1][-1] = {**extra, "log": self._murmur.after(extra.get("log"))}
            self._murmur = OtherOutput()

    def sight(self) -> WorkerView:
        return sight(self.memory)

    def last_sight(self) -> WorkerView:
        """Of a dead worker: with what its job had written."""
        log = self.memory.log()
        return replace(self.sight(), log=self._murmur.after(log) if self._murmur else log)

    def close(self) -> None:
        self.open = False
        if self.outside != -1:
            os.close(self.outside)
            self.outside = -1
        self.sock.close()
        self._theirs.close()
        os.close(self._tokens)
        os.close(self._token_in)
        self.memory.close()
        os.close(self._memory_fd)


class SeatChannel:
    """Where one job among several of a worker runs: what it shows, and what it is told."""

    def __init__(self, slot: int, host: Channel, number: int) -> None:
        self.slot = slot
        self.host = host
        self.memory = host.memory.seat(number)
        self._number = number

    def stop(self, place: int) -> None:
        """CancelledError, in this job only."""
        self.host.send((wire.STOP, self._number, place))

    def sight(self) -> WorkerView:
        return sight(self.memory)

    def last_sight(self) -> WorkerView:
        return replace(self.sight(), log=self.memory.log())

    def close(self) -> None:
        self.memory.close()


def sight(memory: wire.SharedMemory) -> WorkerView:
    place, phase = memory.status()
    return WorkerView(
        place,
        phase,
        memory.beats(),
        memory.has_checked_stop(place),
        memory.read_progress(),
        locked=memory.locked(place),
        waits=memory.waits(place),
        started=memory.started(),
        pid=memory.pid(),
        hit=memory.was_signalled(),
    )
