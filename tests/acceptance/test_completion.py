"""Tab completes: commands, options, and the names that are in the database; in a real bash."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.support import genba_command, sqlite_url, without_settings

from genba import Genba


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A `genba` that a shell can call by its name."""
    script = tmp_path / "genba"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(genba_command())} "$@"\n')
    script.chmod(0o755)
    return script


def completed(command: Path, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    listed = " ".join(shlex.quote(word) for word in ("genba", *words))
    text = f"""
        eval "$({command} completion bash)"
        COMP_WORDS=({listed}); COMP_CWORD={len(words)}
        _genba_completion {command}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    env = {**without_settings(os.environ), "GENBA_URL": sqlite_url(folder)}
    ran = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=120, check=True)
    assert ran.stderr == ""
    return ran.stdout.split()


def test_bash_completes_commands_and_names_and_makes_no_file(command, tmp_path):
    folder = tmp_path / "db"
    folder.mkdir()
    assert "cancel" in completed(command, folder, "job", "ca")
    assert completed(command, folder, "queue", "pause", "") == []
    assert list(folder.iterdir()) == []

    app = Genba(sqlite_url(folder))
    app.queues["letters"].pause()
    app.close()

    assert completed(command, folder, "queue", "resume", "le") == ["letters"]


@pytest.mark.parametrize(("shell", "word"), [("zsh", "#compdef genba"), ("fish", "--command genba")])
def test_other_shells_get_a_script_too(shell, word, command):
    ran = subprocess.run([command, "completion", shell], capture_output=True, text=True, timeout=60, check=True)

    assert word in ran.stdout
