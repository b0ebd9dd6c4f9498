"""Development and debugging: --reload, --debug, and one job in the foreground."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support import eventually, genba_command, lines, load_module, run_genba, without_settings

_FIRST = """
import os, sys, time
from genba import FailJob, Genba, current_job
import words

app = Genba()

def tell(path, *said):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, said)) + "\\n").encode())
    os.close(fd)

@app.lifespan
def life():
    tell("lives", "enter", os.getpid())
    yield
    tell("lives", "leave", os.getpid())

@app.task(retry=2)
def say() -> str:
    return words.word

@app.task
def long(path: str) -> str:
    tell(path + ".started", os.getpid())
    while not os.path.exists(path):
        time.sleep(0.01)
    return words.word

@app.task(timeout="200ms")
def overtime() -> str:
    time.sleep(0.6)
    return "done"

@app.task
def stops(x: int) -> int:
    y = x * 2
    breakpoint()
    return y

@app.task(on_exception="hold")
def fails() -> None:
    raise FailJob("no")

@app.task
def waits() -> bool:
    tell("waits", os.getpid())
    while not current_job().should_stop:
        time.sleep(0.01)
    return True
"""


def write(path: Path, text: str) -> None:
    """As an editor does: a new file in place of the old one, with a later time."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    later = (path.stat().st_mtime_ns if path.exists() else time.time_ns()) + 10**9
    os.utime(draft, ns=(later, later))
    draft.replace(path)


@pytest.fixture
def desk(url, start_node, tmp_path):
    """The app of this file, on `url`; and a way to start a node with it."""
    (tmp_path / "words.py").write_text("word = 'one'\n")
    (tmp_path / "work.py").write_text(_FIRST)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        module = load_module("work", tmp_path, url)

    def start(*args: str) -> Any:
        node = start_node("work:app", url, *args)
        eventually(module.app.nodes, within=15)
        return node

    module.start = start
    yield module
    module.app.close()


@pytest.fixture
def genba(url, tmp_path) -> Callable[..., subprocess.CompletedProcess[str]]:
    return partial(run_genba, url, cwd=tmp_path)


# --reload


def test_a_changed_file_is_imported_again_and_running_jobs_end_on_the_old_code(desk, tmp_path):
    node = desk.start("--reload", "--min", "2", "--max", "2")
    gate = tmp_path / "gate"
    old = desk.long.enqueue(str(gate))
    eventually(lambda: lines(f"{gate}.started"), within=10)
    assert desk.say.enqueue().result(timeout=10) == "one"

    write(tmp_path / "words.py", "word = 'two'\n")
    eventually(lambda: "words.py has changed" in node.log, within=10)

    assert desk.say.enqueue().result(timeout=15) == "two"
    assert old.refresh().state == "running"
    gate.touch()
    assert old.result(timeout=10) == "one"
    assert [attempt.cause for attempt in old.attempts] == ["returned"]


def test_a_task_that_is_new_after_a_change_is_known(desk, tmp_path):
    node = desk.start("--reload", "--max", "1")
    job = desk.app.enqueue("work.fresh", 3)
    write(
        tmp_path / "work.py", _FIRST + "\n@app.task\ndef fresh(x: int) -> int:\n    return x + 1\n"
    )

    assert job.result(timeout=15) == 4
    assert "work.py has changed" in node.log


def test_a_queue_that_is_new_after_a_change_is_served(desk, tmp_path):
    desk.start("--reload", "--max", "1")
    job = desk.app.enqueue_many([desk.app.call("work.fresh", (3,), options={"queue": "away"})])[0]
    write(
        tmp_path / "work.py",
        _FIRST + "\n@app.task(queue='away')\ndef fresh(x: int) -> int:\n    return x + 1\n",
    )

    assert job.result(timeout=15) == 4
    eventually(
        lambda: (
            [sorted(node.queues) for node in desk.app.overview().nodes] == [["away", "default"]]
        ),
        within=5,
    )


def test_a_change_that_breaks_the_app_is_reported_and_mended_by_the_next(desk, tmp_path):
    node = desk.start("--reload", "--max", "1")
    assert desk.say.enqueue().result(timeout=10) == "one"
    write(tmp_path / "work.py", _FIRST + "\nthis is no python\n")
    eventually(lambda: "SyntaxError" in node.log and "waiting for a change" in node.log, within=10)
    job = desk.say.enqueue()
    write(tmp_path / "words.py", "word = 'three'\n")
    write(tmp_path / "work.py", _FIRST)

    assert job.result(timeout=15) == "three"
    assert node.stop() == 0


def test_without_reload_nothing_is_watched(desk, tmp_path):
    node = desk.start("--max", "1")
    write(tmp_path / "words.py", "word = 'two'\n")
    for _ in range(3):
        assert desk.say.enqueue().result(timeout=10) == "one"
    assert "has changed" not in node.log


# --debug


def test_debug_is_one_worker_without_timeouts_and_with_a_loud_log(desk):
    node = desk.start("--debug")
    jobs = [desk.overtime.enqueue() for _ in range(2)]

    assert [job.result(timeout=10) for job in jobs] == ["done", "done"]
    assert len({job.attempts[0].pid for job in jobs}) == 1
    assert f"job {jobs[0].id} (work.overtime), attempt 1: given to worker 1" in node.log
    assert f"job {jobs[0].id}, attempt 1: succeeded in 0.6" in node.log


def test_debug_refuses_to_be_more_than_one_worker(genba, desk):
    done = genba("node", "start", "work:app", "--debug", "--max", "4")

    assert done.returncode == 2
    assert "--debug means one worker" in done.stderr


