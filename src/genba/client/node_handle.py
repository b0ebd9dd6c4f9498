"""Start a node from Python, as a child process, like `genba node start` in a shell."""

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
from typing import Any

from genba.client.settings import Settings
from genba.errors import BadOption, GenbaError

_VALUES = (
    "name",
    "pool",
    "min",
    "max",
    "grace",
    "spawn",
    "max_dedicated",
    "recycle_after",
    "max_load",
    "min_free_memory",
    "metrics",
    "log_format",
)
_FLAGS = ("reload", "debug", "log_jobs")
_OPTIONS = ("queues", "lease", *_FLAGS, *_VALUES)


@dataclass(frozen=True, slots=True)
class NodeHandle:
    """A node that is not started yet."""

    command: tuple[str, ...]
    environ: Mapping[str, str]

    @classmethod
    def of(
        cls, app: object, settings: Settings, target: str | None, options: Mapping[str, Any]
    ) -> NodeHandle:
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise BadOption(
                f"node(): there is no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}"
            )
        command = [
            *(sys.executable, "-m", "genba.cli", "node", "start"),
            target or _target_of(app),
            *_arguments(options),
        ]
        environ = {
            "GENBA_URL": settings.url,
            "GENBA_NAMESPACE": settings.namespace,
            "GENBA_LEASE": str(options.get("lease") or settings.lease / 1_000_000),
        }
        return cls(tuple(command), environ)

    def start(self) -> subprocess.Popen[bytes]:
        """Start it and return its process; SIGTERM drains it."""
        return subprocess.Popen(self.command, env=self._environ())

    def run(self) -> int:
        """Start it, wait, and return its exit code; signals to this process are passed on."""
        child = self.start()
        with _passing_on(child.send_signal):
            return child.wait()

    async def arun(self) -> int:
        """Start it and wait as `run` does; if this is cancelled, the node drains and ends first."""
        child = await asyncio.create_subprocess_exec(*self.command, env=self._environ())
        with _passing_on(child.send_signal):
            try:
                return await child.wait()
            finally:
                if child.returncode is None:
                    child.terminate()
                    await child.wait()

    def _environ(self) -> dict[str, str]:
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
        return {**os.environ, **self.environ, "PYTHONPATH": path}


@contextmanager
def _passing_on(send: Callable[[int], None]) -> Iterator[None]:
    """Pass signals on to the child; Python receives them in its main thread only."""
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


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Return the arguments of `genba node start` for these options."""
    arguments: list[str] = []
    queues = options.get("queues")
    if queues:
        pairs = queues.items() if isinstance(queues, Mapping) else ((name, None) for name in queues)
        arguments += ["-q", ",".join(_queue(name, slots) for name, slots in pairs)]
    arguments += [_flag(name) for name in _FLAGS if options.get(name)]
    for name in _VALUES:
        if options.get(name) is not None:
            arguments += [_flag(name), str(options[name])]
    return arguments


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _queue(name: str, slots: int | None) -> str:
    """Write a queue for `-q`, where the part after the last colon is always the number of slots."""
    return f"{name}:{'' if slots is None else slots}" if slots is not None or ":" in name else name


def _target_of(app: object) -> str:
    """Return the "module:attribute" by which the zygote finds this app."""
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()):
            if value is app:
                return f"{_importable(name, module)}:{attribute}"
    raise GenbaError(
        'node(): this app is not a global variable of a module; name it: app.node("module:app")'
    )


def _importable(name: str, module: ModuleType) -> str:
    if name != "__main__":
        return name
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None) or ""
    stem = spec.name if spec else os.path.splitext(os.path.basename(file))[0]
    if not stem or importlib.util.find_spec(stem) is None:
        raise GenbaError(
            "node(): this app lives in a program that cannot be imported; put it into a module"
        )
    return str(stem)
