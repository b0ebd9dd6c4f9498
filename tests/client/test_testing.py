"""app.testing(): users' own tests, without a node and without waiting."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from tests.acceptance.test_readme import blocks
from tests.support import ROOT, eventually, load_module

from genba import (
    FailJob,
    Genba,
    JobFailed,
    JobTimedOut,
    Limit,
    Retry,
    RetryJob,
    WaitTimeout,
    current_job,
)


@pytest.fixture
def app(tmp_path: Path) -> Genba:
    return Genba(f"sqlite:///{tmp_path}/real.db")


def test_jobs_run_on_demand_and_the_real_database_is_not_touched(app, tmp_path):
    @app.task(name="add")
    def add(x: int, y: int = 1) -> int:
        return x + y

    with app.testing() as q:
        job = add.enqueue(1, y=2)
        assert job.refresh().state == "waiting"
        assert q.run() == [job]
        assert job.refresh().state == "succeeded"
        assert job.result() == 3
        assert [event.kind for event in app.events(job=job)] == ["waiting", "running", "succeeded"]
        assert add(1) == 2
    assert not (tmp_path / "real.db").exists()
    assert app.count(state="any") == 0


def test_time_passes_by_hand_and_nothing_sleeps(app):
    tries: list[int] = []

    @app.task(name="flaky", retry=Retry(times=3, delay="10m", backoff=2))
    def flaky() -> str:
        tries.append(current_job().attempt)
        if len(tries) < 3:
            raise ValueError("not yet")
        return "at last"

    began = time.monotonic()
    with app.testing() as q:
        job = flaky.using(at="+1 hour").enqueue()
        assert q.run() == []
        q.advance("1h")
        assert q.run() == [job]
        assert job.refresh().state == "scheduled"
        before = q.now
        q.run_until_idle()
        assert q.now - before == timedelta(minutes=30)
        assert (job.result(), tries) == ("at last", [1, 2, 3])
        assert [attempt.cause for attempt in job.attempts] == ["exception", "exception", "returned"]
    assert time.monotonic() - began < 30


def test_prune_keeps_no_job_longer_than_its_task_says(app):
    @app.task(name="fleeting", keep=0)
    def fleeting() -> None: ...

    @app.task(name="usual")
    def usual() -> None: ...

    with app.testing() as q:
        gone, kept = fleeting.enqueue(), usual.enqueue()
        q.run()
        assert app.prune() == 1
        assert app.jobs(state="any") == [kept]
        assert app.prune(0) == 1
        kept = fleeting.enqueue()
        app.tasks["fleeting"].set(keep="1h")
        q.run()
        q.advance("59m")
        assert app.prune() == 0
        q.advance("1m")
        assert app.prune() == 1
        assert gone.id != kept.id


def test_a_schedule_can_be_triggered_twice_while_the_clock_stands_still(app):
    @app.task(name="hi")
    def hi() -> int:
        return 1

    with app.testing() as q:
        schedule = app.recur("s", hi.call(), cron="0 3 * * *")
        jobs = [schedule.trigger(), schedule.trigger()]
        assert None not in jobs
        assert q.run() == jobs


def test_failures_are_judged_as_a_node_does(app):
    @app.task(name="bad")
    def bad(how: str) -> None:
        if how == "final":
            raise FailJob("no use")
        if how == "later":
            raise RetryJob(delay="10s")
        raise KeyError("x")

    with app.testing() as q:
        with pytest.raises(JobFailed, match="no use"):
            bad.enqueue("final").result()
        failed = bad.enqueue("x")
        later = bad.using(retry=1).enqueue("later")
        q.run()
        assert (failed.refresh().state, later.refresh().state) == ("failed", "scheduled")
        q.advance("10s")
        assert [job.id for job in q.run()] == [later.id]
        with pytest.raises(WaitTimeout, match="scheduled"):
            bad.using(delay="1h").enqueue("x").result(timeout=60)


def test_a_job_runs_out_of_the_time_that_the_test_lets_pass(app):
    reached: list[str] = []

    @app.task(name="slow", timeout="10m", retry=Retry(times=1, delay="1m"))
    def slow(minutes: int) -> str:
        for _ in range(minutes):
            q.advance("1m")
        reached.append("the end")
        return "in time"

    with app.testing() as q:
        fine, late = slow.enqueue(9), slow.enqueue(11)
        q.run()
        assert fine.refresh().state == "succeeded"
        assert (late.refresh().state, late.attempts[-1].cause) == ("scheduled", "timeout")
        q.run_until_idle()
        assert (late.refresh().state, len(late.attempts)) == ("timed_out", 2)
        with pytest.raises(JobTimedOut):
            late.result()
    assert reached == ["the end"]


def test_a_job_that_tells_progress_does_not_stall(app):
    @app.task(name="steps", stall_timeout="5m")
    def steps(tells: bool) -> None:
        for done in range(4):
            q.advance("3m")
            if tells:
                current_job().progress(done, 4)

    with app.testing() as q:
        lively, silent = steps.enqueue(True), steps.enqueue(False)
        q.run()
        assert lively.refresh().state == "succeeded"
        assert (silent.refresh().state, silent.attempts[-1].cause) == ("timed_out", "stall")


def test_a_job_that_waits_for_another_has_its_own_time(app):
    @app.task(name="inner", timeout="1m")
    def inner() -> None:
        q.advance("2m")

    @app.task(name="outer", timeout="10m")
    def outer() -> str:
        job = inner.enqueue()
        job.wait()
        q.advance("5m")
        return str(job.refresh().state)

    with app.testing() as q:
        job = outer.enqueue()
        q.run()
        assert job.result() == "timed_out"


def test_limits_and_rates_hold_and_time_lets_the_next_ones_start(app):
    running: list[int] = []

    @app.task(name="limited", limits=[Limit("till", 1)], rate="2/m")
    def limited(n: int) -> int:
        running.append(app.count(state="running"))
        return n

    with app.testing() as q:
        jobs = [limited.enqueue(n) for n in range(5)]
        assert len(q.run()) == 2
        q.advance("30s")
        assert len(q.run()) == 1
        q.run_until_idle()
        assert [job.result() for job in jobs] == [0, 1, 2, 3, 4]
    assert running == [1] * 5


def test_what_a_job_enqueues_and_waits_for_runs_too(app):
    @app.task(name="inner")
    def inner(n: int) -> int:
        return n * 2

    @app.task(name="outer")
    def outer(n: int) -> int:
        before = current_job().id
        value = inner.enqueue(n).result()
        assert current_job().id == before
        return value + 1

    @app.task(name="later")
    async def later(n: int) -> int:
        return n

    with app.testing() as q:
        assert outer.enqueue(4).result() == 9
        child = inner.using(after=[outer.enqueue(1)]).enqueue(5)
        q.run()
        assert child.result() == 10
        assert later.enqueue(3).result() == 3

        async def body() -> int:
            job = await later.aenqueue(4)
            await q.arun()
            return await job.aresult()

        assert asyncio.run(body()) == 4


def test_a_job_sees_its_options_as_they_were_given(app):
    seen: list[dict[str, object]] = []

    @app.task(name="plain", limits=[Limit("till", 1)])
    def plain() -> None:
        seen.append(current_job().options)

    @app.task(name="later")
    async def later() -> None:
        seen.append(await current_job().aoptions())

    @app.condition(name="open")
    def is_open(job) -> bool:
        seen.append(job.options)
        return True

    retry = Retry(times=3, delay="10s")
    full = {
        "queue": "slow", "priority": 4, "timeout": 60.0, "grace": 2.5, "stall_timeout": 30.0, "cpu": 9.0,
        "memory": 2**20, "retry": retry, "tags": ("a", "b"), "key": "k", "unique_for": 3600.0, "dedicated": True,
        "ready": ("open",), "on_dependency_failure": "run", "limits": (Limit("other", 2),),
    }  # fmt: skip
    with app.testing() as q:
        parent = later.enqueue()
        again = plain.using(**full, expires="1h").enqueue()
        plain.using(parent=parent, once=True).enqueue()
        q.run()
        assert seen[0] == {"queue": "default", "priority": 0}
        usual = {"queue": "default", "priority": 0, "limits": (Limit("till", 1),)}
        assert seen[1] == {**usual, "parent": parent.id, "once": True}
        assert seen[2] == {name: full[name] for name in seen[2]}
        assert {"timeout", "retry", "ready"} <= seen[2].keys()
        expires = seen[3].pop("expires")
        assert expires == q.now + timedelta(hours=1)
        assert seen[3] == full
        assert again.refresh().state == "succeeded"
        assert (
            plain.using(**{**seen[3], "key": "new"}).enqueue().record.options
            == again.record.options
        )


def test_schedules_make_jobs_as_time_passes(app):
    @app.task(name="report")
    def report() -> None: ...

    with app.testing() as q:
        app.recur("hourly", report.call(), cron="0 * * * *")
        assert len(q.run_until_idle(within="3h")) == 3
        q.advance("1h")
        assert len(q.run()) == 1


_SCHEDULED = """
from genba import Genba, Retry

