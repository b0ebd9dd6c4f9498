"""Conditions in `app.testing()`: asked in this process, when the test says so."""

from __future__ import annotations

from genba import Genba, Wait

app = Genba()
open_now: list[object] = [False]


@app.condition(name="is_open")
def is_open() -> object:
    answer = open_now[0]
    if isinstance(answer, Exception):
        raise answer
    return answer


@app.task(name="sell", ready=[is_open])
def sell(x: int) -> int:
    return x


def test_a_job_runs_in_a_test_when_its_condition_holds():
    with app.testing() as q:
        open_now[0] = False
        job = sell.enqueue(1)
        assert q.run() == []
        open_now[0] = Wait("10s")
        q.advance(1)
        assert q.run() == []
        open_now[0] = ValueError("no idea")
        q.advance(10)
        assert q.run() == []
        assert "is_open raised ValueError: no idea" in str(job.explain())
        open_now[0] = True
        q.advance(60)

        assert [one.result() for one in q.run()] == [1]
        assert [attempt.number for attempt in job.attempts] == [1]
