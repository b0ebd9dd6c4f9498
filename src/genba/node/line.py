"""The line to one worker: its socket, its tokens, its shared memory."""

from __future__ import annotations

import os
import socket
from typing import Any

from genba import wire
from genba.node.hands import Sight


class Line:
    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.sock, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        for end in (self.sock, self._theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._tokens, self._token_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._slate_fd = wire.Slate.create()
        self.slate = wire.Slate(self._slate_fd)
        self._frames = wire.Frames()
        self._unsent = bytearray()
        self.open = True

    def ends(self) -> tuple[socket.socket, int, int]:
        """What the worker gets."""
        return self._theirs, self._tokens, self._slate_fd

    def handed_over(self) -> None:
        """The worker has its ends now."""
        self._theirs.close()

    def give(self, serial: int, jobs: list[wire.Job]) -> None:
        """Tokens first: a worker that sees the frame must find them."""
        os.write(self._token_in, wire.token(serial) * len(jobs))
        self.send((wire.BUNCH, serial, jobs))

    def take_back(self) -> int:
        """How many tokens the worker has not read; the jobs they stand for are ours again."""
        try:
            return len(os.read(self._tokens, 1 << 16)) // wire.TOKEN_SIZE
        except BlockingIOError:
            return 0

    def send(self, message: tuple[Any, ...]) -> None:
        self._unsent += wire.frame(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()  # its death will be told

    @property
    def stuffed(self) -> bool:
        """True if something waits for room in the socket."""
        return bool(self._unsent)

    def receive(self) -> tuple[list[list[Any]], int | None]:
        """(results, pid if it has just said that it is ready)"""
        results: list[list[Any]] = []
        ready: int | None = None
        while self.open:
            try:
                data = self.sock.recv(1 << 18)
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
            if len(data) < 1 << 18:
                break
        return self.slate.take() + results, ready

    def sight(self) -> Sight:
        place, phase = self.slate.status()
        looked = self.slate.has_looked(place)
        return Sight(place, phase, self.slate.beats(), looked, self.slate.noted())

    def close(self) -> None:
        self.open = False
        self.sock.close()
        self._theirs.close()
        os.close(self._tokens)
        os.close(self._token_in)
        self.slate.close()
        os.close(self._slate_fd)
