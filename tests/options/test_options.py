from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from functools import reduce
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genba.domain.duration import DAY, HOUR, MINUTE, SECOND
from genba.domain.retry import Retry
from genba.errors import BadOption
from genba.options.merge import build_options
from genba.options.snapshot import OptionsSnapshot, encode_snapshot
from genba.options.table import (
    ALIASES,
    ALL_OPTIONS,
    DEFAULT_OPTIONS,
    DEFAULT_POLICY,
    JOB_OPTIONS,
    POLICY_OPTIONS,
    Options,
    Policy,
)
from genba.options.values import Dep, Limit, Rate

NOW = 1_767_225_600_000_000  # 2026-01-01


def using(**given):
    return Options.build(given, DEFAULT_OPTIONS)


def layered(*levels):
    """Build the options of an app, a task and a call, one over the other."""
    return reduce(lambda base, level: Options.build(level, base), levels, DEFAULT_OPTIONS)


def policy(**given):
    return Policy.build(given, DEFAULT_POLICY)


def test_the_defaults_are_the_documented_ones():
    assert (DEFAULT_OPTIONS.queue, DEFAULT_OPTIONS.priority, DEFAULT_OPTIONS.timeout) == (
        "default",
        0,
        None,
    )
    assert (DEFAULT_OPTIONS.retry, DEFAULT_OPTIONS.grace) == (
        Retry(times=0, delay="10s", backoff=2, cap="1h"),
        10 * SECOND,
    )
    assert (DEFAULT_OPTIONS.on_conflict, DEFAULT_OPTIONS.on_dependency_failure) == (
        "return",
        "cancel",
    )
    assert (DEFAULT_POLICY.max_crashes, DEFAULT_POLICY.keep, DEFAULT_POLICY.progress_every) == (
        3,
        7 * DAY,
        SECOND // 2,
    )
    assert DEFAULT_POLICY.on_exception == "retry"


def test_options_are_read_into_one_form():
    read = using(
        queue="render",
        priority=-3,
        retry=5,
        timeout="10m",
        grace=0,
        stall_timeout=timedelta(minutes=1),
        memory="512M",
        cpu="1:00:00",
        on_dependency_failure="hold",
        key="r:7",
        unique_for="1h",
        on_conflict="replace",
        dedicated=True,
        tags=["a", "b", "a"],
        parent=3,
    )
    assert (read.queue, read.priority, read.retry, read.grace) == ("render", -3, Retry(times=5), 0)
    assert (read.timeout, read.stall_timeout, read.cpu, read.unique_for) == (
        10 * MINUTE,
        MINUTE,
        HOUR,
        HOUR,
    )
    assert (read.memory, read.tags, read.key, read.parent) == (512 * 1024**2, ("a", "b"), "r:7", 3)
    assert (read.on_conflict, read.on_dependency_failure, read.dedicated) == (
        "replace",
        "hold",
        True,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue", ""), ("queue", "a b"), ("queue", "1a"), ("queue", None), ("queue", "x" * 201), ("queue", "a\n"),
        ("priority", True), ("priority", 1.0), ("priority", "1"), ("priority", 2**31), ("priority", None),
        ("nice", 21), ("nice", -21), ("nice", False),
        ("at", "soon"), ("at", True), ("delay", timedelta(-1)), ("delay", -1), ("delay", "tomorrow"), ("delay", True),
        ("expires", "soon"), ("expires", 0), ("expires", -1), ("expires", True),
        ("retry", True), ("retry", -2), ("retry", "3"), ("retry", {"tries": 3}),
        ("timeout", 0), ("timeout", -1), ("timeout", True), ("timeout", "x"), ("grace", None), ("grace", -1),
        ("stall_timeout", 0), ("cpu", 0), ("memory", 0), ("memory", "5 apples"), ("memory", True), ("memory", 1.5),
        ("after", "x"), ("after", True), ("after", [None]), ("on_dependency_failure", "ignore"),
        ("key", ""), ("key", "x" * 201), ("key", 7), ("key", "a\0"), ("key", "\ud800"),
        ("once", 1), ("once", "args"), ("once", None), ("unique_for", 0), ("on_conflict", "keep"),
        ("dedicated", 1), ("tags", "ab"), ("tags", ["x" * 101]), ("tags", [1]), ("tags", [""]), ("tags", {"a": 1}),
        ("parent", "x"), ("parent", True),
    ],
)  # fmt: skip
def test_an_ill_typed_option_is_refused_by_name(name, value):
    with pytest.raises(BadOption, match="tag|dependency" if name in ("tags", "after") else name):
        using(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "1x"), ("name", None), ("title", ""), ("on_exception", "ignore"), ("explicit_outcome", 1),
        ("at_most_once", "yes"), ("max_crashes", 0), ("max_crashes", True), ("concurrency", 0), ("keep", -1),
        ("progress_every", None),
    ],
)  # fmt: skip
def test_an_ill_typed_policy_is_refused_by_name(name, value):
    with pytest.raises(BadOption, match=name):
        policy(**{name: value})


