"""Tasks are typed end to end: mypy sees wrong arguments, wrong results and wrong names, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import genba

# A line that must be refused ends with the code of its error.
CALLS = """
from datetime import datetime
from typing import assert_type

from genba import Call, Dep, Genba, Group, Job, Limit, Retry, RunningJob, Task, current_job

app = Genba("sqlite:///x.db", namespace="shop", defaults={"retry": 3})
unknown = Genba(pool=3)  # [call-arg]


@app.task
def add(x: int, y: int = 1) -> int:
    return x + y


@app.task(queue="slow", retry=Retry(times=2))
async def fetch(url: str, *, tries: int = 3) -> bytes:
    return b""


class Render:
    def run(self, scene: str) -> list[str]:
        return [scene]


render = app.task(Render)  # mypy takes no notice of what a decorator makes of a class


@app.task(timeout="5m")
def plain() -> None: ...


# calling just calls
assert_type(add(1, 2), int)
add("1")  # [arg-type]

# enqueue
assert_type(add.enqueue(1, y=2), Job[int])
assert_type(add.enqueue(1).result(timeout=5), int)
assert_type(fetch.enqueue("x", tries=1).result(), bytes)
assert_type(render.enqueue("duck"), Job[list[str]])
assert_type(plain.enqueue(), Job[None])
add.enqueue()  # [call-arg]
add.enqueue("one")  # [arg-type]
add.enqueue(1, 2, 3)  # [call-arg]
add.enqueue(1, z=2)  # [call-arg]
fetch.enqueue("x", 3)  # [call-arg]
render.enqueue(5)  # [arg-type]
plain.enqueue(1)  # [call-arg]
text: str = add.enqueue(1).result()  # [assignment]

# using keeps the types
assert_type(add.using(priority=3).using(tags=["x"]).enqueue(1), Job[int])
add.using(priority=3).enqueue("one")  # [arg-type]
add.using(priority=3).enqueu(1)  # [attr-defined]
number: str = fetch.using(delay=1).enqueue("x").result()  # [assignment]

# calls and groups
assert_type(add.call(1), Call[int])
assert_type(app.enqueue_many([add.call(i) for i in range(3)]), Group[int])
assert_type(app.enqueue_many([add.call(1)])[0].result(), int)
add.call("one")  # [arg-type]
app.enqueue_many([1, 2])  # [arg-type]
app.enqueue_many(add.call(1))  # [arg-type]

# twins


async def twins() -> None:
    job = await add.aenqueue(1)
    assert_type(job, Job[int])
    assert_type(await job.aresult(), int)
    assert_type(await fetch.using(priority=1).aenqueue("x"), Job[bytes])
    await add.aenqueue("one")  # [arg-type]
    assert_type(await fetch("x"), bytes)


# handles
job = add.enqueue(1)
assert_type(job.id, int)
assert_type(job.created, bool)
assert_type(job.enqueued, datetime)
assert_type(job.cancel(), bool)
assert_type(current_job(), RunningJob)
job.stat  # [attr-defined]
job.wait(timeout=object())  # [arg-type]
app.jobs(stat="failed")  # [call-arg]
Dep(job, on="sometimes")  # [arg-type]
Limit("gpu", "two")  # [arg-type]


def takes_any_task(task: Task[..., int]) -> None: ...


takes_any_task(add)
takes_any_task(fetch)  # [arg-type]
"""


def test_mypy_refuses_exactly_the_wrong_lines(tmp_path):
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--hide-error-context",
        "--cache-dir",
    ]
    source = Path(genba.__file__).parents[1]
    ran = subprocess.run(
        [*command, str(tmp_path / "cache"), "--config-file", "", str(file)],
        cwd=tmp_path,
        env={"MYPYPATH": str(source), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )

    errors = re.findall(r"^calls\.py:(\d+): error: .*\[([\w-]+)\]$", ran.stdout, re.MULTILINE)
    marked = [
        (str(i), re.search(r"# \[([\w-]+)\]$", line))
        for i, line in enumerate(CALLS.splitlines(), 1)
    ]
    wanted = [(number, mark[1]) for number, mark in marked if mark]
    assert errors == wanted, ran.stdout + ran.stderr
