"""Start a node from Python: as a child process, like `genba node start` from a shell."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from genba.errors import BadOption, GenbaError

if TYPE_CHECKING:
    from genba.client.app import Genba

_PLAIN = (
    *("name", "pool", "min", "max", "grace", "spawn"),
    *("max_dedicated", "recycle_after", "max_load", "min_free_memory", "metrics", "log_format"),
)
_FLAGS = ("reload", "debug", "log_jobs")
_OPTIONS = ("queues", "lease", *_FLAGS, *_PLAIN)


@dataclass(frozen=True, slots=True)
class NodeHandle:
    """A node that is not started yet."""

    command: tuple[str, ...]
    environ: Mapping[str, str]

    @classmethod
    def of(cls, app: Genba, target: str | None, given: Mapping[str, Any]) -> NodeHandle:
        unknown = [name for name in given if name not in _OPTIONS]
        if unknown:
            raise BadOption(
                f"node(): there is no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}"
            )
        words = [sys.executable, "-m", "genba.cli", "node", "start", target or _find(app)]
        queues = given.get("queues")
        if queues:
            listed = (
                queues.items() if isinstance(queues, Mapping) else [(name, None) for name in queues]
            )
            words += ["-q", ",".join(_queue(name, slots) for name, slots in listed)]
        words += [f"--{name.replace('_', '-')}" for name in _FLAGS if given.get(name)]
        for name in _PLAIN:
            if given.get(name) is not None:
                words += [f"--{name.replace('_', '-')}", str(given[name])]
        environ = {
            "GENBA_URL": app.settings.url,
            "GENBA_NAMESPACE": app.settings.namespace,
            "GENBA_LEASE": str(given.get("lease") or app.settings.lease / 1_000_000),
        }
        return cls(tuple(words), environ)

    def start(self) -> subprocess.Popen[bytes]:
        """Start it and return; the caller ends it (SIGTERM drains)."""
        return subprocess.Popen(self.command, env=self._surroundings())

    def run(self) -> int:
        """Start it and wait; signals that this process gets are passed on.  Gives its exit code."""
        child = self.start()
        with _passing_on(child.send_signal):
            return child.wait()

    async def arun(self) -> int:
        """As `run`; if it is cancelled, the node drains, and has ended when it returns."""
        child = await asyncio.create_subprocess_exec(*self.command, env=self._surroundings())
        with _passing_on(child.send_signal):
            try:
                return await child.wait()
            finally:
                if child.returncode is None:
                    child.terminate()
                    await child.wait()

    def _surroundings(self) -> dict[str, str]:
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
        return {**os.environ, **self.environ, "PYTHONPATH": path}


@contextmanager
def _passing_on(send: Callable[[int], None]) -> Iterator[None]:
    """Signals of this process are for the child; Python hears them in its main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(signum: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            send(signum)

    old = {s: signal.signal(s, pass_on) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _queue(name: str, slots: int | None) -> str:
    """As `-q` takes it: what stands behind the last colon is never the name's."""
    return f"{name}:{'' if slots is None else slots}" if slots is not None or ":" in name else name


def _find(app: Genba) -> str:
    """The "module:attribute" under which the zygote will find this app."""
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()):
            if value is app:
                return f"{_importable(name, module)}:{attribute}"
    raise GenbaError(
        'node(): this app is not a module\'s global variable; say where it is: app.node("module:app")'
    )


def _importable(name: str, module: ModuleType) -> str:
    if name != "__main__":
        return name
    spec = getattr(module, "__spec__", None)
    stem = (
        spec.name
        if spec
        else os.path.splitext(os.path.basename(getattr(module, "__file__", None) or ""))[0]
    )
    if not stem or importlib.util.find_spec(stem) is None:
        raise GenbaError(
            "node(): this app lives in a program that cannot be imported; put it into a module"
        )
    return str(stem)
