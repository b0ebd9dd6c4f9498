"""`genba node start` as a process that a test can signal, and that leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support.command_line import genba_command, without_settings
from tests.support.waiting import PATIENCE, eventually


class NodeProcess:
    """`genba node start` as a process of its own; what it prints is in `log`."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path, mark: str) -> None:
        self._popen = popen
        self._log = log
        self._mark = mark

    @classmethod
    def start(
        cls, target: str, url: str, *args: str, cwd: Path, env: Mapping[str, str] | None = None
    ) -> NodeProcess:
        """Start a node for `target` ("module:app", found in `cwd`) on `url`; does not wait until it is ready."""
        mark = uuid.uuid4().hex
        log = cwd / f"node-{mark[:8]}.log"
        settings = {
            **without_settings(os.environ),
            "GENBA_URL": url,
            "GENBA_TEST_NODE": mark,
            **(env or {}),
        }
        with log.open("wb") as out:
            popen = subprocess.Popen(
                genba_command("node", "start", target, *args),
                cwd=cwd,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at pytest is not for the node
                preexec_fn=_end_with_parent,
            )
        return cls(popen, log, mark)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self._popen.poll() is not None

    def tree(self) -> list[int]:
        """The living processes of this node, also those that have left its tree and session."""
        return [process.pid for process in self._living()]

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, within: float = 15.0) -> int:
        """The node's exit code; AssertionError with its log if it does not end."""
        within *= PATIENCE
        try:
            return self._popen.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"node {self.pid} did not end within {within} s\n{self.log}"
            ) from None

    def stop(self, within: float = 15.0) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(within)

    def kill9(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        """Leave nothing behind, whatever the test did."""
        self._popen.kill()
        self._popen.wait()
        eventually(self._kill_rest)

    def _kill_rest(self) -> bool:
        rest = self._living()
        for process in rest:
            with suppress(psutil.NoSuchProcess):  # its guard was faster
                process.kill()
        return not rest

    def _living(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter()
            if _setting(process, "GENBA_TEST_NODE") == self._mark
        ]


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """Of a pytest that is killed no node stays; PR_SET_PDEATHSIG is not inherited by the node's children."""
    _libc.prctl(1, signal.SIGKILL)


def _setting(process: psutil.Process, name: str) -> str | None:
    try:
        return process.environ().get(name)
    except (psutil.Error, OSError):  # it has ended, or is not ours
        return None