# job run --here


def test_a_job_runs_in_the_foreground_and_its_end_is_written(desk, genba, tmp_path):
    job = desk.say.enqueue()
    done = genba("job", "run", str(job.id), "--here", "--app", "work:app", "--json")

    shown = json.loads(done.stdout)
    assert (done.returncode, shown["state"], shown["result"]) == (0, "succeeded", "one")
    assert [(one["number"], one["cause"]) for one in shown["attempts"]] == [(1, "returned")]
    assert job.result() == "one"
    assert desk.app.nodes() == []
    assert [words[0] for words in lines(tmp_path / "lives")] == ["enter", "leave"]


def test_a_job_that_is_not_due_and_one_that_is_held_run_too(desk, genba):
    later, held = desk.say.using(delay="1h").enqueue(), desk.say.enqueue()
    held.hold("look at it")

    for job in (later, held):
        assert genba("job", "run", str(job.id), "--here", "--app", "work:app").returncode == 0
        assert job.refresh().state == "succeeded"


def test_an_exception_in_the_foreground_is_written_like_any_other(desk, genba):
    job = desk.fails.enqueue()
    done = genba("job", "run", str(job.id), "--here", "--app", "work:app")

    assert done.returncode == 1
    assert "FailJob" in done.stdout
    assert (job.refresh().state, job.attempts[0].cause) == ("failed", "exception")


@pytest.mark.parametrize(
    ("bring", "words"),
    [
        ("run", "is succeeded: `genba job requeue {id}` lets it run again"),
        ("block", "is blocked: it waits for other jobs"),
        ("lose", "there is no job {id}"),
    ],
)
def test_a_job_that_cannot_be_run_here_gets_a_reason(desk, genba, bring, words):
    job = desk.say.enqueue()
    if bring == "run":
        genba("job", "run", str(job.id), "--here", "--app", "work:app")
    elif bring == "block":
        job = desk.say.using(after=[job]).enqueue()
    id = 987654 if bring == "lose" else job.id
    done = genba("job", "run", str(id), "--here", "--app", "work:app")

    assert done.returncode in (1, 4)
    assert words.format(id=id) in done.stderr


def test_a_running_job_is_left_to_its_node(desk, genba, tmp_path):
    desk.start("--max", "1")
    job = desk.long.enqueue(str(tmp_path / "gate"))
    eventually(lambda: job.refresh().state == "running", within=10)
    done = genba("job", "run", str(job.id), "--here", "--app", "work:app")
    (tmp_path / "gate").touch()

    assert "is running: a node has it" in done.stderr
    assert job.result(timeout=10) == "one"
    assert len(job.attempts) == 1


def test_no_node_gets_a_job_while_a_person_has_it_in_the_debugger(desk, url, tmp_path):
    job = desk.stops.enqueue(21)
    with Terminal(
        url, tmp_path, "job", "run", str(job.id), "--here", "--app", "work:app", GENBA_LEASE="1"
    ) as person:
        person.expect("(Pdb)")
        desk.start("--max", "2", "--name", "other")
        time.sleep(3)  # thrice the lease: the beats go on while the debugger waits
        assert job.refresh().state == "running"
        person.say("p y")
        person.expect("42")
        person.say("y = 7")
        person.expect("(Pdb)")
        person.say("c")
        assert person.end() == 0

    assert job.result(timeout=5) == 7
    assert [attempt.cause for attempt in job.attempts] == ["returned"]


@pytest.mark.parametrize("state", ["waiting", "held"])
def test_a_run_that_is_broken_off_leaves_the_job_as_it_was(desk, url, tmp_path, state):
    job = desk.stops.enqueue(1)
    if state == "held":
        job.hold("ask Ann")
    with Terminal(
        url, tmp_path, "job", "run", str(job.id), "--here", "--app", "work:app"
    ) as person:
        person.expect("(Pdb)")
        person.say("q")
        assert person.end() == 1

    assert job.refresh().state == state
    assert job.reason == ("ask Ann" if state == "held" else None)
    assert (job.record.retries, job.record.crashes) == (0, 0)


def test_a_cancelled_job_in_the_foreground_sees_it_and_ends_cancelled(desk, url, tmp_path):
    job = desk.waits.enqueue()
    with Terminal(
        url, tmp_path, "job", "run", str(job.id), "--here", "--app", "work:app", GENBA_LEASE="1"
    ) as person:
        eventually(lambda: lines(tmp_path / "waits"), within=15)
        job.cancel()
        assert person.end() == 1

    assert job.refresh().state == "cancelled"


class Terminal:
    """A person at a terminal with one `genba` command."""

    def __init__(self, url: str, cwd: Path, *args: str, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        settings = {**without_settings(os.environ), "GENBA_URL": url, "TERM": "dumb", **env}
        self._process = subprocess.Popen(
            genba_command(*args), cwd=cwd, env=settings, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)
        print(self._seen)

    def _read(self) -> None:
        with suppress(OSError):  # nothing there, or it has hung up
            text = os.read(self._ours, 1 << 16).decode(errors="replace")
            self._seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)

    def expect(self, text: str) -> None:
        """Read until it is there, and forget all up to it."""

        def found() -> bool:
            self._read()
            return text in self._seen

        eventually(found, within=20)
        self._seen = self._seen.partition(text)[2]

    def say(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def end(self) -> int:
        def ended() -> bool:
            self._read()
            return self._process.poll() is not None

        eventually(ended, within=20)
        return int(self._process.returncode)
