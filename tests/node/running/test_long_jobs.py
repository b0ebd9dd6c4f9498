"""How long a job runs says nothing about its node."""

from __future__ import annotations

import pytest
from tests.support import eventually

LEASE = 3  # seconds


@pytest.mark.soak
def test_jobs_that_run_ten_times_as_long_as_the_lease_run_once(jobs, url, start_node, path):
    for name in ("one", "two"):  # one of them could take over what it believes to be lost
        start_node("jobs:app", url, "--name", name, "--max", "10", env={"GENBA_LEASE": f"{LEASE}s"})
    eventually(lambda: len(jobs.app.nodes()) == 2, within=60)
    group = jobs.app.enqueue_many(
        [jobs.write_slowly.call(str(path), str(n), 10 * LEASE) for n in range(20)]
    )
    group.wait(timeout=20 * LEASE)

    assert {job.refresh().state for job in group} == {"succeeded"}
    assert [len(job.attempts) for job in group] == [1] * 20
