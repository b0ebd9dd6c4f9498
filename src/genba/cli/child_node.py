"""A node on a temporary database, for `genba demo` and `genba bench`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from genba.errors import GenbaError

if TYPE_CHECKING:
    import psutil

    from genba.client.app import Genba

_END_WITHIN_SECONDS = 10.0
_LAST_LINES = 8  # of the node's log, in an error message
_PR_SET_PDEATHSIG = 1


class ChildNode:
    """A node that runs below this process, with its log in a file."""

    def __init__(self, app: Genba, target: str, folder: Path, **options: Any) -> None:
        handle = app.node(target, **options)
        import_path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
        prctl = ctypes.CDLL(None).prctl
        self._log = folder / "node.log"
        self.left_behind = 0
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                handle.command,
                cwd=folder,
                env={**os.environ, **handle.environ, "PYTHONPATH": import_path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches this process only, which ends the node
                # If this process is killed, so is the node, and its guard ends the rest.
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def check_alive(self) -> None:
        """Raise GenbaError, with the end of the log, if the node has ended."""
        code = self.process.poll()
        if code is not None:
            raise GenbaError(f"the node has ended with code {code}: {self.last_words()}")

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return " | ".join(lines) or "its log is empty"

    def end(self) -> None:
        """Drain the node; what is still there after that counts as left behind, and is killed."""
        family = _family(self.process)
        if self.process.poll() is None:
            self.process.terminate()
        self.left_behind += _wait_or_kill(self.process, family)


def _family(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    import psutil

    try:
        return psutil.Process(node.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _wait_or_kill(node: subprocess.Popen[bytes], family: Sequence[psutil.Process]) -> int:
    """Wait until all have ended; return how many had to be killed."""
    import psutil

    killed = 0
    try:
        node.wait(_END_WITHIN_SECONDS)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()
        killed += 1
    _, alive = psutil.wait_procs(family, timeout=1)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=1)
    return killed + len(alive)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into exceptions, as Ctrl-C is one, so that all is cleaned up."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    old = {signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals that end a command: a second Ctrl-C must not stop the cleaning up."""
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    old = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
