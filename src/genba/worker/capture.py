"""What a job prints and logs goes into the shared memory: it costs no system call, and outlives the process."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import Any, Protocol, TextIO

from genba.wire import LOG_END, SharedMemory

_LONGEST = 2 * LOG_END  # of one text: what is longer is cut before it costs anything


class Sink(Protocol):
    def write(self, text: bytes) -> None: ...


class Capture:
    """One worker's log; between jobs, what is printed goes where it always went."""

    def __init__(self, memory: SharedMemory) -> None:
        self.on = False
        self.sink: Sink = memory
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # whoever held it is not here

    def install(self) -> int:
        """Take the place of stdout and stderr, also in the logging that the app has set up.

        What no Python stream sees, such as the output of other programs, goes into a pipe; gives its other end, for
        the node: whoever wrote may be dead when it is read, or hold the interpreter's lock while it is full.
        """
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = Stream(self, out, 1), Stream(self, err, 2)
        for reference in list(logging._handlerList):  # type: ignore[attr-defined]
            handler = reference()
            if isinstance(handler, logging.StreamHandler) and handler.stream in (out, err):
                handler.setStream(sys.stdout if handler.stream is out else sys.stderr)
        read, write = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # a larger one is a favour
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 18)
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(write)
        return read

    def write(self, text: str) -> None:
        if len(text) > 2 * _LONGEST:
            left_out = len(text) - 2 * _LONGEST
            text = f"{text[:_LONGEST]}\n[genba: {left_out} characters left out]\n{text[-_LONGEST:]}"
        self.write_bytes(text.encode(errors="replace"))

    def write_bytes(self, text: bytes) -> None:
        with self._lock:
            self.sink.write(text)


class Outside:
    """Where a standard stream led before; most workers never write there, so it is opened by the first who does."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._stream: TextIO | None = None

    @property
    def stream(self) -> TextIO:
        if self._stream is None:
            self._stream = os.fdopen(self._fd, "w", buffering=1, encoding="utf-8", errors="replace")
        return self._stream

    def flush(self) -> None:
        if (
            self._stream is not None and not self._stream.closed
        ):  # at the end of all, it may be gone before us
            self._stream.flush()


class Stream(io.TextIOBase):
    """Stands for one of the two standard streams."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, capture: Capture, before: TextIO, fd: int) -> None:
        before.flush()
        self._capture = capture
        self.outside = Outside(os.dup(fd))
        self._fd = fd
        self.buffer = _Bytes(capture, self.outside, fd)

    def write(self, text: str) -> int:
        if self._capture.on:
            self._capture.write(text)
            return len(text)
        return self.outside.stream.write(text)

    def flush(self) -> None:
        if not self._capture.on:
            self.outside.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd  # for the children of a job


class _Bytes(io.RawIOBase):
    def __init__(self, capture: Capture, outside: Outside, fd: int) -> None:
        self._capture = capture
        self._outside = outside
        self._fd = fd

    def write(self, text: Any) -> int:
        given = bytes(text)
        if self._capture.on:
            self._capture.write_bytes(given)
        else:
            self._outside.stream.buffer.write(given)
        return len(given)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd
