"""Sends what a job prints and logs to the shared memory.

That costs no system call, and the node can read it after the death of the process.
"""

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

_LONGEST = 2 * LOG_END  # bytes; a longer text is cut before it is encoded


class Sink(Protocol):
    def write(self, text: bytes) -> None: ...


class Capture:
    """The output of one worker: to the log while `on`, otherwise where it went before."""

    def __init__(self, memory: SharedMemory) -> None:
        self.on = False
        self.sink: Sink = memory
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # the thread that held it is not in the child

    def install(self) -> int:
        """Replace stdout and stderr, also in the logging handlers of the app.

        Output that no Python stream sees, such as that of other programs, goes into a pipe, whose
        other end is returned for the node.  This process could not read it: it may be dead by then,
        or the writer holds the interpreter's lock while the pipe is full.
        """
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = Stream(self, out, 1), Stream(self, err, 2)
        for reference in list(logging._handlerList):  # type: ignore[attr-defined]
            handler = reference()
            if isinstance(handler, logging.StreamHandler) and handler.stream in (out, err):
                handler.setStream(sys.stdout if handler.stream is out else sys.stderr)
        read, write = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # the larger size may be refused; then the default has to do
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
    """Where a standard stream led before; opened by the first write, if any."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._stream: TextIO | None = None

    @property
    def stream(self) -> TextIO:
        if self._stream is None:
            self._stream = os.fdopen(self._fd, "w", buffering=1, encoding="utf-8", errors="replace")
        return self._stream

    def flush(self) -> None:
        # At interpreter exit the stream may be closed before this one.
        if self._stream is not None and not self._stream.closed:
            self._stream.flush()


class Stream(io.TextIOBase):
    """Replaces one of the two standard streams."""

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
        data = bytes(text)
        if self._capture.on:
            self._capture.write_bytes(data)
        else:
            self._outside.stream.buffer.write(data)
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd
