"""Jobs that wait for jobs, hooks that run at each end, handlers that run with the nodes."""

from __future__ import annotations

import pytest
from tests.support import eventually, lines, load_module

from genba import JobFailed

MODULE = """
import os
from genba import Genba, Limit, current_job

app = Genba()

def tell(path, *words):
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)

@app.task
def nest(depth: int) -> int:
    return 0 if depth == 0 else nest.enqueue(depth - 1).result(timeout=60) + 1

@app.task
async def nest_later(depth: int) -> int:
    return 0 if depth == 0 else await (await nest_later.aenqueue(depth - 1)).aresult(timeout=60) + 1

@app.task(limits=[Limit("one at a time", 1)])
def greedy(depth: int) -> int:
    return 0 if depth == 0 else greedy.enqueue(depth - 1).result(timeout=60) + 1

def note(job):
    tell("final", job.id, job.state, os.getpid())
    if job.task == "company.stubborn" and len(open("final").readlines()) < 3:
        raise RuntimeError("not yet")

@app.task(on_final=note)
def hooked(how: str) -> str:
    if how == "fail":
        raise ValueError("as wished")
    return how

@app.task(on_final=note)
def stubborn() -> None: ...

@app.on("done")
def done(event):
    tell("handled", event.kind, event.job_id, os.getpid(), event.job.refresh().state)
    raise RuntimeError("a handler that raises")

@app.on("workerSpawn")
def spawned(event):
    tell("spawned", event.data["workers"][0]["pid"])
"""


@pytest.fixture
def company(url, tmp_path, start_node):
    (tmp_path / "company.py").write_text(MODULE)
    module = load_module("company", tmp_path, url)
    node = start_node("company:app", url, "--max", "1", "--name", "one")
    eventually(module.app.nodes, within=15)
    yield module, node, tmp_path
    module.app.close()


def test_regression_25_nested_waits_with_one_slot_do_not_deadlock(company):
    module, _, _ = company

    assert module.nest.enqueue(3).result(timeout=30) == 3
    assert module.nest_later.enqueue(2).result(timeout=30) == 2
    with pytest.raises(JobFailed, match="WaitWouldDeadlock"):
        module.nest.enqueue(12).result(timeout=60)
    with pytest.raises(JobFailed, match=r"WaitWouldDeadlock.*one at a time"):
        module.greedy.enqueue(1).result(timeout=30)


def test_a_hook_gets_every_end_and_handlers_run_with_the_node(company):
    module, node, folder = company
    fine, bad, never = (
        module.hooked.enqueue("fine"),
        module.hooked.enqueue("fail"),
        module.hooked.using(delay="1h").enqueue("no"),
    )
    never.cancel("not needed")
    stubborn = module.stubborn.enqueue()

    def ends() -> dict[int, str]:
        return {int(id): state for id, state, _ in lines(folder / "final")}

    jobs = {fine.id: "succeeded", bad.id: "failed", never.id: "cancelled", stubborn.id: "succeeded"}
    eventually(lambda: jobs.items() <= ends().items(), within=20)
    eventually(
        lambda: [line[0] for line in lines(folder / "final")].count(str(stubborn.id)) >= 1,
        within=20,
    )

    handled = eventually(
        lambda: [one for one in lines(folder / "handled") if int(one[1]) == fine.id], within=10
    )
    assert [(one[0], one[3]) for one in handled] == [("succeeded", "succeeded")]
    assert int(handled[0][2]) in node.tree()
    assert int(handled[0][2]) not in {int(line[2]) for line in lines(folder / "final")}
    assert eventually(lambda: lines(folder / "spawned"), within=10)
