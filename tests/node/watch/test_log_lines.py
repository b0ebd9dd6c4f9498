"""Log lines: each whole, valid, bounded, and harmless to a terminal."""

from __future__ import annotations

import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.domain.terminal_text import clean
from genba.log_lines import FORMATS, MAX_LINE_BYTES, LineFormatter

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def line(form: str, message: object = "hello", *args: object, **more: object) -> str:
    record = logging.makeLogRecord(
        {"name": "shop", "msg": message, "args": args, "levelname": "INFO", **more}
    )
    return LineFormatter(
        form, {"node": "n1"}, lambda: {"job": 42, "task": "render", "attempt": 2}
    ).format(record)


def raised(depth: int) -> Exception:
    """An error with `depth` causes."""
    try:
        raise ValueError(f"level {depth}") from (raised(depth - 1) if depth else None)
    except ValueError as error:
        return error


def test_a_json_line_says_where_it_comes_from():
    logged = json.loads(line("json", "paid %s", 7, cart={"items": [1, {"deep": True}]}))

    assert logged["message"] == "paid 7"
    assert (logged["level"], logged["logger"], logged["node"]) == ("info", "shop", "n1")
    assert (logged["job"], logged["task"], logged["attempt"]) == (42, "render", 2)
    assert logged["host"]
    assert logged["pid"]
    assert logged["data"] == {"cart": {"items": [1, {"deep": True}]}}


def test_a_record_that_names_its_job_is_believed():
    assert json.loads(line("json", job=7))["job"] == 7


def test_the_other_formats_say_the_same():
    pretty, pipe = line("pretty", "paid | all"), line("pipe", "paid | all")

    assert "INFO shop: paid | all job=42 task=render attempt=2" in pretty
    *_, job, task, logger, message = re.split(r"(?<!\\)\|", pipe)
    assert (job, task, logger, message) == ("42", "render", "shop", "paid \\| all")


def test_the_causes_of_an_error_are_all_there():
    logged = json.loads(line("json", exc_info=(ValueError, raised(12), None)))

    assert logged["error"]["type"] == "ValueError"
    assert logged["error"]["causes"] == [f"ValueError: level {n}" for n in range(11, -1, -1)]
    assert "in raised" in logged["error"]["traceback"]
    assert "  from ValueError: level 0" in line("pretty", exc_info=(ValueError, raised(12), None))


@pytest.mark.parametrize("form", FORMATS)
def test_a_long_line_is_cut_and_says_so(form):
    logged = line(
        form, "x" * 52_000, exc_info=(ValueError, raised(12), None), more=["y" * 9_000] * 300
    )

    assert len(logged.encode()) < MAX_LINE_BYTES
    assert re.search(r"x… \[\d+ characters left out\]", logged)
    if form == "json":
        assert len(json.loads(logged)["error"]["causes"]) == 12


def test_what_cannot_be_written_costs_no_line():
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    circle: dict[str, object] = {}
    circle["self"] = circle

    assert "not all arguments" in json.loads(line("json", "no place", 7))["message"]
    assert json.loads(line("json", circle=circle, mute=Mute()))["data"].keys() == {"circle", "mute"}
    assert json.loads(line("json", Mute()))["job"] == 42


@pytest.mark.parametrize("form", FORMATS)
@given(text=st.text(st.characters(), max_size=50), key=st.text(max_size=5))
def test_nothing_steers_a_terminal_and_json_stays_what_it_was(form, text, key):
    logged = line(form, "%s", text, data_of={key: text, "nan": float("nan")})

    assert not STEERING.search(logged)
    assert all(
        more.startswith("  ") for more in logged.split("\n")[1:]
    )  # none can be taken for a record
    assert form == "pretty" or "\n" not in logged
    if form == "json":
        assert json.loads(logged)["message"].encode(errors="replace") == text.encode(
            errors="replace"
        )


def test_a_text_is_cleaned_once_for_command_line_and_log():
    assert clean("a\x1b[31m\nb") == r"a\x1b[31m\nb"
    assert clean("a\x1b[31m\nb", lines=True) == "a\\x1b[31m\nb"
