"""The channels to workers.

For each a socket, a pipe of tokens, shared memory, and its jobs' other output.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from genba import wire
from genba.node.decide.worker_state import WorkerView

# Of frames that are made before they are sent: few enough that they are still in the processor's
# cache.
FRAMES_BYTES = 1 << 17
READ_BYTES = 1 << 18
OUTPUT_BYTES = 1 << 16
SOCKET_BYTES = 1 << 20


class OtherOutput:
    """The beginning and end of what a job's other processes and non-Python code have written."""

    ROOM = 8 << 10  # bytes of the beginning, and of the end

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
        """Append it to a job's log; both together are no longer than a log may be."""
        left_out = self._size - len(self._head) - len(self._tail)
        cut = b"\n[genba: %d bytes left out]\n" % left_out if left_out else b""
        text = (self._head + cut + self._tail).decode(errors="replace").replace("\0", "\ufffd")
        if log is None:
            return text
        room = wire.LOG_END - self.ROOM
        if len(log) > 2 * room:
            log = f"{log[:room]}\n[genba: {len(log) - 2 * room} characters left out]\n{log[-room:]}"
        return f"{log}[genba: from other processes]\n{text}"


class Channel:
    """The node's end of the channel to one worker."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.sock, self._worker_sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        for end in (self.sock, self._worker_sock):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._tokens, self._token_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._memory_fd = wire.SharedMemory.create()
        self.memory = wire.SharedMemory(self._memory_fd)
        self._frames = wire.Frames()
        self._unsent: deque[tuple[Any, ...]] = deque()
        self._next_bytes = memoryview(b"")  # of what is unsent
        self.seats: list[SeatChannel] = []
        self.condition_results: list[list[Any]] = []
        self.open = True
        self._first_read = False  # the worker has sent something
        self.output_fd = -1  # the worker's descriptors 1 and 2, once it is ready
        self.output_closed = False  # no process can write there any more
        self.output_watched = False
        self._output = OtherOutput()

    def worker_ends(self) -> tuple[socket.socket, int, int]:
        """Give what the worker gets: socket, read end of the tokens, shared memory."""
        return self._worker_sock, self._tokens, self._memory_fd

    def close_worker_end(self) -> None:
        """Close the worker's socket here: the worker has it now."""
        self._worker_sock.close()

    # to the worker

    def give(self, serial: int, jobs: list[wire.JobMessage], each: bool = False) -> None:
        """Send jobs; the tokens first, as a worker that reads the frame must find them."""
        os.write(self._token_in, wire.token(serial) * len(jobs))
        self.send((wire.FORK_PER_JOB if each else wire.BUNCH, serial, jobs))

    def take_back(self) -> int:
        """Read the tokens that the worker has not read.

        Gives how many: as many jobs are taken back.
        """
        try:
            return len(os.read(self._tokens, 1 << 16)) // wire.TOKEN_SIZE
        except BlockingIOError:
            return 0

    def check_conditions(
        self, serial: int, job: wire.JobMessage, conditions: Sequence[str]
    ) -> None:
        self.send((wire.CHECK_CONDITIONS, serial, job, conditions))

    def add_seats(self, slots: Sequence[int]) -> list[SeatChannel]:
        """Let the worker run several jobs at a time, each at a seat."""
        wire.SharedMemory.grow(self._memory_fd, len(slots))
        self.seats = [SeatChannel(slot, self, number) for number, slot in enumerate(slots)]
        self.send((wire.SHARE, len(slots)))
        return self.seats

    def remove_seats(self) -> None:
        self.send((wire.SHARE, 0))
        self.seats = []

    def send(self, message: tuple[Any, ...]) -> None:
        self._unsent.append(message)
        self.flush()

    def flush(self) -> None:
        """Send as much as there is room for.

        The rest is made into frames only when there is room.
        """
        try:
            while self._next_bytes or self._unsent:
                self._next_bytes = self._next_bytes or self._make_frames()
                self._next_bytes = self._next_bytes[self.sock.send(self._next_bytes) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()  # the worker is dead, and the pool will report it
            self._next_bytes = memoryview(b"")

    def _make_frames(self) -> memoryview:
        stream = bytearray()
        while self._unsent and len(stream) < FRAMES_BYTES:
            wire.add_frame(stream, self._unsent.popleft())
        return memoryview(stream)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._next_bytes or self._unsent)

    # from the worker

    def receive(self) -> tuple[list[list[Any]], int | None]:
        """Give (results, the worker's pid if it has just reported that it is ready)."""
        results: list[list[Any]] = []
        ready: int | None = None
        while self.open:
            # A read of a message with a descriptor ends there, whatever is behind it.
            whole = self._first_read
            try:
                data = self._read()
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
                    self.condition_results.append(message[1])
            if whole and len(data) < READ_BYTES:
                break
        results = self.memory.take() + results
        self._read_output(results)
        return results, ready

    def _read(self) -> bytes:
        if self._first_read:
            return self.sock.recv(READ_BYTES)
        data, fds, _, _ = socket.recv_fds(self.sock, READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        self._first_read = bool(data)
        if fds:
            self.output_fd = fds[0]
            os.set_blocking(self.output_fd, False)
        return data

    def _read_output(self, results: list[list[Any]]) -> None:
        """Add other output to the log of the job that has ended.

        It was written before the result.
        """
        for _ in range(16 if self.output_fd != -1 and not self.output_closed else 0):
            try:
                text = os.read(self.output_fd, OUTPUT_BYTES)
            except BlockingIOError:
                break
            self.output_closed = not text
            if self.output_closed:
                break
            self._output.add(text)
        if self.seats:
            self._output = OtherOutput()  # it could be of any of several jobs
        if results and self._output:
            extra = results[-1][-1] or {}
            results[-1][-1] = {**extra, "log": self._output.after(extra.get("log"))}
            self._output = OtherOutput()

    def view(self) -> WorkerView:
        return view_of(self.memory)

    def last_view(self) -> WorkerView:
        """Give the view of a dead worker, with the log of its job."""
        log = self.memory.log()
        return replace(self.view(), log=self._output.after(log) if self._output else log)

    def close(self) -> None:
        self.open = False
        if self.output_fd != -1:
            os.close(self.output_fd)
            self.output_fd = -1
        self.sock.close()
        self._worker_sock.close()
        os.close(self._tokens)
        os.close(self._token_in)
        self.memory.close()
        os.close(self._memory_fd)


class SeatChannel:
    """The channel to one seat of a shared worker.

    Shared memory of its own, and its worker's socket.
    """

    def __init__(self, slot: int, worker: Channel, number: int) -> None:
        self.slot = slot
        self.worker = worker
        self.memory = worker.memory.seat(number)
        self._number = number

    def stop(self, place: int) -> None:
        """Raise CancelledError in this job only."""
        self.worker.send((wire.STOP, self._number, place))

    def view(self) -> WorkerView:
        return view_of(self.memory)

    def last_view(self) -> WorkerView:
        return replace(self.view(), log=self.memory.log())

    def close(self) -> None:
        self.memory.close()


def view_of(memory: wire.SharedMemory) -> WorkerView:
    place, phase = memory.status()
    return WorkerView(
        place,
        phase,
        memory.beats(),
        memory.has_checked_stop(place),
        memory.read_progress(),
        locked=memory.locked(place),
        waits=memory.waits(place),
        awaited=memory.awaited() if memory.waits(place) else (),
        started=memory.started(),
        pid=memory.pid(),
        signalled=memory.was_signalled(),
    )


class Channels:
    """All channels of a node by slot, registered in its selector."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._channels: dict[int, Channel] = {}
        self._seats: dict[int, SeatChannel] = {}
        self._watched: dict[int, int] = {}  # by slot: the events that its socket is watched for

    def open(self, slot: int) -> Channel:
        channel = self._channels[slot] = Channel(slot)
        self.watch(channel)
        return channel

    def get(self, slot: int) -> Channel | None:
        return self._channels.get(slot)

    def has(self, slot: int) -> bool:
        return slot in self._channels

    def all(self) -> list[Channel]:
        return list(self._channels.values())

    def _with_seats(self) -> list[tuple[int, Channel | SeatChannel]]:
        return [*self._channels.items(), *self._seats.items()]

    def _memory(self, slot: int) -> wire.SharedMemory:
        return (self._seats.get(slot) or self._channels[slot]).memory

    def views(self) -> dict[int, WorkerView]:
        return {slot: channel.view() for slot, channel in self._with_seats()}

    def last_views(self) -> dict[int, WorkerView]:
        return {slot: channel.last_view() for slot, channel in self._with_seats()}

    # to workers

    def give(self, slot: int, serial: int, jobs: list[wire.JobMessage], each: bool = False) -> None:
        channel = self._channels[slot]
        channel.give(serial, jobs, each)
        self.watch(channel)

    def take_back(self, slot: int) -> int:
        """Give how many tokens the worker had not read."""
        return self._channels[slot].take_back()

    def check_conditions(
        self, slot: int, serial: int, job: wire.JobMessage, conditions: Sequence[str]
    ) -> None:
        channel = self._channels[slot]
        channel.check_conditions(serial, job, conditions)
        self.watch(channel)

    def set_seats(self, slot: int, seats: Sequence[int]) -> None:
        channel = self._channels[slot]
        if seats:
            self._seats.update({seat.slot: seat for seat in channel.add_seats(seats)})
        else:
            self._close_seats(channel)
            channel.remove_seats()
        self.watch(channel)

    def stop_seat(self, slot: int, place: int) -> None:
        seat = self._seats[slot]
        seat.stop(place)
        self.watch(seat.worker)

    def request_stop(self, slot: int, place: int) -> None:
        self._memory(slot).ask_to_stop(place)

    def request_stop_of_all(self) -> None:
        for _, channel in self._with_seats():
            channel.memory.drain()

    def suggest_stop(self, slot: int, place: int) -> None:
        self._memory(slot).request_stop(place)

    def kill_job_process(self, slot: int, place: int) -> None:
        self._channels[slot].memory.mark_for_kill(place)

    def refuse_wait(self, slot: int, place: int) -> None:
        self._memory(slot).refuse(place)

    def dismiss(self, slot: int) -> None:
        channel = self._channels[slot]
        channel.send((wire.EXIT,))
        self.watch(channel)

    def drop(self, slot: int) -> None:
        channel = self._channels.pop(slot, None)
        if channel is not None:
            if slot in self._watched:
                self._selector.unregister(channel.sock)
                self._watched.pop(slot)
            self._watch_output(channel, wanted=False)
            self._close_seats(channel)
            channel.close()

    def close(self) -> None:
        """Close all; the selector is closed with them."""
        for channel in self._channels.values():
            channel.close()

    def _close_seats(self, channel: Channel) -> None:
        for seat in channel.seats:
            del self._seats[seat.slot]
            seat.close()

    # the selector

    def watch(self, channel: Channel) -> None:
        """Register a channel for what it can still do."""
        self._watch_output(channel, wanted=not channel.output_closed)
        slot = channel.slot
        if not channel.open:
            if slot in self._watched:
                self._selector.unregister(channel.sock)
                self._watched.pop(slot)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
        if self._watched.get(slot) != events:
            if slot in self._watched:
                self._selector.modify(channel.sock, events, channel)
            else:
                self._selector.register(channel.sock, events, channel)
            self._watched[slot] = events

    def _watch_output(self, channel: Channel, *, wanted: bool) -> None:
        if channel.output_fd == -1 or wanted == channel.output_watched:
            return
        channel.output_watched = wanted
        if wanted:
            self._selector.register(channel.output_fd, selectors.EVENT_READ, channel)
        else:
            self._selector.unregister(channel.output_fd)
