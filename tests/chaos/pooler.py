"""A pooler in transaction mode, as PgBouncer is one: a server's session is lent for one transaction at a time.

Harder than most: after each transaction the session forgets everything, and the next one is any of those that are free.
"""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

_REFUSED = {80877103, 80877104}  # SSL, GSS encryption
_CANCEL = 80877102
_length = struct.Struct("!I")


class Stream:
    """A socket of the protocol, message by message."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._read = b""

    def messages(self) -> Iterator[bytes]:
        """Those that are complete, type and length included; EOFError when the other side is gone."""
        data = self.end.recv(1 << 16)
        if not data:
            raise EOFError
        self._read += data
        while len(self._read) >= 5 and len(self._read) > (
            size := _length.unpack_from(self._read, 1)[0]
        ):
            message, self._read = self._read[: size + 1], self._read[size + 1 :]
            yield message

    def until_ready(self) -> bytes:
        """All up to ReadyForQuery."""
        got = b""
        while True:
            for message in self.messages():
                got += message
                if message[:1] == b"Z":
                    return got


class Pooler:
    def __init__(
        self, url: str, sessions: int = 3, *, strict: bool = True, said: bool = True
    ) -> None:
        """`strict`: it refuses our session settings, as PgBouncer does; else it ignores them."""
        parts = urlsplit(url)
        asked = parse_qs(parts.query)
        self._target = f"{asked['host'][0]}/.s.PGSQL.{asked.get('port', ['5432'])[0]}"
        self._database = parts.path[1:]
        self._strict = strict
        self._random = random.Random(1)
        self._free: list[Stream] = []
        self._freed = threading.Condition()
        self.lent = 0
        self.greeting = b""
        for _ in range(sessions):
            self._free.append(self._session())
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.url = (
            f"postgresql://postgres@127.0.0.1:{port}/{self._database}"
            + "?pooler=transaction" * said
        )
        threading.Thread(target=self._run, name="pooler", daemon=True).start()

    def _session(self) -> Stream:
        end = socket.socket(socket.AF_UNIX)
        end.connect(self._target)
        reply = (
            b"user\0postgres\0database\0" + self._database.encode() + b"\0client_encoding\0UTF8\0\0"
        )
        end.sendall(_length.pack(len(reply) + 8) + _length.pack(196608) + reply)
        session = Stream(end)
        self.greeting = session.until_ready()
        return session

    def _run(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                threading.Thread(
                    target=self._serve, args=(client,), name="pooler client", daemon=True
                ).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(EOFError, OSError):
            if self._greet(client):
                Lending(self, Stream(client)).run()

    def _greet(self, client: socket.socket) -> bool:
        while True:
            size, code = struct.unpack("!II", _exactly(client, 8))
            words = _exactly(client, size - 8).split(b"\0")
            if code in _REFUSED:
                client.sendall(b"N")
            elif code == _CANCEL:
                return False
            elif self._strict and b"options" in words[::2]:
                reply = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
                client.sendall(b"E" + _length.pack(len(reply) + 4) + reply)
                return False
            else:
                client.sendall(self.greeting)
                return True

    def lend(self) -> Stream:
        with self._freed:
            self._freed.wait_for(lambda: self._free)
            self.lent += 1
            return self._free.pop(self._random.randrange(len(self._free)))

    def take_back(self, session: Stream, clean: bool) -> None:
        """It forgets what its user has set, prepared and listened to; one in the middle of something ends."""
        if clean:
            ask = b"DISCARD ALL\0"
            session.end.sendall(b"Q" + _length.pack(len(ask) + 4) + ask)
            session.until_ready()
        else:
            session.end.close()
            session = self._session()
        with self._freed:
            self._free.append(session)
            self._freed.notify()

    def close(self) -> None:
        """Accept no new connections."""
        self._listening.close()

    def end(self) -> None:
        """With its sessions that are free."""
        self.close()
        with self._freed:
            while self._free:
                self._free.pop().end.close()


class Lending:
    """One client, and the session that it has for as long as its transaction lasts."""

    def __init__(self, pooler: Pooler, client: Stream) -> None:
        self._pooler, self._client = pooler, client
        self._session: Stream | None = None
        self._open = 0  # questions without an answer

    def run(self) -> None:
        try:
            while True:
                ends = [self._client.end, *([self._session.end] if self._session else [])]
                for end in select.select(ends, [], [])[0]:
                    if end is self._client.end:
                        self._ask()
                    elif self._session is not None and end is self._session.end:
                        self._answer(self._session)
        finally:
            if self._session is not None:
                self._pooler.take_back(self._session, clean=False)

    def _ask(self) -> None:
        for message in self._client.messages():
            if message[:1] == b"X":
                raise EOFError
            if self._session is None:
                self._session = self._pooler.lend()
            self._open += message[:1] in (b"Q", b"S")
            self._session.end.sendall(message)

    def _answer(self, session: Stream) -> None:
        for message in session.messages():
            over = False
            if message[:1] == b"Z":
                self._open -= 1
                over = self._open == 0 and message[5:6] == b"I"
            if over:  # before the client hears of it: it may ask at once, and must get another
                self._session = None
                self._pooler.take_back(session, clean=True)
            self._client.end.sendall(message)
            if over:  # what the session says from now on is for another client
                return


def _exactly(end: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        data = end.recv(size - len(got))
        if not data:
            raise EOFError
        got += data
    return got
