"""A zygote that dies between the fork of a worker and the report of its pid."""

from __future__ import annotations

import pytest
from tests.support import lines, load_module

APP = """
import os, signal, time
from pathlib import Path
from genba import Genba, current_job

app = Genba()
FELL = Path(__file__).with_name("fell")
forks = 0

def fall():
    '''The second fork of the first zygote is its last deed.'''
    global forks
    forks += 1
    if forks == 2 and not FELL.exists():
        FELL.touch()
        time.sleep(0.3)   # the worker says that it is ready, and has jobs in hand
        os.kill(os.getpid(), signal.SIGKILL)

if os.environ.get("FALL"):
    os.register_at_fork(after_in_parent=fall)

@app.task
def work(path: str, seconds: float = 0.02) -> str:
    with open(path, "a") as file:
        file.write(f"{current_job().fence}\\n".replace(", ", ","))
    time.sleep(seconds)
    return "done"
"""


@pytest.mark.parametrize("seconds", [0.002, 0.02, 2.0])
def test_a_start_that_was_not_reported_is_not_run_again_as_the_same_attempt(
    url, tmp_path, start_node, seconds
):
    (tmp_path / "unreported.py").write_text(APP)
    module = load_module("unreported", tmp_path, url)
    effects = tmp_path / "effects"
    try:
        count = 4 if seconds > 1 else 200
        group = module.app.enqueue_many(
            [module.work.call(str(effects), seconds) for _ in range(count)]
        )
        start_node("unreported:app", url, "--pool", "static", "--min", "2", env={"FALL": "1"})
        group.wait(timeout=60)

        assert (tmp_path / "fell").exists()
        assert {job.refresh().state for job in group} == {"succeeded"}
        fences = [fence for (fence,) in lines(effects)]
        assert len(fences) == len(set(fences)), "two runs have the same fence"
        assert module.app.verify().faults == []
    finally:
        module.app.close()
