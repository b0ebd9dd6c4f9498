"""One seed, one story: some jobs, some faults, then quiet; and what must be true in the end."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from genba.domain import schedule
from genba.domain.limits import LIMIT, LimitRule, SlotNeed
from genba.errors import StoreError
from genba.storage.records import Edge, NewJob
from genba.storage.schedules.rows import NewSchedule
from tests.sim.locks import Visitor
from tests.sim.node import DOOR, SHARED, TASK, SimNode
from tests.sim.world import LEASE, SECOND, START, Mood, Run, World, a_store

FAULTS = 6 * SECOND  # so long things go wrong
MINUTE = 60 * SECOND
PATIENCE = 150 * SECOND  # then so long at most until all is done

KINDS = (
    "plain",
    "plain",
    "plain",
    "long",
    "raises",
    "crashes",
    "limited",
    "limited",
    "once",
    "child",
    "delayed",
    "key",
    "dedicated",
    "conditional",
    "shared",
    "shared",
    "locking",
    "locking",
    "locking",
)
DEEDS = (
    "kill worker",
    "kill node",
    "pause node",
    "cut node",
    "outage",
    "cancel",
    "drain",
    "kill worker",
    "hold",
    "kill visitor",
    "pause visitor",
)


@dataclass
class Asked:
    """A job that a client has asked for; `id` if it has got an answer."""

    number: int
    kind: str
    id: int | None = None


class Story:
    def __init__(self, world: World, *, early: bool = False) -> None:
        """`early`: without what came later than the seeds that are named in `test_found.py`."""
        self.world = world
        self.asked: list[Asked] = []
        self._client = a_store(world)
        rng = world.rng
        chances = (0.0, 0.0, 0.02, 0.1)
        world.mood = Mood(rng.choice(chances), rng.choice(chances), rng.choice((0.0, 0.0, 0.02)))
        self._schedules = [_interval()] if rng.random() < 0.2 else []
        if not early:
            world.mood.reads = world.more.choice((0.0, 0.0, 0.02, 0.1))
            self._plan_ticks()

    def _plan_ticks(self) -> None:
        """In every third world one minute begins while things go wrong, and another one later."""
        more = self.world.more
        if more.random() < 1 / 3:
            self.world.clock.set(START + int((60 - more.uniform(1.5, 5.5)) * SECOND))
            self._schedules.append(
                _cron(more.choice(("once", "all", "skip")), more.choice(("allow", "queue", "skip")))
            )

    def play(self) -> None:
        """Nodes come, jobs come, things go wrong, and then nothing does any more."""
        world, rng = self.world, self.world.rng
        self.start_nodes(rng.choice((1, 2, 2, 3)))
        for number in range(rng.randint(2, 6)):
            world.at(rng.uniform(0, FAULTS * 0.7), partial(self._enqueue, number))
        for _ in range(rng.choice((0, 0, 1, 2))):
            visitor = Visitor(world, int(rng.uniform(0.1, 4) * SECOND))
            world.at(rng.uniform(0, FAULTS * 0.7), visitor.start)
        for _ in range(rng.randint(1, 5)):
            deed = rng.choice(DEEDS)
            world.at(rng.uniform(0.2, FAULTS / SECOND) * SECOND, partial(self._do, deed))
        world.run(FAULTS)
        self.calm()

    def play_cut_off(self) -> None:
        """Two jobs of a limit of one; the node that runs the first does not reach the database for two leases."""
        world = self.world
        world.mood, self._schedules = Mood(lost_bell=0), []
        self.start_nodes(2)
        world.run(2 * SECOND)
        for number in range(2):
            one = Asked(number, "limited")
            self.asked.append(one)
            (made,) = self._client.enqueue(
                [_limited({"n": number, "ms": 20_000, "fates": ["return"]})]
            )
            one.id = made.id
        assert world.run(4 * SECOND, lambda: bool(world.runs))
        for node in world.nodes.values():
            if any(worker.run is not None for worker in node.workers()):
                node.set_cut(True)
        world.run(world.now + 3 * LEASE)
        self.calm()

    def play_a_day(self) -> None:
        """Two nodes and one job of each kind; nothing goes wrong but the given faults."""
        world = self.world
        world.mood, self._schedules = Mood(lost_bell=0), [_interval(), _cron()]
        world.clock.set(START + 56 * SECOND)
        self.start_nodes(2)
        for number, kind in enumerate(dict.fromkeys(KINDS)):
            world.at(SECOND + number * 100_000, partial(self._enqueue, number, kind))
        world.run(FAULTS)
        self.calm()

    def start_nodes(self, count: int) -> None:
        for i in range(count):
            start = self.world.rng.uniform(0, SECOND)
            self.world.at(start, SimNode(self.world, f"n{i}", self._schedules).start)

    def calm(self) -> None:
        """From here on nothing goes wrong: all must be done in time."""
        self._calm()
        world = self.world
        assert world.run(world.now + PATIENCE, self._drained), f"not done: {self._left()}"

    def _calm(self) -> None:
        world = self.world
        world.quiet, world.down = True, False
        for node in list(world.nodes.values()):
            node.set_cut(False)
            if node.paused:
                node.resume()
        for visitor in world.visitors:
            if visitor.paused:
                visitor.resume()

    # what clients do

    def _enqueue(self, number: int, kind: str | None = None) -> None:
        one = Asked(number, kind or self.world.rng.choice(KINDS))
        self.asked.append(one)
        try:
            (made,) = self._client.enqueue([self._job(one)])
        except StoreError:
            return  # it may be there or not; nothing was promised
        one.id = made.id if made.created else None

    def _job(self, one: Asked) -> NewJob:
        rng = self.world.rng
        orders: dict[str, Any] = {
            "n": one.number,
            "ms": rng.choice((1, 20, 300, 2000)),
            "fates": ["return"],
        }
        options: dict[str, Any] = {"grace": SECOND, "max_crashes": 50}
        given: dict[str, Any] = {}
        known = [asked.id for asked in self.asked if asked.id is not None]
        match one.kind:
            case "long":
                orders["ms"] = 7000
            case "raises":
                orders["fates"] = ["raise"] * rng.randint(1, 2) + ["return"]
                options["retry"] = {"times": 5, "delay": "500ms", "backoff": 1}
            case "crashes":
                orders["fates"] = ["crash"] * rng.randint(1, 2) + ["return"]
            case "limited":
                given |= {
                    "needs": (SlotNeed("one", "one", LIMIT),),
                    "rules": (LimitRule("one", 1),),
                }
                orders["ms"] = rng.choice((300, 2000, 6000))
                orders["stubborn"] = rng.choice((0, 0, 400))
            case "once":
                options["at_most_once"] = True
            case "child" if known:
                given["after"] = (Edge(rng.choice(known), "finished"),)
            case "delayed":
                given["delay"] = rng.randint(1, 3 * SECOND)
            case "dedicated":
                options["dedicated"] = True
            case "locking":
                orders["ms"] = rng.choice((20, 300, 2000, 6000))
                orders["lock"] = rng.choice(("gives back", "leaves it"))
                orders["fates"] = rng.choice((["return"], ["return"], ["crash", "return"]))
            case "shared":
                orders["fates"] = rng.choice((["return"], ["return"], ["crash", "return"]))
            case "conditional":
                options["ready"] = [DOOR]
                given["ready"] = (DOOR,)
            case "key":
                given["identity"] = "the same"
        task = SHARED if one.kind == "shared" else TASK
        return NewJob(
            task=task, args=json.dumps(orders).encode(), options=json.dumps(options), **given
        )

    # what goes wrong

    def _do(self, deed: str) -> None:
        world, rng = self.world, self.world.rng
        nodes = sorted(world.nodes.values(), key=lambda node: node.name)
        node: SimNode | None = rng.choice(nodes) if nodes else None
        known = [asked.id for asked in self.asked if asked.id is not None]
        span = LEASE * rng.choice((0.3, 0.9, 1.5, 2.5))
        if node is not None and deed in (
            "kill worker",
            "kill node",
            "pause node",
            "cut node",
            "drain",
        ):
            self._hit(node, deed, span)
        elif deed == "outage":
            world.hits.add(deed)
            world.down = True
            for each in nodes:
                each.set_cut(each.cut)
            world.at(span, self._outage_ends)
        elif deed in ("kill visitor", "pause visitor"):
            self._hit_visitor(deed, span)
        elif deed in ("cancel", "hold") and known:
            world.hits.add(deed)
            with suppress(StoreError):
                job = rng.choice(known)
                self._client.cancel(job, None) if deed == "cancel" else self._hold(job)

    def _hit_visitor(self, deed: str, span: float) -> None:
        world = self.world
        here = [visitor for visitor in world.visitors if visitor.alive and not visitor.paused]
        if here:
            world.hits.add(deed)
            visitor = world.rng.choice(here)
            if deed == "kill visitor":
                visitor.die()
            else:
                visitor.pause()
                world.at(span, visitor.resume)

    def _outage_ends(self) -> None:
        self.world.down = False

    def _hit(self, node: SimNode, deed: str, span: float) -> None:
        world = self.world
        workers = node.workers()
        if deed == "kill worker" and workers:
            world.hits.add(deed)
            victim = world.rng.choice(workers)
            for each in victim.all():
                if each.run is not None:
                    each.run.disturbed = True
            victim.die(signal.SIGKILL)
        elif deed == "kill node":
            world.hits.add(deed)
            node.die()
        elif deed == "pause node" and not node.paused:
            world.hits.add(deed)
            node.pause()
            world.at(span, node.resume)
        elif deed == "cut node":
            world.hits.add(deed)
            node.set_cut(True)
            world.at(span, partial(node.set_cut, False))
        elif deed == "drain" and not node.paused:
            world.hits.add(deed)
            node.drain()

    def _hold(self, job: int) -> None:
        self.world.at(
            2 * SECOND, partial(self._resume, job)
        )  # whatever is heard of it: it may have happened
        self._client.hold(job, "sim")

    def _resume(self, job: int) -> None:
        try:
            if not self._client.resume(job) and self._client.states([job]).get(job) != "held":
                return
        except StoreError:
            self.world.at(SECOND, partial(self._resume, job))

    # in the end

    def _rows(self) -> list[tuple[Any, ...]]:
        with self.world.database.statement() as tx:
            return tx.select(
                "SELECT id, state, attempt, result, args, reason, options, schedule_id, node, parked_on FROM genba.job"
            )

    def _drained(self) -> bool:
        with self.world.database.statement() as tx:
            left = tx.select(
                "SELECT 1 FROM genba.job WHERE finished_at IS NULL AND state <> 'held' "
                "AND schedule_id IS NULL LIMIT 1"
            ) or tx.select("SELECT 1 FROM genba.lock UNION ALL SELECT 1 FROM genba.waiter LIMIT 1")
            ticked = self._cron is None or self._ticks(tx)
        return bool(not left and ticked) and self.world.now > FAULTS

    def _left(self) -> list[tuple[Any, ...]]:
        with self.world.database.statement() as tx:
            locks = tx.select("SELECT 'lock', token, job_id, session_id FROM genba.lock")
            locks += tx.select("SELECT 'waits', seq, job_id, session_id FROM genba.waiter")
        return [
            row
            for row in self._rows()
            if row[1] not in ("succeeded", "failed", "timed_out", "cancelled")
        ] + locks

    def check(self) -> None:
        rows = {row[0]: row for row in self._rows()}
        runs: dict[int, list[Run]] = defaultdict(list)
        for run in self.world.runs:
            runs[run.job].append(run)
        self._check_nothing_is_lost_or_doubled(rows)
        for id, (_, state, attempt, result, _, reason, options, *_) in rows.items():
            self._check_job(
                id, state, attempt, result, reason, json.loads(options or "{}"), runs[id]
            )
        self._check_limit(rows)
        self._check_lock()
        self._check_ticks()
        done = {
            one.kind for one in self.asked if one.id is not None and rows[one.id][1] == "succeeded"
        }
        self.world.hits.update(f"done: {kind}" for kind in done)
        assert not self.world.false_alarms, "a node was buried that was there all the time"
        faults = self._client.verify().faults
        assert faults == [], faults

    def _check_nothing_is_lost_or_doubled(self, rows: dict[int, tuple[Any, ...]]) -> None:
        numbers = [json.loads(row[4])["n"] for row in rows.values() if row[7] is None]
        assert len(numbers) == len(set(numbers)), "a job is there twice"
        for one in self.asked:
            assert one.id is None or one.id in rows, f"job {one.id} was promised and is gone"
        identities = [
            row for row in rows.values() if _number(row) in self._with_key() and row[1] == "held"
        ]
        assert len(identities) <= 1

    def _with_key(self) -> set[int]:
        return {one.number for one in self.asked if one.kind == "key"}

    def _check_job(
        self, id: int, state: str, attempt: int, result: bytes | None, reason: str | None,
        options: dict[str, Any], runs: list[Run],
    ) -> None:  # fmt: skip
        fences = [(run.attempt, run.claim) for run in runs]
        assert len(fences) == len(set(fences)), f"job {id}: one fence, two runs"
        done = {(run.attempt, run.claim) for run in runs if run.completed}
        if state == "succeeded":
            assert result is not None
            wrote = tuple(json.loads(result))
            assert wrote in done, f"job {id}: its result comes from a run that never returned"
            assert wrote[0] == attempt, (
                f"job {id}: attempt {wrote[0]} has written over attempt {attempt}"
            )
        if state == "held":
            assert reason, f"job {id} is held without a reason"
        if options.get("at_most_once"):
            assert len(runs) <= 1, f"job {id} must run once at most, and ran {len(runs)} times"
        for before in runs:
            for after in runs:
                if before.began < after.began < (before.ended or self.world.now):
                    assert before.disturbed, (
                        f"job {id}: two live attempts, and nothing had happened"
                    )
            again = before.completed and any(run.began > before.began for run in runs)
            assert not again or before.disturbed or self._failing, (
                f"job {id} had returned, and ran again"
            )

    @property
    def _failing(self) -> bool:
        return bool(self.world.mood.before or self.world.mood.after or self.world.mood.pause)

    def _check_limit(self, rows: dict[int, tuple[Any, ...]]) -> None:
        limited = {one.number for one in self.asked if one.kind == "limited"}
        inside = sorted(
            (run.began, run.ended if run.ended is not None else self.world.now, run.job)
            for run in self.world.runs
            if _number(rows[run.job]) in limited
        )
        for (_, ended, job), (began, _, other) in pairwise(inside):
            assert began >= ended, f"jobs {job} and {other} ran at a time, and one may"

    def _check_lock(self) -> None:
        """Never do two believe to have it, and each token is greater than the one before."""
        world = self.world
        assert not world.harm, world.harm
        holds = [
            hold for hold in world.holds if hold.began < hold.over(world.now)
        ]  # not lost before it was heard of
        for one, other in pairwise(sorted(holds, key=lambda hold: hold.began)):
            assert other.began >= one.over(world.now), (
                f"tokens {one.token} and {other.token}: two had one mutex"
            )
            assert other.token > one.token, f"token {other.token} came after {one.token}"

    # its ticks

    @property
    def _cron(self) -> NewSchedule | None:
        return next((one for one in self._schedules if one.rule.cron is not None), None)

    def _ticks(self, tx: Any) -> list[tuple[Any, ...]]:
        """(moment, job, why not, last moment) in their order."""
        return list(
            tx.select(
                "SELECT t.moment, t.job_id, t.skipped, COALESCE(t.last_moment, t.moment) FROM genba.tick t "
                "JOIN genba.schedule s ON s.id = t.schedule_id WHERE s.name = 'minutely' ORDER BY t.moment"
            )
        )

    def _check_ticks(self) -> None:
        """Each minute since the first has one job, or one reason why it has none."""
        if self._cron is None:
            return
        with self.world.database.statement() as tx:
            ticks = self._ticks(tx)
            jobs = tx.select(
                "SELECT j.moment, j.id FROM genba.job j JOIN genba.schedule s ON s.id = j.schedule_id "
                "WHERE s.name = 'minutely' ORDER BY j.moment, j.id"
            )
            ((runs, next_at),) = tx.select(
                "SELECT runs, next_at FROM genba.schedule WHERE name = 'minutely'"
            )
        ran = [(moment, job) for moment, job, _, _ in ticks if job is not None]
        assert jobs == ran, f"jobs {jobs} of ticks {ticks}"
        assert len({moment for moment, _ in jobs}) == len(jobs) == runs, (
            f"a tick was run twice: {jobs}"
        )
        assert all(job is not None or skipped for _, job, skipped, _ in ticks), (
            f"a tick without a job or a reason: {ticks}"
        )
        for before, after in pairwise(ticks):
            assert after[0] == before[3] + MINUTE, f"a tick is missing between {before} and {after}"
        late = self.world.clock.now() - (next_at or self.world.clock.now())
        assert late < 10 * SECOND, f"the next tick is {late} µs late"
        self.world.hits.update(("a tick",) if jobs else ())
        self.world.hits.update(("a tick that was skipped",) if len(ran) < len(ticks) else ())


def _number(row: tuple[Any, ...]) -> int:
    return int(json.loads(row[4])["n"])


def _limited(orders: dict[str, Any]) -> NewJob:
    needs, rules = (SlotNeed("one", "one", LIMIT),), (LimitRule("one", 1),)
    options = json.dumps({"grace": SECOND, "max_crashes": 50})
    return NewJob(
        task=TASK, args=json.dumps(orders).encode(), options=options, needs=needs, rules=rules
    )


def _locking(orders: dict[str, Any]) -> NewJob:
    return NewJob(
        task=TASK, args=json.dumps(orders).encode(), options=json.dumps({"max_crashes": 50})
    )


def _interval() -> NewSchedule:
    job = NewJob(task=TASK, args=json.dumps({"n": -1, "ms": 20, "fates": ["return"]}).encode())
    return NewSchedule(
        name="often", rule=schedule.ScheduleRule(every=2 * SECOND, max_runs=4), job=job
    )


def _cron(misfire: Any = "once", overlap: Any = "allow") -> NewSchedule:
    job = NewJob(task=TASK, args=json.dumps({"n": -2, "ms": 300, "fates": ["return"]}).encode())
    return NewSchedule(
        name="minutely",
        rule=schedule.ScheduleRule(cron="* * * * *", misfire=misfire, overlap=overlap, max_runs=2),
        job=job,
    )
