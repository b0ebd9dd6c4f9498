"""The peers' environments: one for each under build/peers, made once, and anew when its head has changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
PEERS = BENCHMARKS / "peers"
BUILD = BENCHMARKS.parent / "build" / "peers"
WITHIN = 600  # seconds for one installation

_HEAD = re.compile(r"^(?://|#) /// script\n(.*?)^(?://|#) ///$", re.MULTILINE | re.DOTALL)


class Unavailable(Exception):
    """This peer cannot run here; the text says why."""


@dataclass(frozen=True)
class Adapter:
    """One file of `peers`, by its head."""

    file: Path
    head: dict[str, Any]

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def title(self) -> str:
        return str(self.head["tool"]["bench"]["title"])

    @property
    def on(self) -> list[str]:
        return list(self.head["tool"]["bench"]["on"])

    @property
    def runs(self) -> str:
        return str(self.head["tool"]["bench"]["runs"])

    @property
    def settings(self) -> str:
        return str(self.head["tool"]["bench"]["settings"])

    @property
    def is_ours(self) -> bool:
        return self.name == "genba"

    @property
    def _home(self) -> Path:
        return BENCHMARKS if self.is_ours else BUILD / self.name

    def install(self) -> None:
        """Make its environment unless it is there; Unavailable if that fails."""
        self._make()
        if self.file.suffix == ".mjs":  # it finds its packages from where it is
            shutil.copy(PEERS / "side.mjs", self._home)
            shutil.copy(self.file, self._home)

    def _make(self) -> None:
        wanted = json.dumps(self.head)
        made = self._home / "made"
        if self.is_ours or (made.exists() and made.read_text() == wanted):
            return
        shutil.rmtree(self._home, ignore_errors=True)
        self._home.mkdir(parents=True)
        needs = self.head["dependencies"]
        if self.file.suffix == ".mjs":
            self._run(_found("node"), "--version")
            (self._home / "package.json").write_text('{"private": true}')
            self._run(_found("npm"), "install", "--silent", "--no-fund", "--no-audit", *needs)
        else:
            self._run(_interpreter(self.head["requires-python"]), "-m", "venv", str(self._home))
            self._run(
                self.python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *needs,
            )
        made.write_text(wanted)

    def _run(self, *command: str) -> str:
        try:
            ended = subprocess.run(
                command, cwd=self._home, capture_output=True, text=True, timeout=WITHIN
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{Path(command[0]).name}: {error}") from error
        if ended.returncode:
            said = (ended.stderr.strip() or ended.stdout.strip() or "it said nothing").splitlines()[
                -1
            ]
            raise Unavailable(f"{Path(command[0]).name} failed: {said[:200]}")
        return ended.stdout.strip()

    @property
    def python(self) -> str:
        return sys.executable if self.is_ours else str(self._home / "bin" / "python")

    @property
    def side(self) -> list[str]:
        """The command of its side of the conversation."""
        if self.file.suffix == ".mjs":
            return [_found("node"), str(self._home / "side.mjs"), self.file.name]
        return [self.python, "-m", "peers.side", self.name]

    @cached_property
    def version(self) -> str:
        package = re.split(r"[\[<>=~@ ]", self.head["dependencies"][0])[0]
        if self.file.suffix == ".mjs":
            return str(
                json.loads((self._home / "node_modules" / package / "package.json").read_text())[
                    "version"
                ]
            )
        return self._run(
            self.python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"
        )


def adapters() -> list[Adapter]:
    """All peers, genba first."""
    found = []
    for file in sorted(PEERS.iterdir()):
        if (
            file.suffix in (".py", ".mjs")
            and (head := _HEAD.search(file.read_text()))
            and file.name != "__init__.py"
        ):
            found.append(
                Adapter(file, tomllib.loads(re.sub(r"^(//|#) ?", "", head[1], flags=re.MULTILINE)))
            )
    return sorted(found, key=lambda one: not one.is_ours)


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise Unavailable(f"there is no {program} on this machine")
    return path


def _interpreter(wanted: str) -> str:
    """A Python that is new enough: our own, or another of this machine."""
    least = tuple(map(int, wanted.removeprefix(">=").split(".")))
    if sys.version_info >= least:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(least[1], least[1] + 6):
        others = [shutil.which(f"python3.{minor}"), *pyenv.glob(f"3.{minor}.*/bin/python3")]
        for path in filter(None, others):
            if subprocess.run([str(path), "-c", ""], capture_output=True).returncode == 0:
                return str(path)
    raise Unavailable(f"it needs Python {wanted}, and there is none on this machine")
