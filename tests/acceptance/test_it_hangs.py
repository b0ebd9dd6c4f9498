"""docs/howto/it-hangs.md: every step is run, in its order, and says what stands there."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import psutil
from click.testing import CliRunner
from tests.support import ROOT, NodeProcess, eventually, sqlite_url

from genba.cli import main

DOCUMENT = (ROOT / "docs" / "howto" / "it-hangs.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRITES = {"enqueue", "cancel", "start", "wait"}  # once; what only asks is asked until it says so


def steps(block: str) -> Iterator[tuple[str, str]]:
    """Each command of a block, with what it is to say."""
    for part in block.split("$ ", 1)[1].split("\n$ "):
        command, _, said = part.partition("\n")
        yield command, said.rstrip("\n")


def fits(said: str, shown: str) -> bool:
    """… stands for anything."""
    return bool(re.fullmatch(".*".join(map(re.escape, shown.split("…"))), said.rstrip(), re.DOTALL))


def title(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:  # it has ended
        return ""


def test_every_step_says_what_the_document_shows(tmp_path, start_node, monkeypatch):
    url = sqlite_url(tmp_path)
    blocks = BLOCK.findall(DOCUMENT)
    (code,) = (block for kind, block in blocks if kind == "python")
    (tmp_path / "tasks.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GENBA_URL", url)
    monkeypatch.syspath_prepend(tmp_path)
    nodes: list[NodeProcess] = []

    def run(command: str) -> str:
        if command.startswith("genba "):
            return CliRunner().invoke(main, shlex.split(command)[1:], catch_exceptions=False).output
        if command.startswith("kill "):  # of this node only: others may run such a job too
            (pid,) = (pid for pid in nodes[0].tree() if "labels #1" in title(pid))
            psutil.Process(pid).send_signal(signal.SIGUSR1)
            return ""
        if shutil.which("pgrep") is None:  # a small container may have no procps
            return "\n".join(
                f"{pid} {title(pid)}" for pid in nodes[0].tree() if "labels #1" in title(pid)
            )
        return subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=30
        ).stdout

    def check(command: str, shown: str) -> None:
        said = run(command)
        if command == "genba job cancel 1":  # it may have obeyed before the command looks
            said = said.replace("1 cancelled", "1 running, asked to stop")

        def once_more() -> bool:
            nonlocal said
            said = said if fits(said, shown) else run(command)
            return fits(said, shown)

        if not WRITES & set(shlex.split(command)):
            with suppress(AssertionError):  # below it is said with the text
                eventually(once_more, within=30, every=0.2)
        assert fits(said, shown), f"$ {command}\n{said}"

    for kind, block in blocks:
        if kind == "" and nodes:
            eventually(partial(logged, nodes[0], block), within=20)
        for command, shown in steps(block) if kind == "console" else ():
            if command.endswith(" &"):
                nodes.append(
                    start_node(*shlex.split(command)[3:4], url, *shlex.split(command)[4:-1])
                )
            else:
                check(command, shown)


def logged(node: NodeProcess, block: str) -> bool:
    return bool(re.search(".*".join(map(re.escape, block.strip().split("…"))), node.log))