def test_a_policy_is_read_into_one_form():
    read = policy(
        name="a.b:c#d-e", title="A", keep=None, max_crashes=1, concurrency=1, progress_every=0
    )
    assert (read.name, read.keep, read.max_crashes, read.concurrency) == ("a.b:c#d-e", None, 1, 1)
    assert read.progress_every == 0


def test_an_unknown_option_is_refused_with_a_proposal():
    with pytest.raises(BadOption, match="no option 'timout'; did you mean timeout"):
        using(timout=3)
    with pytest.raises(BadOption, match=r"no option 'zzz'$"):
        build_options({"zzz": 1})
    with pytest.raises(BadOption, match="did you mean max_crashes"):
        policy(max_crash=1)


def test_policy_is_refused_where_only_job_options_count():
    with pytest.raises(BadOption, match=r"keep is a policy of the task; set it in @app.task"):
        using(keep="1d")


def test_conditions_of_a_start_are_read_and_checked():
    options, read = build_options(
        {
            "limits": [Limit("gpu", 1)],
            "ready": ["a.b"],
            "max_running": 0,
            "max_waiting": 3,
            "exclusive": True,
        }
        | {
            "rate": "5/s",
            "fair_by": "tenant",
            "cron": "0 3 * * *",
            "tz": "Europe/Zurich",
            "on_final": "x.y",
        }
    )
    assert read.on_final == "x.y"
    assert (options.limits, options.ready) == ((Limit("gpu", 1),), ("a.b",))
    assert (read.max_running, read.max_waiting, read.exclusive, read.rate) == (
        None,
        3,
        True,
        Rate(None, "5/s"),
    )
    assert (policy(every=-1).every, policy(every="12h").every) == (-1, 12 * HOUR)
    assert (policy(every=0).every, policy(every=None).every) == (None, None)
    contradiction = {"cron": "* * * * *", "every": 5}
    alone = build_options({"limits": Limit("gpu", 1), "ready": "a.b"})[0]
    assert (alone.limits, alone.ready) == (options.limits, options.ready)
    assert build_options({"limits": Rate("x", "5/s")})[0].limits == (Rate("x", "5/s"),)
    strange = (
        {"limits": "gpu"},
        {"limits": ["gpu"]},
        {"ready": "not a name"},
        {"ready": 3},
        {"tz": "Mars/Base"},
    )
    for bad in (contradiction, *strange, {"rate": "x"}, {"on_final": 3}):
        with pytest.raises(BadOption):
            build_options(bad)


@pytest.mark.parametrize(
    "given",
    [
        {"priority": 0, "nice": 0},
        {"at": "now", "delay": 0},
        {"key": "a", "once": True},
        {"key": "a", "once": "waiting"},
    ],
)
def test_contradictions_are_refused(given):
    with pytest.raises(BadOption, match="exclude each other"):
        using(**given)


@given(st.integers(-20, 20))
def test_nice_is_priority_upside_down(nice):
    assert using(nice=nice).priority == -nice


def test_the_call_wins_over_the_task_and_the_task_over_the_app():
    merged = layered(
        {"retry": 1, "queue": "a", "priority": 1}, {"retry": 2, "nice": 5}, {"retry": 3}
    )
    assert (merged.retry, merged.queue, merged.priority) == (Retry(times=3), "a", -5)


def test_the_nearer_level_says_what_makes_a_job_unique():
    assert layered({}, {"once": True}, {"key": "a"}).once is False
    assert layered({}, {"key": "a"}, {"once": "task"}).key is None
    assert layered({}, {"once": True}, {"key": None}).once is True


def test_a_decorator_takes_options_and_policy_side_by_side():
    base = Options.build({"queue": "slow"}, DEFAULT_OPTIONS)
    options, read = build_options({"name": "render", "timeout": 5, "keep": "1d"}, base)
    assert (options.queue, options.timeout, read.name, read.keep) == (
        "slow",
        5 * SECOND,
        "render",
        DAY,
    )


def test_nothing_given_changes_nothing():
    assert Options.build({}, DEFAULT_OPTIONS) is DEFAULT_OPTIONS


