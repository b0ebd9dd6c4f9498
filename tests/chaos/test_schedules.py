"""Schedules under fire: kill -9 at every step of completing a run, and nodes that die while ticks are due."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
from tests.storage.builders import TASK, a_job, joined, loss, rows, success, together
from tests.support import eventually

from genba.domain.clock import ManualClock
from genba.domain.duration import HOUR, MINUTE
from genba.domain.schedule import ScheduleRule
from genba.storage.engines.postgres import transaction as postgres
from genba.storage.engines.sqlite import transaction as sqlite
from genba.storage.schedules.rows import NewSchedule
from genba.storage.store import Store, open_store

START = 1_767_225_600_000_000


def a_schedule(name: str, **rule: Any) -> NewSchedule:
    return NewSchedule(
        name=name, rule=ScheduleRule(**rule), job=a_job(), said=repr(sorted(rule.items()))
    )


def after_statement(hit: Callable[[], None]) -> Iterator[None]:
    """Call `hit` after every statement of a transaction, on both engines."""
    with pytest.MonkeyPatch.context() as patch:
        for engine in (postgres.PostgresTransaction, sqlite.SqliteTransaction):
            for name in ("all", "one", "run", "batch"):
                patch.setattr(engine, name, _followed(getattr(engine, name), hit))
        yield


def _followed(statement: Callable[..., Any], hit: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **values: Any) -> Any:
        done = statement(*args, **values)
        hit()
        return done

    return call


# lzq asks: may a job complete, and its next run be lost?


def complete_in_a_child(url: str, clock: ManualClock, job: Any, node: int, die_after: int) -> bool:
    """Finish the run in a process of its own, which is killed after so many statements; True if it was."""
    child = os.fork()
    if child == 0:
        try:
            left = die_after

            def hit() -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            store = open_store(url, clock=clock)
            store.install()
            for _ in after_statement(hit):
                store.finish(node, [success(job, claim=node)])
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def take_over_and_claim(store: Store, node: int) -> list[Any]:
    """As keepers do: until the server has seen that its client is dead, that one's locks are passed by."""
    for dead in store.nodes.left_behind():
        store.nodes.take_over_jobs(dead, loss)
    return store.claim(node, node, {"default": 1}, [TASK])


@pytest.mark.parametrize("every", [HOUR, -1])
def test_regression_02_kill_9_at_every_step_of_completing_a_run_leaves_exactly_one_next(
    store, clock, url, every
):
    store.schedules.put(a_schedule("s", every=every, overlap="skip"))
    id = store.schedules.named("s").id
    killed = 0
    for step in range(1, 60):
        clock.advance("2h")
        store.promote()
        node = joined(store, step)
        (job,) = store.claim(node, node, {"default": 1}, [TASK])
        was_killed = complete_in_a_child(url, clock, job, node, step)
        killed += was_killed
        store.nodes.declare_dead(node, loss)  # what others do when a node is dead
        runs = store.schedules.open_runs(id)
        assert len(runs) == 1, f"killed after statement {step}: {runs}"
        if not was_killed:
            break
        assert runs[0].id == job.id  # not committed: the same run again, and it ends now
        other = joined(store, 1000 + step)
        (again,) = eventually(partial(take_over_and_claim, store, other), within=60)
        assert store.finish(other, [success(again, claim=other)]) == {job.id}
        store.nodes.leave(other)
        assert [run.state for run in store.schedules.open_runs(id)] == ["scheduled"]
    assert 8 <= killed < 58  # it was hit in the middle, and the last time not at all
    moments = [
        row[0] for row in rows(url, "SELECT moment FROM genba.job WHERE schedule_id IS NOT NULL")
    ]
    assert len(set(moments)) == len(moments)


# three nodes, none of them the leader


class Died(BaseException):
    """A node was killed in the middle of it."""


