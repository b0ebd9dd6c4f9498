"""Where a node's settings come from, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import load_module

from genba import Genba
from genba.cli import main
from genba.cli.node import _queues
from genba.client.settings import read, read_node
from genba.errors import BadOption


def test_the_environment_beats_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.genba]\nnamespace = "shop"\n[tool.genba.node]\nmin = 2\nmax = 4\n'
    )

    assert read_node({"GENBA_NODE_MAX": "8"}, tmp_path) == {"min": 2, "max": "8"}
    assert read({}, {}, tmp_path).namespace == "shop"  # the table of nodes is no setting of the app


def test_what_a_priority_is_worth_is_a_setting_of_the_app(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.genba]\nage_step = "30m"\n')
    hour = 3_600_000_000

    assert read({}, {}, tmp_path).age_step == hour // 2
    assert read({}, {"GENBA_AGE_STEP": "7200"}, tmp_path).age_step == 2 * hour
    assert read({"age_step": "1d"}, {"GENBA_AGE_STEP": "7200"}, tmp_path).age_step == 24 * hour
    assert Genba("sqlite:///x.db").hello()["age_step"] == hour
    assert Genba("sqlite:///x.db", age_step="2h").hello()["age_step"] == 2 * hour


@pytest.mark.parametrize("value", [0, "0s", -1, "soon", True])
def test_a_priority_that_is_worth_nothing_is_refused(value: object) -> None:
    with pytest.raises(BadOption, match="age_step"):
        Genba("sqlite:///x.db", age_step=value)  # type: ignore[arg-type]


def test_without_a_project_nothing_is_said(tmp_path: Path) -> None:
    assert read_node({}, tmp_path) == {}


def test_a_setting_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.genba.node]\nmxa = 4\n")

    with pytest.raises(BadOption, match="no setting 'mxa'"):
        read_node({}, tmp_path)


_APP = """
from genba import Genba
app = Genba()

@app.task(queue="render")
def render(x: int) -> int:
    return x

@app.task
def plain(x: int) -> int:
    return x

app.recur("nightly", plain.using(queue="slow").call(1), every="1h", start="+1 hour")
"""


@pytest.mark.parametrize("said", [(), ("-q", "default:1")], ids=["nothing is said", "one is said"])
def test_a_node_serves_the_queues_of_its_app_by_default(url, start_node, tmp_path, said) -> None:
    (tmp_path / "work.py").write_text(_APP)
    app = load_module("work", tmp_path, url).app
    jobs = [app.enqueue("work.render", 1), app.enqueue("work.plain", 2)]

    node = start_node("work:app", url, *said)

    assert jobs[1].result(timeout=20) == 2
    if said:
        assert jobs[0].refresh().state == "waiting"
        assert "no live node serves queue 'render'" in str(jobs[0].explain())
    else:
        assert jobs[0].result(timeout=20) == 1
    served = [sorted(one.queues) for one in app.overview().nodes]
    assert served == ([["default"]] if said else [["default", "render", "slow"]])
    assert node.stop() == 0
    app.close()


@pytest.mark.parametrize("queues", [["a:b", "c"], {"a:b": None, "c": 2}])
def test_a_queue_whose_name_has_a_colon_is_served(queues, url, tmp_path) -> None:
    (tmp_path / "work.py").write_text(_APP)
    app = load_module("work", tmp_path, url).app
    word = app.node("work:app", queues=queues).command[-1]
    app.close()

    assert list(_queues(word)) == ["a:b", "c"]
    assert _queues(word)["a:b"] is None


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["--max-load", "much"], {}, "max_load must be a number"),
        (["--max-load", "-1"], {}, "max_load must be greater than 0"),
        (["--min-free-memory", "1 elephant"], {}, "min_free_memory"),
        (["--recycle-after", "0"], {}, "at least 1 job"),
        (["--recycle-after", "often"], {}, "recycle_after"),
        (["--max-dedicated", "-1"], {}, "max_dedicated must be at least 0"),
        (
            ["-q", "a:x"],
            {},
            "-q: 'a:x': the part after the last colon must be the number of slots; ",
        ),
        (["-q", "b:2,a:-1"], {}, "'a:-1': the part after the last colon"),
        (["-q", "a:" + "9" * 5_000], {}, "after the last colon"),
        (
            [],
            {"GENBA_NODE_QUEUES": "a:b"},
            "with its slots (a:b:8), or with a colon at the end (a:b:)",
        ),
        ([], {"GENBA_NODE_MIN": "few"}, "min must be a whole number, not 'few'"),
        ([], {"GENBA_NODE_POOL": "odd"}, "pool must be one of"),
    ],
)
def test_a_wrong_value_is_one_sentence(
    words: list[str],
    environ: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(SystemExit) as left:  # here: it ends before there is a node
        main(["node", "start", "tasks:app", *words])

    assert left.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
