"""Two clusters side by side on one database (use case 41), and the names of nodes."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.support import eventually, lines, load_jobs

from genba import Genba, JobNotFound


@pytest.fixture
def clusters(url, tmp_path, start_node):
    """The same code twice, as two namespaces, each with a node."""
    made = {}
    for name in ("red", "blue"):
        made[name] = load_jobs(url, tmp_path, namespace=name)
        start_node("jobs:app", url, "--name", "same-name", env={"GENBA_NAMESPACE": name})
    for jobs in made.values():
        eventually(jobs.app.nodes, within=15)
    yield made["red"], made["blue"]
    for jobs in made.values():
        jobs.app.close()


def test_two_namespaces_on_one_database_do_not_see_each_other(clusters, path, url):
    red, blue = clusters
    mine = red.wait_for.using(key="singleton", tags=["t"]).enqueue(f"{path}.red")
    yours = blue.wait_for.using(key="singleton", tags=["t"]).enqueue(f"{path}.blue")

    # Both run at the same time, although they are the same code with the same key.
    eventually(lambda: lines(f"{path}.red.started") and lines(f"{path}.blue.started"))
    assert (mine.created, yours.created) == (True, True)
    assert red.app.job(key="singleton") == mine
    assert [job.id for job in red.app.jobs(tag="t")] == [mine.id]
    assert (red.app.count(), blue.app.count()) == (1, 1)
    with pytest.raises(JobNotFound):
        blue.app.job(mine.id)
    assert [len(red.app.nodes()), len(blue.app.nodes())] == [1, 1]
    assert red.app.nodes()[0].id != blue.app.nodes()[0].id

    assert mine.cancel()
    assert mine.wait(timeout=5).state == "cancelled"
    assert yours.refresh().state == "running"
    (path.parent / "gate.blue").touch()
    assert yours.result(timeout=10) == "opened"


def test_jobs_are_run_by_the_nodes_of_their_own_namespace(clusters, path, url):
    red, blue = clusters
    groups = {
        name: jobs.app.enqueue_many([jobs.write.call(str(path), f"{name}{i}") for i in range(50)])
        for name, jobs in (("red", red), ("blue", blue))
    }
    with closing(Genba(url, namespace="empty")) as empty:
        waiting = empty.enqueue("jobs.add", 1)
        for group in groups.values():
            group.wait(timeout=20, throw=True)
        assert "no node is running" in str(waiting.explain())

    pids = {name: {line[3] for line in lines(path) if line[0].startswith(name)} for name in groups}
    assert all(pids.values())
    assert pids["red"].isdisjoint(pids["blue"])
    assert len(lines(path)) == 100
