"""The screen of `genba top`: where the mark goes, what a key does, and that it always fits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from genba.cli.screen import SECTIONS, Screen, draw, share_lines, targets
from genba.reports.overview import NodeView, Overview, QueueView

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def a_job(id: int, **given: Any) -> Any:
    """As far as the screen looks at one."""
    progress = type("P", (float,), {"note": given.pop("note", None)})(given.pop("percent", 0.0))
    about = {
        "task": "shop.pay",
        "state": "running",
        "claimed": NOW - timedelta(seconds=5),
        "finished": NOW,
    }
    record = SimpleNamespace(node=1, cancel_requested=None)
    return SimpleNamespace(
        id=id, progress=progress, record=record, reason="", error=None, **{**about, **given}
    )


def a_queue(name: str, **given: Any) -> QueueView:
    about = {
        "paused": False,
        "waiting": 0,
        "more": False,
        "parked": 0,
        "scheduled": 0,
        "running": 0,
        "oldest": None,
    }
    return QueueView(name=name, **{**about, **given})


def a_node(name: str, **given: Any) -> NodeView:
    about = {
        "state": "live",
        "host": "h",
        "pid": 1,
        "slots": 2,
        "busy": 0,
        "queues": ["default"],
        "started": NOW,
    }
    return NodeView(name=name, **{**about, **given})


def an_overview(*counts: int, **given: Any) -> Overview:
    """With so many queues, nodes, running jobs and failures."""
    queues, nodes, running, failures = counts or (2, 1, 3, 2)
    seen: dict[str, Any] = {
        "at": NOW,
        "states": {"running": running},
        "queues": [a_queue(f"q{i}") for i in range(queues)],
        "nodes": [a_node(f"n{i}") for i in range(nodes)],
        "running": [a_job(100 + i) for i in range(running)],
        "failures": [a_job(200 + i, state="failed") for i in range(failures)],
        "node_names": {1: "n0"},
    }
    return Overview(**{**seen, **given})


def pressed(seen: Overview, *keys: str, screen: Screen | None = None) -> tuple[Screen, list[str]]:
    screen, acts = screen or Screen(), []
    for key in keys:
        screen, act = screen.press(key, seen)
        if act is not None:
            acts.append(act.words)
    return screen, acts


def test_the_mark_goes_through_all_sections_and_stays_at_both_ends():
    seen = an_overview()
    screen, _ = pressed(seen, "j", "j")
    assert (screen.section, screen.target(seen)) == ("running", 102)
    screen, _ = pressed(seen, "j", "j", "j", "j", screen=screen)
    assert (screen.section, screen.target(seen)) == ("failures", 201)
    screen, _ = pressed(seen, *["\x1b[A"] * 20, screen=screen)
    assert (screen.section, screen.target(seen)) == ("queues", "q0")
    screen, _ = pressed(seen, "\t", "\t", screen=screen)
    assert screen.section == "running"
    assert pressed(an_overview(0, 0, 0, 0), "\t", "j", "k")[0].section == "running"


def test_the_mark_stays_on_its_job_while_others_come_and_go():
    screen, _ = pressed(an_overview(2, 1, 3, 2), "j")
    assert screen.target(an_overview(2, 1, 2, 2)) == 101
    assert screen.target(an_overview(2, 1, 1, 2)) == 100
    assert screen.target(an_overview(2, 1, 0, 2)) is None


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ("running", "c", "cancel job 100"),
        ("running", "x", "kill job 100"),
        ("nodes", "d", "drain node n0"),
        ("failures", "D", "delete job 200"),
    ],
)
def test_what_cannot_be_taken_back_asks_first(section, key, words):
    seen = an_overview()
    begun = Screen(section=section)
    assert pressed(seen, key, "y", screen=begun)[1] == [words]
    assert pressed(seen, key, "n", screen=begun)[1] == []
    assert pressed(seen, key, "q", screen=begun) == (
        Screen(section=section, message="nothing done"),
        [],
    )


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ("queues", "p", "pause queue q0"),
        ("queues", "r", "resume queue q0"),
        ("failures", "r", "requeue job 200"),
    ],
)
def test_the_rest_is_done_at_once(section, key, words):
    assert pressed(an_overview(), key, screen=Screen(section=section))[1] == [words]
    screen, acts = pressed(an_overview(0, 0, 0, 0), key, screen=Screen(section=section))
    assert (acts, screen.message.startswith("nothing to ")) == ([], True)


def test_q_ends_it_and_other_keys_do_nothing():
    assert pressed(an_overview(), "q")[0].closed
    assert pressed(an_overview(), "z", "\x1b", "7")[0] == Screen()


@given(st.lists(st.integers(0, 300), min_size=4, max_size=4), st.integers(0, 100))
def test_a_section_gets_what_it_wants_or_no_less_than_its_part(wanted, room):
    asked = dict(zip(SECTIONS, wanted, strict=True))
    given = share_lines(asked, room)
    assert sum(given.values()) == min(room, sum(wanted))
    assert all(given[name] <= asked[name] for name in SECTIONS)
    assert all(given[name] >= min(asked[name], room // 4) for name in SECTIONS)


@settings(max_examples=30)
@given(
    st.tuples(*[st.integers(0, 30)] * 4),
    st.sampled_from(SECTIONS),
    st.integers(20, 200),
    st.integers(6, 60),
    st.text(max_size=40),
)
def test_the_picture_fills_the_terminal_and_no_more(counts, section, width, height, text):
    seen = an_overview(
        *counts, queues=[a_queue(text)] * counts[0], running=[a_job(1, task=text)] * counts[2]
    )
    lines = draw(Screen(section=section), seen, text, width, height)

    assert len(lines) == height
    assert all(cell_len(line.plain) <= width for line in lines)
    assert not any(
        letter < " " or "\x7f" <= letter <= "\x9f" for line in lines for letter in line.plain
    )


@pytest.mark.parametrize("count", [1, 5, 40])
def test_what_is_marked_can_be_seen(count):
    seen = an_overview(2, 1, count, 2)
    for id in targets(seen, "running"):
        lines = draw(Screen(chosen={"running": id}), seen, "db", 80, 24)
        assert any(str(id) in line.plain and "reverse" in str(line.style) for line in lines)
