"""Conditions in `app.testing()`: asked in this process, when the test says so."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from genba import BadOption, BadTask, Genba, Wait

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


class Shift:
    """A condition that is no function."""

    def __call__(self, job: Any) -> bool:
        return bool(job.args["x"] < 10)


def answered(answer: bool) -> bool:
    return answer


def test_a_condition_without_a_name_has_one_from_its_task():
    shop = Genba("sqlite:///nowhere.db")

    @shop.task(name="sell", ready=[lambda job: job.args["x"] > 0, Shift(), partial(answered, True)])
    def sell_some(x: int) -> int:
        return x

    assert sorted(shop.conditions.named) == ["sell#ready-1", "sell#ready-2", "sell#ready-3"]
    with shop.testing() as q:
        few, many, none = [sell_some.enqueue(x) for x in (5, 15, -1)]
        assert q.run() == [few]
        assert "sell#ready-2" in str(many.explain())
        assert "sell#ready-1" in str(none.explain())


def test_a_condition_without_any_sound_name_is_refused_with_what_to_do():
    shop = Genba("sqlite:///nowhere.db")

    with pytest.raises(BadTask, match=r"has no name; register it with @app\.condition\(name=…\)"):

        @shop.task(name="n" * 200, ready=lambda: True)
        def sell_some(x: int) -> None: ...

    @shop.task(name="sell")
    def sell_all() -> None: ...

    with shop.testing(), pytest.raises(BadOption, match=r"decorate it with @app\.condition"):
        sell_all.using(ready=[lambda: True]).enqueue()
