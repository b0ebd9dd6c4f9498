"""Tab completes: commands, options, and the names that are in the database; in a real bash."""

from __future__ import annotations

import os
import shlex
import shutil
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
    ran = subprocess.run(
        ["bash", "-c", text], env=env, capture_output=True, text=True, timeout=120, check=True
    )
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


def script(command: Path, shell: str) -> str:
    return subprocess.run(
        [command, "completion", shell], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def answer(command: Path, folder: Path, shell: str, words: str, current: str) -> str:
    """What genba says when the script of that shell asks, with what it sends."""
    asks = {"_GENBA_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": current}
    env = {**without_settings(os.environ), "GENBA_URL": sqlite_url(folder), **asks}
    ran = subprocess.run([command], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == ""
    return ran.stdout


def in_zsh(command: Path, folder: Path, *words: str) -> list[tuple[str, str, str]]:
    """As its script reads it: lines by threes, kind, word and description ("_" for none)."""
    lines = answer(
        command, folder, "zsh", " ".join(("genba", *words)), str(len(words))
    ).splitlines()
    assert len(lines) % 3 == 0
    return list(zip(lines[::3], lines[1::3], lines[2::3], strict=True))


def in_fish(command: Path, folder: Path, *words: str) -> list[list[str]]:
    """As its script reads it: a line each, kind and word with a comma between, the description behind a tab."""
    lines = answer(command, folder, "fish", " ".join(("genba", *words)), words[-1]).splitlines()
    return [line.partition("\t")[0].split(",") for line in lines]


def test_other_shells_get_a_script_that_asks_what_genba_answers(command, tmp_path):
    """Neither shell is needed here: their scripts come from click; what they send and read is ours to get right."""
    app = Genba(sqlite_url(tmp_path))
    app.queues["letters"].pause()
    app.close()

    assert in_zsh(command, tmp_path, "job", "ca")[0][:2] == ("plain", "cancel")
    assert in_zsh(command, tmp_path, "queue", "resume", "le") == [("plain", "letters", "_")]
    zsh = script(command, "zsh")
    assert zsh.startswith("#compdef genba")
    for part in (
        'COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) _GENBA_COMPLETE=zsh_complete',
        "type key descr",
    ):
        assert part in zsh

    assert in_fish(command, tmp_path, "job", "ca") == [["plain", "cancel"]]
    assert in_fish(command, tmp_path, "queue", "resume", "le") == [["plain", "letters"]]
    fish = script(command, "fish")
    for part in (
        "COMP_WORDS=(commandline -cp)",
        "COMP_CWORD=(commandline -t)",
        "_GENBA_COMPLETE=fish_complete",
    ):
        assert part in fish
    assert "--command genba" in fish


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_the_script_of_another_shell_is_read_by_it_where_it_is_installed(
    shell, check, command, tmp_path
):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "script").write_text(script(command, shell))

    subprocess.run([shell, check, tmp_path / "script"], check=True, timeout=60)
