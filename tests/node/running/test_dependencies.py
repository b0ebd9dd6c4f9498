"""Dependencies between jobs, and conditions; one node for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.storage.builders import rows
from tests.support import NodeProcess, eventually, lines, load_app

from genba import Dep, Genba, Limit, Rate
from genba.errors import BadOption
from genba.storage.jobs.conditions import check_key


@pytest.fixture(scope="module")
def dependent_tasks(home: tuple[str, Path]) -> Iterator[Any]:
    """The app as a client has it, with one node at work."""
    url, folder = home
    with ExitStack() as stack:
        module = load_app("dependent_tasks", url, folder)
        stack.callback(module.app.close)
        node = NodeProcess.start(
            "dependent_tasks:app", url, "--max", "4", "--name", "node", cwd=folder
        )
        stack.callback(lambda: print(node.log))
        stack.callback(node.end)
        eventually(module.app.nodes, within=60)
        yield module


# jobs after jobs


def test_a_graph_is_enqueued_at_once_in_any_order_and_runs_in_its_own(dependent_tasks):
    first = dependent_tasks.add.call(1)
    second = dependent_tasks.add.using(after=first).call(2)
    last = dependent_tasks.sum_of_deps.using(after=[first, Dep(second, on="finished")]).call()

    jobs = dependent_tasks.app.enqueue_many([last, second, first])

    assert jobs.wait(timeout=10)[0].result() == (1 + 1) + (2 + 1)
    assert [job.task for job in jobs] == [
        "dependent_tasks.sum_of_deps",
        "dependent_tasks.add",
        "dependent_tasks.add",
    ]


def test_a_job_runs_after_a_group_and_knows_its_results(dependent_tasks):
    parts = dependent_tasks.app.enqueue_many([dependent_tasks.add.call(i) for i in range(20)])

    for after in (parts, [parts], [parts[0], parts[1:]], Dep(parts, on="finished")):
        assert dependent_tasks.sum_of_deps.using(after=after).enqueue().result(timeout=10) == sum(
            range(1, 21)
        )

    progress = parts.progress
    assert (progress, progress.done, progress.total, progress.states) == (
        100,
        20,
        20,
        {"succeeded": 20},
    )


def test_a_group_is_cancelled_with_what_runs_in_it(dependent_tasks, tmp_path):
    gate = tmp_path / "gate"
    group = dependent_tasks.app.enqueue_many(
        [dependent_tasks.wait_for.call(str(gate)), dependent_tasks.add.using(delay="1h").call(1)]
    )
    eventually(lambda: group[0].refresh().state == "running")
    assert group.progress == 0

    assert group.cancel("not needed") == 2

    assert [job.refresh().state for job in group.wait(timeout=10)] == ["cancelled", "cancelled"]
    assert group.cancel() == 0


def test_a_failed_graph_goes_on_from_what_failed(dependent_tasks, tmp_path):
    path = tmp_path / "there"
    first = dependent_tasks.add.call(1)
    second = dependent_tasks.fail_without.using(after=first).call(str(path))
    third = dependent_tasks.add.using(after=second).call(3)
    graph = dependent_tasks.app.enqueue_many(
        [first, second, third, dependent_tasks.add.using(after=third).call(4)]
    )
    graph.wait(timeout=10)
    assert [job.refresh().state for job in graph] == [
        "succeeded",
        "failed",
        "cancelled",
        "cancelled",
    ]
    assert graph[2].reason == f"dependency failed: job {graph[1].id} ended failed"

    path.write_text("now")
    assert graph.requeue() == 1

    assert {job.refresh().state for job in graph.wait(timeout=10)} == {"succeeded"}
    assert [len(job.attempts) for job in graph] == [1, 2, 1, 1]


def test_regression_24_a_parent_with_a_child_that_timed_out_comes_to_an_end(dependent_tasks):
    child = dependent_tasks.nap.using(timeout="100ms", grace="100ms").enqueue(30)
    waits = dependent_tasks.add.using(after=child).enqueue(1)
    any_end = dependent_tasks.add.using(after=Dep(child, on="finished")).enqueue(1)

    assert waits.wait(timeout=10).state == "cancelled"
    assert waits.reason == f"dependency failed: job {child.id} ended timed_out"
    assert any_end.result(timeout=10) == 2


def test_a_parent_waits_for_its_children_without_holding_a_slot(dependent_tasks):
    parent = dependent_tasks.split.enqueue(10)

    last = dependent_tasks.app.job(parent.result(timeout=10))

    assert last.result(timeout=10) == sum(range(10))
    assert (
        len(dependent_tasks.app.jobs(parent=parent, state="any"))
        == dependent_tasks.app.count(parent=parent.id, state="any")
        == 11
    )


def test_a_cancelled_parent_takes_its_running_child_with_it(dependent_tasks, tmp_path):
    parent = dependent_tasks.lead.enqueue(str(tmp_path / "never"))
    child = eventually(lambda: dependent_tasks.app.jobs(parent=parent, state="running"), within=10)[
        0
    ]

    parent.cancel("enough")

    assert child.wait(timeout=10).state == "cancelled"
    assert child.reason == f"parent ended: job {parent.id} ended cancelled"


# conditions


def test_a_job_starts_when_its_condition_says_yes_and_was_asked_without_an_attempt(
    dependent_tasks, tmp_path
):
    path = tmp_path / "file"
    job = dependent_tasks.when_there.enqueue(str(path))
    eventually(lambda: len(lines(f"{path}.asked")) >= 2)
    eventually(lambda: job.refresh().state == "waiting")  # while it is asked, a node has it
    assert job.attempts == []

    path.touch()

    assert job.result(timeout=10) == "ran"
    assert lines(f"{path}.ran") == [[str(job.id), "1", "ran"]]
    assert [attempt.number for attempt in job.attempts] == [1]


def test_equal_questions_are_asked_once_for_all(dependent_tasks, tmp_path):
    path = tmp_path / "file"
    group = dependent_tasks.app.enqueue_many(
        [dependent_tasks.when_there.call(str(path)) for _ in range(50)]
    )
    eventually(lambda: len(lines(f"{path}.asked")) >= 2)
    assert len(lines(f"{path}.asked")) < 5

    path.touch()

    group.wait(timeout=10)
    assert len(lines(f"{path}.ran")) == 50
    assert len(lines(f"{path}.asked")) < 10


@pytest.mark.parametrize(
    "condition", ["dependent_tasks.there_later", "dependent_tasks.either", "moody"]
)
def test_conditions_are_functions_coroutines_and_chains(dependent_tasks, tmp_path, condition):
    path = tmp_path / "file"
    if condition == "moody":
        path.write_text("fine")
    job = dependent_tasks.go.using(ready=[condition]).enqueue(str(path))
    if condition != "moody":
        eventually(lambda: dependent_tasks.app.store.conditions.check(key_of(job)).said is not None)
        path.touch()
    assert job.result(timeout=10) == str(path)


def key_of(job: Any) -> str:
    record = job.refresh().record
    return check_key(
        record.task, msgspec.json.decode(record.options)["ready"], record.args, record.options
    )


def test_a_class_may_have_its_own_condition(dependent_tasks, tmp_path):
    job = dependent_tasks.Shop.enqueue(str(tmp_path / "file"))
    eventually(lambda: dependent_tasks.app.store.conditions.check(key_of(job)).looks)
    (tmp_path / "file").touch()
    assert job.result(timeout=10) == "sold"


def test_several_conditions_must_all_hold_also_after_other_jobs(dependent_tasks, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    first = dependent_tasks.wait_for.enqueue(str(other))
    job = dependent_tasks.go.using(
        ready=["dependent_tasks.there", "dependent_tasks.there_later"], after=[first]
    ).enqueue(str(one))
    one.touch()
    assert job.refresh().state == "blocked"
    other.touch()
    assert job.result(timeout=10) == str(one)


@pytest.mark.parametrize("mood", ["raise", "hang", "die"])
def test_a_condition_that_raises_hangs_or_dies_hurts_no_other(dependent_tasks, tmp_path, mood):
    path = tmp_path / "mood"
    path.write_text(mood)
    job = dependent_tasks.go.using(ready=["moody"]).enqueue(str(path))
    question = eventually(
        lambda: (q := dependent_tasks.app.store.conditions.check(key_of(job))) and q.raised and q,
        within=10,
    )

    kinds = {
        "raise": "RuntimeError: not in the mood",
        "hang": "no answer within 1 s",
        "die": "ended with 3",
    }[mood]
    assert kinds in question.said
    assert dependent_tasks.add.enqueue(1).result(timeout=10) == 2
    path.write_text("fine")
    assert job.result(timeout=10) == str(path)
    assert [attempt.number for attempt in job.attempts] == [1]


def test_a_job_whose_condition_is_being_asked_can_be_cancelled(dependent_tasks, tmp_path):
    path = tmp_path / "mood"
    path.write_text("hang")
    job = dependent_tasks.go.using(ready=["moody"]).enqueue(str(path))
    eventually(lambda: lines(f"{path}.asked"))

    job.cancel("not needed")

    assert job.wait(timeout=10).state == "cancelled"
    assert job.reason == "not needed"


def test_an_unknown_condition_is_an_error_where_the_code_is_and_a_reason_where_it_is_not(
    dependent_tasks,
):
    with pytest.raises(
        BadOption,
        match=r"no condition 'dependent_tasks.thee'; did you mean 'dependent_tasks.there'",
    ):
        dependent_tasks.go.using(ready=["dependent_tasks.thee"]).enqueue("x")
    with closing(Genba(dependent_tasks.app.url)) as stranger:
        job = stranger.submit(
            [
                stranger.call(
                    "dependent_tasks.go", ("x",), options={"ready": ["dependent_tasks.nothing"]}
                )
            ]
        )[0]
        eventually(
            lambda: job.refresh().record.parked_on == "unknown condition dependent_tasks.nothing"
        )
        job.cancel()


def most_at_once(path: Path) -> int:
    steps = [1 if word == "in" else -1 for word, _ in lines(path)]
    return max(accumulate(steps))


def test_limit_to_lets_so_many_run_at_a_time(dependent_tasks, tmp_path):
    path = tmp_path / "log"
    group = dependent_tasks.app.enqueue_many(
        [dependent_tasks.two_at_a_time.call(str(path), i) for i in range(8)]
    )

    group.wait(timeout=30)

    assert sorted(i for word, i in lines(path) if word == "out") == sorted(map(str, range(8)))
    assert most_at_once(path) == 2
    assert {len(job.attempts) for job in group} == {1}


# copies


@pytest.mark.parametrize("end", ["return", "apply", "transaction"])
def test_a_clone_comes_with_the_success_and_is_a_copy(dependent_tasks, end):
    job = dependent_tasks.again.using(
        key=f"chain {end}", priority=3, timeout="20s", tags=[end]
    ).enqueue(2, end)
    job.wait(timeout=10)

    last = eventually(
        lambda: [one for one in chain(dependent_tasks, end) if one.args["left"] == 0], within=10
    )[0]

    assert last.result(timeout=10) == 0
    assert [one.args["left"] for one in chain(dependent_tasks, end)] == [0, 1, 2]
    assert {(one.priority, one.key) for one in chain(dependent_tasks, end)} == {(3, f"chain {end}")}
    assert [one.tags for one in chain(dependent_tasks, end)] == [["copy"], ["copy"], [end]]
    assert '"timeout":20000000' in last.record.options


def test_a_clone_has_the_limits_that_were_given_to_the_job(dependent_tasks):
    given = [Limit("chained:{end}", 1), Rate("chained", "100/s", burst=7)]
    dependent_tasks.again.using(key="chain limits", limits=given).enqueue(1, "return").wait(
        timeout=10
    )

    last = eventually(
        lambda: [one for one in chain(dependent_tasks, "limits") if one.args["left"] == 0],
        within=10,
    )[0]

    assert last.result(timeout=10) == 0
    assert rows(
        dependent_tasks.app.url, "SELECT DISTINCT buckets FROM genba.job WHERE key = 'chain limits'"
    ) == [('[["chained:return","chained:{end}",0],["rate chained","rate chained",2]]',)]


def chain(dependent_tasks, end):
    return sorted(
        dependent_tasks.app.jobs(key=f"chain {end}", state="any"), key=lambda one: one.args["left"]
    )


@pytest.mark.parametrize("end", ["raise", "retry"])
def test_a_job_that_does_not_succeed_leaves_no_clone(dependent_tasks, end):
    job = dependent_tasks.again.using(key=f"chain {end}").enqueue(2, end)
    eventually(lambda: job.attempts)
    assert [one.id for one in chain(dependent_tasks, end)] == [job.id]
    job.cancel()


def test_regression_15_a_task_that_completes_by_itself_and_asks_for_a_retry_waits_for_it(
    dependent_tasks,
):
    job = dependent_tasks.again.enqueue(0, "retry")
    eventually(lambda: job.attempts)
    assert (job.refresh().state, job.reason) == ("scheduled", None)
    job.cancel()


def test_regression_14_a_task_of_one_that_clones_itself_keeps_exactly_one_successor(
    dependent_tasks, tmp_path
):
    path = tmp_path / "log"
    dependent_tasks.single.enqueue(str(path), 10)

    eventually(lambda: ["out", "0"] in lines(path), within=20)

    assert [left for word, left in lines(path) if word == "in"] == [
        str(left) for left in range(10, -1, -1)
    ]
    assert most_at_once(path) == 1
    eventually(lambda: dependent_tasks.app.count(task="dependent_tasks.single") == 0)


def test_regression_07_a_megabyte_travels_there_and_back(dependent_tasks):
    text = "ö" * 500_000
    assert dependent_tasks.echo.enqueue(text).result(timeout=20) == text