@pytest.mark.parametrize(
    ("given", "due"),
    [
        ({}, None),
        ({"at": "now"}, NOW),
        ({"at": "+1 hour"}, NOW + HOUR),
        ({"at": timedelta(hours=1)}, NOW + HOUR),
        ({"at": timedelta(seconds=-5)}, NOW),
        ({"delay": "90s"}, NOW + 90 * SECOND),
        ({"delay": 0}, NOW),
        ({"at": datetime(2026, 1, 2, tzinfo=UTC)}, NOW + DAY),
        ({"at": "2026-01-02 01:00"}, NOW + DAY),
    ],
)
def test_a_due_moment_is_counted_from_the_enqueue(given, due):
    assert using(**given).due_at(NOW, ZoneInfo("Europe/Zurich")) == due


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ({}, None),
        ({"expires": "10m"}, NOW + 10 * MINUTE),
        ({"expires": 60}, NOW + MINUTE),
        ({"expires": "10m", "delay": "1h"}, NOW + HOUR + 10 * MINUTE),
        ({"expires": "10m", "at": "-1h"}, NOW + 10 * MINUTE),
        ({"expires": "+10m", "delay": "1m"}, NOW + 10 * MINUTE),
        ({"expires": datetime(2026, 1, 2, tzinfo=UTC)}, NOW + DAY),
        ({"expires": "2026-01-02T00:00Z"}, NOW + DAY),
    ],
)
def test_a_job_expires_some_time_after_it_may_start_or_at_a_moment(given, end):
    assert using(**given).expires_at(NOW) == end


def test_dependencies_may_be_ids_handles_or_calls():
    call = object()
    assert using(after=[7, call, Dep(9, on="finished")]).after == (
        Dep(7),
        Dep(call),
        Dep(9, on="finished"),
    )
    assert using(after=7).after == (Dep(7),)
    assert using(after=Dep(7)).after == (Dep(7),)
    assert using(after=None).after == ()


@pytest.mark.parametrize(
    ("text", "size"),
    [("100", 100), ("1K", 1024), ("1.5 GiB", 3 * 2**29), ("2gb", 2**31), ("7B", 7), (4096, 4096)],
)
def test_memory_is_bytes_or_a_size(text, size):
    assert using(memory=text).memory == size


def test_a_connection_is_neither_shown_nor_compared():
    assert using(conn=object()) == DEFAULT_OPTIONS
    assert "object" not in repr(using(conn=object()))


# -- snapshots


def test_defaults_need_no_snapshot():
    assert encode_snapshot(DEFAULT_OPTIONS, DEFAULT_POLICY) is None
    assert (
        encode_snapshot(
            using(queue="a", priority=3, key="x", tags=["y"]), policy(name="a", title="b")
        )
        is None
    )
    assert OptionsSnapshot.read(None) == OptionsSnapshot.of(DEFAULT_OPTIONS, DEFAULT_POLICY)


def test_a_snapshot_has_only_what_differs():
    assert (
        encode_snapshot(using(timeout=5, once="task"), policy(keep=None))
        == b'{"timeout":5000000,"keep":null,"once":"task"}'
    )


seconds = st.integers(1, 10**6)
given_options = st.fixed_dictionaries(
    {},
    optional={
        "timeout": seconds,
        "grace": seconds,
        "stall_timeout": seconds,
        "retry": st.integers(-1, 9)
        | st.builds(Retry, times=st.integers(0, 5), delay=seconds, backoff=st.floats(1, 9)),
        "memory": seconds,
        "cpu": seconds,
        "dedicated": st.booleans(),
        "on_dependency_failure": st.sampled_from(["cancel", "run", "hold"]),
        "unique_for": seconds,
        "once": st.sampled_from([False, True, "task", "waiting"]),
        "max_crashes": st.integers(1, 9),
        "on_exception": st.sampled_from(["retry", "fail", "hold"]),
        "at_most_once": st.booleans(),
        "explicit_outcome": st.booleans(),
        "keep": st.none() | seconds,
    },
)


@given(given_options)
def test_a_snapshot_reads_back_as_it_was_written(given):
    options, read = build_options(given)
    back = OptionsSnapshot.read(encode_snapshot(options, read))
    assert back == OptionsSnapshot.of(options, read)
    assert back.retry_rule() == options.retry


def test_a_snapshot_of_a_newer_version_can_be_read():
    assert OptionsSnapshot.read(b'{"timeout":5,"colour":"red"}').timeout == 5


# -- the table


def test_each_row_of_the_table_is_a_field_or_an_alias_of_one():
    assert {ALIASES.get(name, name) for name in JOB_OPTIONS} == {f.name for f in fields(Options)}
    assert set(POLICY_OPTIONS) == {f.name for f in fields(Policy)}
    assert set(OptionsSnapshot.__struct_fields__) - {"trace"} <= set(ALL_OPTIONS)