def ticks_under_fire(url: str, clock: ManualClock, minutes: int, seed: int) -> int:
    """Three stores fire ten schedules for so many minutes, and die now and then; how many ticks there were."""
    rng = random.Random(seed)
    policies = [{"misfire": "all"}, {"misfire": "once"}, {"misfire": "all", "overlap": "queue"}]
    with ExitStack() as stack:
        stores: list[Store] = [
            stack.enter_context(closing(open_store(url, clock=clock))) for _ in range(3)
        ]
        stores[0].install()
        for i in range(10):
            stores[0].schedules.put(a_schedule(f"s{i}", cron="* * * * *", **policies[i % 3]))
        deaths, left = 0, -1  # statements until the next one dies

        def hit() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Died

        def fire(i: int) -> None:
            nonlocal deaths
            try:
                while stores[i].ticks.fire():
                    pass
            except Died:
                deaths += 1

        passed = 0
        while passed < minutes:
            step = rng.choice((1, 1, 1, 2, 5))  # sometimes all of them sleep
            passed += step
            clock.advance(step * 60)
            left = rng.randint(1, 150) if rng.random() < 0.4 else -1
            for _ in after_statement(hit):
                together(3, fire)
        for store in stores:
            while store.ticks.fire():
                pass
        print(f"seed {seed}: {passed} minutes of 10 schedules, {deaths} deaths in the middle of it")
        assert deaths
        assert stores[0].verify().faults == []
    return passed


def check_ticks(url: str, minutes: int) -> int:
    fired = rows(url, "SELECT schedule_id, moment, job_id FROM genba.tick WHERE job_id IS NOT NULL")
    made = rows(url, "SELECT schedule_id, moment, id FROM genba.job WHERE schedule_id IS NOT NULL")
    assert sorted(fired) == sorted(made)  # no job without its tick, no tick without its job
    assert len({row[:2] for row in made}) == len(made)  # none twice
    total = 0
    for id, name in rows(url, "SELECT id, name FROM genba.schedule"):
        mine = [row for row in fired if row[0] == id]
        skipped = rows(
            url,
            f"SELECT count, skipped FROM genba.tick WHERE schedule_id = {id} AND skipped IS NOT NULL",
        )
        assert len(mine) + sum(row[0] for row in skipped) == minutes, (
            name
        )  # none missing, but by policy
        if int(name[1:]) % 3 != 1:
            assert skipped == []
        total += minutes
    return total


def test_no_tick_is_fired_twice_or_lost_while_three_nodes_die_at_random(store, clock, url):
    minutes = ticks_under_fire(url, clock, 60, seed=1)
    assert check_ticks(url, minutes) >= 600


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_no_tick_of_ten_thousand_is_fired_twice_or_lost(store, clock, url, seed):
    minutes = ticks_under_fire(url, clock, 1000, seed)
    assert check_ticks(url, minutes) >= 10_000


def test_fifty_schedules_after_twelve_hours_run_as_their_policies_say(store, clock, url):
    rng = random.Random(12)
    expected = {}
    for i in range(50):
        minutes, misfire = rng.choice((7, 10, 30, 60, 360)), rng.choice(("skip", "once", "all"))
        text = f"*/{minutes} * * * *" if minutes < 60 else f"0 */{minutes // 60} * * *"
        store.schedules.put(a_schedule(f"s{i}", cron=text, misfire=misfire))
        moments = [
            m for m in range(1, 12 * 60 + 4) if (m % 60 if minutes < 60 else m) % minutes == 0
        ]
        on_time = [m for m in moments if (12 * 60 + 3.5 - m) * 60 <= 10]
        expected[f"s{i}"] = {"skip": on_time, "once": moments[-1:], "all": moments[-100:]}[misfire]
    clock.advance(12 * 3600 + 210)
    while store.ticks.fire():
        pass
    for name, moments in expected.items():
        ticks = store.schedules.ticks(store.schedules.named(name).id, 1000)
        assert sorted((t.moment - START) // MINUTE for t in ticks if t.job_id) == moments, name
    assert store.ticks.fire() == 0
