"""A cancel that meets the end of its job: one of the two has happened, and the caller knows which.

100 jobs on each engine; `make soak` has 10,000 on each.
"""

from __future__ import annotations

import random
import socket
import time
from collections import Counter

import pytest
from tests.support import load_module

from genba import Job

FINAL = {"succeeded", "failed", "cancelled", "timed_out"}

APP = """
import socket, time
from genba import Genba, current_job

app = Genba()

@app.task
def nearly_done(receiver: str, pause: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(str(current_job().id).encode(), receiver)
    time.sleep(pause)
"""


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.soak)])
def test_what_a_cancel_answers_is_what_became_of_the_job_and_it_ended_once(
    url, tmp_path, start_node, count
):
    (tmp_path / "racing.py").write_text(APP)
    module = load_module("racing", tmp_path, url)
    dice = random.Random(7)
    handles: dict[int, Job[None]] = {}
    answers: dict[int, bool] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "receiver"))
        receiver.settimeout(60)
        start_node("racing:app", url, "--max", "2")
        while len(answers) < count:
            # Of ten one is cancelled for sure, one has ended for sure, and the others are a race.
            pauses = [60.0, 0.0, *(dice.uniform(0, 0.01) for _ in range(8))]
            group = module.app.enqueue_many(
                [module.nearly_done.call(str(tmp_path / "receiver"), p) for p in pauses]
            )
            handles |= {job.id: job for job in group}
            for _ in group:
                id = int(receiver.recv(32))
                if id == group[1].id:
                    group[1].wait(timeout=60)
                time.sleep(dice.uniform(0, 0.003))
                answers[id] = handles[id].cancel()
    for job in handles.values():
        job.wait(timeout=60)

    ended = Counter(event.job_id for event in module.app.events() if event.kind in FINAL)
    states = {id: job.refresh().state for id, job in handles.items()}
    module.app.close()
    assert {id for id, times in ended.items() if times != 1} == set()
    assert ended.keys() == handles.keys()
    assert [
        id for id in handles if states[id] != ("cancelled" if answers[id] else "succeeded")
    ] == []
    assert set(states.values()) == {"cancelled", "succeeded"}
    print(Counter(states.values()))
