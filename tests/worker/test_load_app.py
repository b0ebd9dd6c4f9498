"""An app that cannot be loaded is reported in one message, the same for every command, with the user's frames only."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.support import genba_command, sqlite_url, without_settings

# All three ask the same two functions, and a node takes the longest to start: what the names of a module lead to is
# asked of the quickest, what becomes of its code of the node, and one of each kind of all.
COMMANDS = {
    "node start": lambda target: ("node", "start", target),
    "job enqueue": lambda target: ("job", "enqueue", "tasks.add", "--app", target),
    "job run": lambda target: ("job", "run", "1", "--here", "--app", target),
}
GENBA = "from genba import Genba\n"


@pytest.fixture(params=["node start"])
def run_command(request, tmp_path):
    """What a command says of a target, on stderr; it must end with 2, and say nothing else."""

    def ask(target: str, *options: str, **variables: str) -> list[str]:
        env = {**without_settings(os.environ), "GENBA_URL": sqlite_url(tmp_path), **variables}
        command = genba_command(*COMMANDS[request.param](target), *options)
        ran = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )
        assert (ran.returncode, ran.stdout) == (2, ""), ran
        return ran.stderr.replace(f"{tmp_path}", "HERE").splitlines()

    return ask


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)


@pytest.mark.parametrize("run_command", ["job enqueue"], indirect=True)
@pytest.mark.parametrize(
    ("target", "source", "reason"),
    [
        ("nowhere:app", "", "there is no module 'nowhere' in HERE or on the Python path; "),
        ("nowhere.deep:app", "", "there is no module 'nowhere' in HERE or on the Python path; "),
        ("tasks.deep:app", "", "there is no module 'tasks.deep' in HERE or on the Python path; "),
        ("tasks:app", GENBA, "tasks has no 'app'; make one there: app = Genba(...)"),
        ("tasks:app", GENBA + "other = Genba()", "tasks has no 'app'; name tasks:other"),
        (
            "tasks:app",
            "app = 1",
            "tasks.app is of type int, not a Genba app; make one there: app = Genba(...)",
        ),
        (
            "tasks:Genba",
            GENBA + "app = Genba()",
            "tasks.Genba is the class Genba, not a Genba app; name tasks:app",
        ),
        ("tasks:app.x", GENBA + "app = Genba()", "tasks.app has no 'x'; name tasks:app"),
        ("tasks", "", "tasks has no Genba app; make one there: app = Genba(...)"),
        (
            "tasks",
            GENBA + "a = Genba()\nb = Genba()",
            "tasks has several Genba apps; name tasks:a or tasks:b",
        ),
    ],
)
def test_a_target_that_names_no_app_is_one_line(run_command, tmp_path, target, source, reason):
    write(tmp_path, tasks=source)

    (line,) = run_command(target)

    assert line.startswith(f"genba: cannot import {target}: {reason}")


@pytest.mark.parametrize(
    ("source", "frames", "message"),
    [
        (
            "x = 1\n1 / 0",
            [
                "Traceback (most recent call last):",
                '  File "HERE/tasks.py", line 2, in <module>',
                "    1 / 0",
            ],
            "ZeroDivisionError: division by zero; correct HERE/tasks.py, line 2",
        ),
        (
            "x = = 1",
            ['  File "HERE/tasks.py", line 1', "    x = = 1"],
            "SyntaxError: invalid syntax; correct HERE/tasks.py, line 1",
        ),
        (
            "import no_such_module",
            [
                "Traceback (most recent call last):",
                '  File "HERE/tasks.py", line 1, in <module>',
                "    import no_such_module",
            ],
            "ModuleNotFoundError: No module named 'no_such_module'; install it, or correct HERE/tasks.py, line 1",
        ),
        (
            "import sys\nsys.exit('not today')",
            [
                "Traceback (most recent call last):",
                '  File "HERE/tasks.py", line 2, in <module>',
                "    sys.exit('not today')",
            ],
            "SystemExit: not today; correct HERE/tasks.py, line 2",
        ),
        (
            GENBA + "app = Genba(namespace='a b')",
            [
                "Traceback (most recent call last):",
                '  File "HERE/tasks.py", line 2, in <module>',
                "    app = Genba(namespace='a b')",
            ],
            None,
        ),
    ],
    ids=["raises", "syntax", "missing import", "leaves", "refused by genba"],
)
def test_a_module_that_fails_shows_its_own_lines_and_one_message(
    run_command, tmp_path, source, frames, message
):
    write(tmp_path, tasks=source)

    lines = run_command("tasks:app")

    assert [
        line for line in lines[:-1] if line.strip(" ~^")
    ] == frames  # without the marks under a line
    assert lines[-1].startswith("genba: cannot import tasks:app: ")
    assert lines[-1].endswith(message or "; correct HERE/tasks.py, line 2")


def test_an_error_in_an_import_of_an_import_leads_to_its_line(run_command, tmp_path):
    write(
        tmp_path,
        tasks="import middle",
        middle="import json\nimport inner",
        inner="import json\n\njson.loads('{')",
    )

    *frames, message = run_command("tasks:app")

    files = [line.split(",")[:2] for line in frames if line.startswith("  File")]
    assert files[:3] == [
        ['  File "HERE/tasks.py"', " line 1"],
        ['  File "HERE/middle.py"', " line 2"],
        ['  File "HERE/inner.py"', " line 3"],
    ]
    assert not any("importlib" in line or "genba" in line for line in frames)
    assert message.startswith("genba: cannot import tasks:app: json.decoder.JSONDecodeError: ")
    assert message.endswith(
        "; correct HERE/inner.py, line 3"
    )  # not the line in the standard library


def test_a_traceback_of_all_frames_can_be_asked_for(run_command, tmp_path):
    write(tmp_path, tasks="1 / 0")

    *frames, message = run_command("tasks:app", GENBA_TRACEBACK="1")

    assert any("worker/load_app.py" in line for line in frames)
    assert message.endswith("ZeroDivisionError: division by zero; correct HERE/tasks.py, line 1")


@pytest.mark.parametrize("target", ["nowhere:app", "tasks:nothing", "tasks:number"])
def test_a_node_whose_target_names_no_app_says_it_in_one_line(run_command, tmp_path, target):
    write(tmp_path, tasks="number = 1")

    (line,) = run_command(target)

    assert line.startswith(f"genba: cannot import {target}: ")


@pytest.mark.parametrize("run_command", COMMANDS, indirect=True)
def test_all_commands_say_the_same_also_as_json(run_command, tmp_path):
    write(tmp_path, tasks="1 / 0")
    message = "cannot import tasks:app: ZeroDivisionError: division by zero; correct HERE/tasks.py, line 1"

    assert [bare for line in run_command("tasks:app") if (bare := line.strip(" ~^"))] == [
        "Traceback (most recent call last):",
        'File "HERE/tasks.py", line 1, in <module>',
        "1 / 0",
        f"genba: {message}",
    ]
    assert [json.loads(line) for line in run_command("tasks:app", "--json")] == [
        {"error": {"type": "BadOption", "message": message}}
    ]
    (line,) = run_command("nowhere:app")
    assert line.startswith(
        "genba: cannot import nowhere:app: there is no module 'nowhere' in HERE "
    )
    assert set(json.loads(run_command("nowhere:app", "--json")[0])) == {"error"}
