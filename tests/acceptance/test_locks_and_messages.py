"""What the documents about locks and messages show is what happens, and the command line shows the holders."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.support import ROOT, NodeProcess, run_genba, without_settings

from genba import Genba

HOWTO = ROOT / "docs" / "howto"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str, document: str) -> list[str]:
    return [text for found, text in BLOCK.findall((HOWTO / document).read_text()) if found == kind]


def printed(code: str, url: str, folder: Path) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**without_settings(os.environ), "GENBA_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stderr == ""
    return ran.stdout


def test_the_examples_about_locks_are_true(
    url: str, tmp_path: Path, start_node: Callable[..., NodeProcess]
) -> None:
    tasks, script, fence = blocks("python", "locks.md")
    (tmp_path / "tasks.py").write_text(tasks)
    start_node("tasks:app", url)

    assert printed(script, url, tmp_path) == blocks("text", "locks.md")[0]
    if url.startswith("postgres"):
        assert printed(fence, url, tmp_path) == "written by the holder, or not at all\n"


def test_the_examples_about_messages_are_true(
    url: str, tmp_path: Path, start_node: Callable[..., NodeProcess]
) -> None:
    tasks, script, by_async = blocks("python", "messages.md")
    (tmp_path / "tasks.py").write_text(tasks)
    start_node("tasks:app", url)

    assert printed(script, url, tmp_path) == blocks("text", "messages.md")[0]
    assert printed(by_async, url, tmp_path) == "{'headline': 'async too'}\n"


def genba(url: str, *words: str) -> tuple[int, str]:
    done = run_genba(url, *words)
    return done.returncode, done.stdout


def test_the_command_line_shows_the_holder_of_a_lock_and_takes_it_away(url: str) -> None:
    with closing(Genba(url)) as app:
        lock = app.mutex("stock/7")
        lock.acquire()

        code, out = genba(url, "lock", "ls", "--json")
        ((state, *others), (holder,)) = (json.loads(out), json.loads(out)[0]["holders"])
        assert (code, others, state["name"], state["n"], state["waiters"]) == (
            0,
            [],
            "stock/7",
            1,
            [],
        )
        assert (holder["pid"], holder["job"], holder["token"]) == (os.getpid(), None, lock.token)
        assert "stock/7" in genba(url, "lock", "ls")[1]
        assert genba(url, "lock", "break", "stock/7", "--token", str(lock.token + 1))[0] == 1
        assert genba(url, "lock", "break", "stock/7", "--json") == (
            0,
            json.dumps({"name": "stock/7", "broken": [lock.token]}) + "\n",
        )
        assert genba(url, "lock", "break", "stock/7")[0] == 1
        (broken,) = app.events(kinds=["lock_broken"])
        assert broken.data["by"] == f"{getpass.getuser()}@{socket.gethostname()}"
        assert app.locks() == []
