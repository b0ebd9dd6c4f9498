"""docs/explanation/coming-from-kojo.md: each column of a job type has its place, and a node puts it there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.acceptance.test_readme import blocks
from tests.support import ROOT, eventually, load_module

from genba import Genba
from genba.cli import main
from genba.domain.duration import DAY
from genba.errors import BadOption

PAGE = ROOT / "docs" / "explanation" / "coming-from-kojo.md"
COLUMNS = {
    *(
        "type_code",
        "name",
        "worker_uri",
        "worker_method",
        "can_work_in_parallel",
        "default_importance",
    ),
    *(
        "cron_expression",
        "schedule_limit",
        "schedule_limit_allowance",
        "is_enabled",
        "auto_complete_success",
    ),
    "auto_delete_interval_duration",
}


def table() -> dict[str, tuple[str, str]]:
    """Of each column: its name in the definition, and the command that changes it; "–" for none."""
    part = PAGE.read_text().partition("## The columns of a job type")[2].partition("\n## ")[0]
    rows = [
        [cell.strip(" `") for cell in line.split("|")]
        for line in part.splitlines()
        if line.startswith("| `")
    ]
    return {row[1]: (row[3], row[4]) for row in rows}


@pytest.fixture
def client(url: str, tmp_path: Path, start_node: Any) -> Any:
    """A client with the database and without the code, beside a node that has both."""
    (tmp_path / "factory.py").write_text(blocks("python", PAGE)[0])
    start_node("factory:app", url)
    with_code = load_module("factory", tmp_path, url)
    eventually(lambda: "cleanup" in with_code.app.tasks and with_code.app.schedules(), within=40)
    with_code.app.close()
    app = Genba(url)
    yield app
    app.close()


def test_every_column_of_a_job_type_is_in_the_database_for_those_without_the_code(client):
    assert table().keys() == COLUMNS
    definition = client.tasks["cleanup"].definition
    wanted = {
        "name": "cleanup",
        "title": "Clean up what is left over",
        "function": "factory:cleanup",
        "exclusive": True,
        "priority": 10,
        "cron": "0 22 * * mon-fri",
        "max_running": 1,
        "max_waiting": 1,
        "explicit_outcome": False,
        "keep": 7 * DAY,
    }
    assert {place for place, _ in table().values()} == {*wanted, "–"}
    assert {name: definition[name] for name in wanted} == wanted
    assert client.tasks["cleanup"].enabled
    assert [(one.name, one.task) for one in client.schedules()] == [("cleanup", "cleanup")]
    assert definition["parameters"][0]["name"] == "folder"


def test_what_an_operator_may_change_of_a_job_type_can_be_changed(client):
    commands = [command for _, command in table().values() if command != "–"]
    assert len(commands) == 9
    client.tasks["cleanup"].set(exclusive=False, max_running=3)
    for command in commands:
        words = [
            re.sub("…$", "0 4 * * *" if "cron" in command else "Sweep", word)
            for word in shlex.split(command)[1:]
        ]
        if "exclusive" in command:
            client.tasks["cleanup"].set(max_running=1)
        if "max_running" in command:
            client.tasks["cleanup"].set(exclusive=False)
        done = CliRunner().invoke(main, [*words, "--url", client.url])
        assert done.exit_code == 0, (command, done.output)
    task = client.tasks["cleanup"]
    assert (task.title, task.settings["max_running"], task.enabled) == ("Sweep", 2, False)
    task.enable()
    assert client.enqueue("cleanup").priority == 5


def test_an_operator_is_refused_what_would_let_no_job_in(client):
    """The code says that it is exclusive; with two of them no enqueue would know what holds."""
    task = client.tasks["cleanup"]
    with pytest.raises(BadOption, match=r"exclusive runs one job at a time .* max_running=2"):
        task.set(max_running=2)
    assert task.override == {}
    task.set(max_running=2, exclusive=False)
    with pytest.raises(BadOption, match="exclusive runs one job at a time"):
        task.reset("exclusive")
    client.enqueue("cleanup")