app = Genba()

@app.task(name="hourly", cron="0 * * * *")
def hourly() -> None: ...

@app.task(name="often", every="10m")
def often() -> None: ...

@app.task(name="flaky", retry=Retry(times=2, delay="100m", backoff=1, cap="1d"))
def flaky() -> None:
    raise ValueError

@app.task(name="report")
def report(month: int = 1) -> None: ...

app.recur("monthly", report.call(month=2), every="30d", base="2026-01-01")
"""


def test_schedules_in_code_are_there_as_a_node_would_have_written_them(tmp_path):
    (tmp_path / "planned.py").write_text(_SCHEDULED)
    app = load_module("planned", tmp_path, "sqlite:///never.db").app

    for _ in range(2):  # each test has its own
        with app.testing() as q:
            assert [one.name for one in app.schedules()] == ["hourly", "monthly", "often"]
            assert [job.task for job in q.run()] == ["often"]  # an interval begins at once
            assert q.run() == []
            q.advance("1h")
            assert {job.task for job in q.run()} >= {"hourly", "often"}
            q.advance("30d")
            q.run()
            assert {job.args["month"] for job in q.enqueued("report")} == {2}


def test_schedules_in_code_run_as_time_passes_and_hold_up_nothing(tmp_path):
    (tmp_path / "planned.py").write_text(_SCHEDULED)
    planned = load_module("planned", tmp_path, "sqlite:///never.db")

    with planned.app.testing() as q:
        job = planned.flaky.enqueue()
        ran = [one.task for one in q.run_until_idle()]
        assert (job.refresh().state, ran.count("flaky")) == ("failed", 3)
        assert 3 <= ran.count("hourly") <= 4  # 200 minutes
        assert ran.count("often") == 21
        assert q.run_until_idle() == []
        assert len([one for one in q.run_until_idle(within="24h") if one.task == "hourly"]) == 24


def test_what_was_enqueued_is_asserted(app):
    @app.task(name="mail")
    def mail(to: str, subject: str = "hello") -> None: ...

    with app.testing() as q:
        first = mail.enqueue("ann")
        mail.enqueue("bob", subject="bye")
        assert q.assert_enqueued("mail", to="ann") == [first]
        assert q.assert_enqueued(mail, subject="hello") == [first]
        q.assert_enqueued(mail, count=2)
        q.assert_enqueued(mail, count=0, to="eve")
        q.assert_enqueued(mail, count=None)
        with pytest.raises(AssertionError, match=r"mail.*eve.*bob"):
            q.assert_enqueued("mail", to="eve")
        with pytest.raises(AssertionError, match="3 jobs"):
            q.assert_enqueued(mail, count=3)


def test_a_clone_may_change_what_a_task_takes_beside_its_names(app):
    @app.task(name="walk")
    def walk(left: int, *rest: int, **more: object) -> None:
        if left:
            current_job().clone(
                left=left - 1, rest=[*rest, left], priority=3, n=left, name="x", more="y"
            )

    @app.task(name="step")
    def step(left: int) -> None:
        current_job().clone(n=1)

    with app.testing() as q:
        walk.enqueue(2, n=0, old=1)
        q.run()
        assert [job.args for job in q.enqueued(walk)] == [
            {"left": 2, "rest": [], "n": 0, "old": 1},
            {"left": 1, "rest": [2], "n": 2, "old": 1, "name": "x", "more": "y"},
            {"left": 0, "rest": [2, 1], "n": 1, "old": 1, "name": "x", "more": "y"},
        ]
        assert [job.priority for job in q.enqueued(walk)] == [0, 3, 3]
        with pytest.raises(JobFailed, match="there is no option 'n'"):
            step.enqueue(1).result()


def test_arguments_may_be_called_like_what_an_assertion_takes(app):
    @app.task(name="work")
    def work(task: str, count: int = 1, self: int = 0) -> None: ...

    @app.task(name="any")
    def anything(**more: object) -> None: ...

    with app.testing() as q:
        jobs = [work.enqueue("x"), work.enqueue("x", 2), work.enqueue("y", 2)]
        assert q.enqueued(work, task="x") == q.assert_enqueued(work, 2, task="x") == jobs[:2]
        assert (
            q.assert_enqueued(work, count=2)
            == q.assert_enqueued(work, 2, count=2, self=0)
            == jobs[1:]
        )
        assert q.assert_enqueued("work", task="x", count=2) == [jobs[1]]
        with pytest.raises(
            AssertionError, match=r"expected 3 jobs of work with {'count': 2}, found 2"
        ):
            q.assert_enqueued(work, 3, count=2)
        anything.enqueue(count=5)
        some = anything.enqueue(count="some")
        assert len(q.assert_enqueued(anything, count=2)) == 2
        assert q.assert_enqueued(anything, count="some") == [some]


def test_arguments_that_python_takes_by_position_are_known_by_name(app):
    seen = []

    @app.condition(name="open")
    def is_open(job) -> bool:
        seen.append(job.args)
        return job.args["tenant"] == "acme"

    @app.task(name="send", ready=["open"], limits=[Limit("tenant:{tenant}", 1)])
    def send(tenant: str, /, text: str = "hello", *rest: int, **more: int) -> dict:
        return current_job().args

    named = {"tenant": "acme", "text": "hello", "rest": [], "n": 1}
    with app.testing() as q:
        job = send.enqueue("acme", n=1)
        send.enqueue("else", "bye", 2, 3)
        assert q.run() == [job]
        assert job.refresh().args == job.result() == named
        assert named in seen
        assert q.assert_enqueued(send, tenant="acme", rest=()) == [job]
        q.assert_enqueued("send", tenant="else", rest=[2, 3], count=1)


@dataclass
class Parcel:
    weight: int


def test_a_task_may_take_what_its_module_defines_after_it(app, monkeypatch):
    with monkeypatch.context() as before:
        before.delitem(globals(), "Parcel")

        @app.task(name="send")
        def send(parcel: Parcel) -> int:
            return parcel.weight

    with app.testing():
        assert send.enqueue(Parcel(7)).result() == 7


def test_explain_does_not_mention_nodes(app):
    @app.task(name="mail", limits=[Limit("post", 1)])
    def mail(more: bool = False) -> str:
        return str(mail.enqueue().explain()) if more else ""

    with app.testing() as q:
        job = mail.using(queue="letters").enqueue(True)
        assert [reason.kind for reason in job.explain().reasons] == ["test"]
        assert "q.run()" in str(job.explain())
        later = mail.using(delay="1h").enqueue()
        assert [reason.kind for reason in later.explain().reasons] == ["scheduled"]
        app.queues["letters"].pause()
        assert [reason.kind for reason in job.explain().reasons] == ["queue_paused"]
        app.queues["letters"].resume()
        q.run(limit=1)
        assert f'bucket "post" is full (held by job {job.id}' in job.result()
        strange = app.enqueue("nobody.has.it")
        assert "this app has no task 'nobody.has.it'" in str(strange.explain())
        q.run()
        assert [reason.kind for reason in strange.explain().reasons] == ["unknown_task"]
        for one in (job, later, strange):
            assert "live" not in str(one.explain())


def test_a_test_leaves_nothing_behind_and_another_starts_empty(app):
    @app.task(name="add")
    def add(x: int) -> int:
        return x

    with app.testing() as q:
        add.enqueue(1)
        folder = Path(q._folder.name)
        assert folder.exists()
    assert not folder.exists()
    with app.testing() as q:
        assert q.run() == []
        assert q.enqueued() == []


def test_the_plugin_gives_a_queue_to_each_test(tmp_path):
    (tmp_path / "shop.py").write_text(
        "from genba import Genba\napp = Genba('sqlite:///never.db')\n"
        "@app.task\ndef add(x: int) -> int:\n    return x + 1\n"
    )
    (tmp_path / "test_shop.py").write_text(
        "import shop\n"
        "def test_one(genba_queue):\n    job = shop.add.enqueue(1)\n    genba_queue.run()\n"
        "    assert job.result() == 2\n"
        "def test_two(genba_queue):\n    assert genba_queue.run() == []\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\ngenba_app = shop:app\npythonpath = .\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:genba", "-p", "genba.pytest_plugin"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)

    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr
    assert not (tmp_path / "never.db").exists()


HOWTO = ROOT / "docs" / "howto"


def test_the_how_to_of_testing_is_true(tmp_path):
    first, fixture, own = blocks("python", HOWTO / "testing.md")
    (tmp_path / "test_tasks.py").write_text(first + "\n\n" + fixture)
    (tmp_path / "test_own.py").write_text("from test_tasks import app, mail\n" + own)
    (tmp_path / "pytest.ini").write_text("[pytest]\ngenba_app = test_tasks:app\npythonpath = .\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:genba", "-p", "genba.pytest_plugin"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)

    assert "8 passed" in ran.stdout, ran.stdout + ran.stderr


def test_the_how_to_of_events_is_true(app, capsys):
    @app.task(name="render")
    def render() -> None:
        raise ValueError("no paint")

    read, resume, handle, hook = blocks("python", HOWTO / "events.md")
    with app.testing() as q:
        names = {"app": app, "print": lambda *words: said.append(words), "__name__": "__main__"}
        said: list[tuple[object, ...]] = []
        exec(handle, names)
        render.enqueue()
        q.run()
        exec(read, names)
        assert ("failed", 1, "ValueError: no paint") in [words[1:] for words in said]
        exec(resume, names)
        exec(hook, names)
        names["convert"].enqueue("x")
        q.run()
        assert "succeeded" in [words[-1] for words in said]
        eventually(lambda: ("render failed: ValueError: no paint",) in said)
    app.close()
