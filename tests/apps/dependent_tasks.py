"""Tasks whose start depends on something; as jobs.py, a node gets a copy of this file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from genba import Genba, Wait, current_job, ready
from genba.options.conditions import Candidate, Ready

app = Genba()


def tell(path: str, *words: object) -> None:
    """One line that is there whatever happens next."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


@app.task
def add(x: int, y: int = 1) -> int:
    return x + y


@app.task
def sum_of_deps() -> int:
    return sum(current_job().deps.values())


@app.task
def fail(text: str) -> None:
    raise RuntimeError(text)


@app.task
def fail_without(path: str) -> str:
    return Path(path).read_text()


@app.task
def wait_for(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.01)
    return path


@app.task
def nap(seconds: float) -> None:
    time.sleep(seconds)


@app.task
def split(count: int) -> int:
    """Leaves the sum to a job that waits in its stead."""
    parts = app.enqueue_many([add.using(parent=current_job()).call(i, 0) for i in range(count)])
    return sum_of_deps.using(after=parts, parent=current_job()).enqueue().id


@app.task
def lead(path: str) -> None:
    wait_for.using(parent=current_job()).enqueue(path)
    while not current_job().should_stop:
        time.sleep(0.01)


# jobs whose conditions hold


@app.condition
def there(job: Candidate) -> bool:
    """Tells that it was asked, and whether the file is there."""
    tell(job.args["path"] + ".asked", job.id)
    return Path(job.args["path"]).exists()


@app.condition
async def there_later(job: Candidate) -> Wait | bool:
    return True if Path(job.args["path"]).exists() else Wait("50ms")


@app.condition(name="moody")
def moody(job: Candidate) -> bool:
    tell(job.args["path"] + ".asked", job.id)
    match Path(job.args["path"]).read_text():
        case "raise":
            raise RuntimeError("not in the mood")
        case "hang":
            time.sleep(60)
        case "die":
            os._exit(3)
    return True


@app.condition
def either(job: Candidate) -> Ready:
    here, path = Path(job.args["path"]), job.args["path"]
    return (
        ready()
        .check(lambda: True)
        .any(
            ready().check(lambda job: job.args["path"] == path).check(lambda: False),
            ready().check(lambda: here.exists() or Wait("50ms")),
        )
    )


@app.task(ready=[there])
def when_there(path: str, word: str = "ran") -> str:
    tell(path + ".ran", current_job().id, current_job().attempt, word)
    return word


@app.task
def go(path: str) -> str:
    return path


@app.task(ready=["#is_open"])
class Shop:
    def is_open(self, job: Candidate) -> bool:
        return Path(job.args["path"]).exists()

    def run(self, path: str) -> str:
        return "sold"


@app.condition
def room(job: Candidate) -> Ready:
    """Two at a time of each path, behind a branch that does not hold."""
    lost = ready().limit_to(1, bucket="lost").check(lambda: False)
    return ready().any(lost, ready().limit_to(2, bucket=job.args["path"]))


@app.task(ready=[room])
def two_at_a_time(path: str, i: int) -> None:
    tell(path, "in", i)
    time.sleep(0.05)
    tell(path, "out", i)


# copies


@app.task
def again(left: int, end: str = "return") -> int:
    job = current_job()
    if left:
        job.clone(left=left - 1, end="return", tags=["copy"])
    match end:
        case "raise":
            raise RuntimeError("not this time")
        case "retry":
            job.retry(delay="1h")
        case "apply":
            job.succeed(left).apply()
        case "transaction":
            with job.transaction():
                job.succeed(left)
    return left


@app.task(max_running=1, max_waiting=1)
def single(path: str, left: int) -> None:
    tell(path, "in", left)
    if left:
        current_job().clone(left=left - 1)
    tell(path, "out", left)


@app.task
def echo(text: str) -> str:
    return text
