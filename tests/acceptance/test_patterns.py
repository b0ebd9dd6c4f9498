"""The patterns of docs/howto/patterns.md, as they stand there, with a node."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from tests.support import eventually, load_module

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(document: str) -> str:
    return "\n".join(BLOCK.findall((HOWTO / document).read_text()))


def test_the_patterns_do_what_they_say(url, tmp_path, start_node):
    (tmp_path / "patterns.py").write_text(code("patterns.md"))
    patterns = load_module("patterns", tmp_path, url)
    app = patterns.app
    start_node("patterns:app", url, "--max", "5")
    eventually(lambda: len(app.schedules()) == 5, within=15)

    drained = patterns.drain.enqueue(3)
    patterns.ordered(7)
    patterns.ordered(7)
    assert app.job(key="remind:7").result(timeout=15) == "order 7"
    assert app.count(task="patterns.remind", state="any") == 1
    eventually(lambda: app.count(task="patterns.drain", state="succeeded") == 3, within=15)
    assert app.count(task="patterns.drain", state="any") == 3
    assert drained.refresh().state == "succeeded"

    eventually(lambda: app.count(task="patterns.watch", state="succeeded") >= 2, within=15)
    eventually(lambda: app.count(task="patterns.consume", state="succeeded") >= 6, within=15)
    assert app.count(task="patterns.watch") == 1
    assert app.count(task="patterns.consume") == 3
    times = sorted((a.started, a.ended) for job in app.jobs(task="patterns.watch", state="final") for a in job.attempts)
    assert all(end <= start + timedelta(milliseconds=50) for (_, end), (start, _) in pairwise(times))
    assert app.schedule("backup").next(1)[0].hour == 22
    app.close()


def test_the_example_of_the_schedules_declares_what_it_says(tmp_path):
    (tmp_path / "reports.py").write_text(code("schedules.md"))
    reports = load_module("reports", tmp_path, f"sqlite:///{tmp_path / 'x.db'}")
    names = [one.name for one in reports.app.hello()["schedules"]]
    assert sorted(names) == ["reports.close_day", "reports.poll", "sweep", "weekly-mail"]
    assert not (tmp_path / "x.db").exists()  # declaring writes nothing
