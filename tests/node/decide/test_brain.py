"""What a node decides, with workers that do what the test says and a clock that the test moves."""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest

from genba import wire
from genba.node.decide import actions as do
from genba.node.decide.actions import Action
from genba.node.decide.brain import Brain
from genba.node.decide.worker_state import WorkerView
from genba.node.settings import NodeSettings
from genba.storage.jobs.judge import judge_lost_job
from genba.storage.nodes.nodes import Orphan
from genba.storage.records import Claimed, Ending, Success

MS = 1_000
SECOND = 1_000_000
WALL = 1_767_225_600_000_000 - 1_000 * SECOND  # what the store's clock is ahead of ours
CLAIM = 77

A = TypeVar("A")


def a_job(
    id: int, *, losses: int = 0, crashes: int = 0, rank: int | None = None, **options: Any
) -> Claimed:
    return Claimed(
        rank=id if rank is None else rank,
        id=id,
        attempt=1,
        task="tasks.work",
        args=b"{}",
        options=msgspec.json.encode(options).decode() if options else None,
        priority=0,
        retries=0,
        crashes=crashes,
        losses=losses,
        saved=None,
        due_at=WALL,
        open_deps=0,
        claimed_at=WALL,
        expires_at=None,
    )


def jobs(first: int, last: int) -> list[Claimed]:
    return [a_job(id) for id in range(first, last + 1)]


def an_error(message: str = "no") -> bytes:
    return msgspec.json.encode({"type": "ValueError", "message": message})


class FakeWorker:
    """Tokens, bunches and a status word as a worker has them; its jobs start and end when the test says so."""

    def __init__(self) -> None:
        self.ready = False
        self.unread: deque[tuple[int, wire.JobMessage]] = deque()  # tokens that it has not read
        self.place, self.phase, self.beats = 0, wire.IDLE, 0
        self.running: wire.JobMessage | None = None
        self.results: list[wire.JobResult] = []
        self.checked_stop = self.locked = False
        self.progress: tuple[int, int, float, float, str] | None = None
        self.asked: int | None = None
        self.signals: list[int] = []
        self.drains = self.dismissed = False
        self.pid = 0
        self.signalled = False

    def give(self, serial: int, given: Iterable[wire.JobMessage]) -> None:
        self.unread.extend((wire.place(serial, index), job) for index, job in enumerate(given))

    def take_back(self) -> int:
        count = len(self.unread)
        self.unread.clear()
        return count

    def start(self) -> wire.JobMessage:
        self.place, self.running = self.unread.popleft()
        self.phase, self.checked_stop = wire.RUNNING, False
        return self.running

    def end(
        self,
        now: int,
        outcome: int = wire.RETURNED,
        *,
        payload: bytes | None = b"1",
        spent: int = MS,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """The result is in the ring before anything else."""
        serial, index = self.place >> 24, self.place & 0xFFFFFF
        self.results.append(
            wire.JobResult(serial, index, outcome, payload, now - spent, now, 5, 6, extra)
        )
        self.phase, self.running = wire.DONE, None

    def note(self, done: float, text: str = "") -> None:
        self.progress = (
            (self.progress[0] if self.progress else 0) + 2,
            self.place,
            float(done),
            100.0,
            text,
        )
        self.beats += 1

    def view(self) -> WorkerView:
        seen = WorkerView(
            self.place, self.phase, self.beats, self.checked_stop, self.progress, locked=self.locked
        )
        return replace(seen, pid=self.pid, signalled=self.signalled)


class Stage:
    """A brain, fake workers, and a record of what was decided; it performs as the loop does."""

    def __init__(self, *, zygote: bool = True, **settings: Any) -> None:
        given = {"pool": "static", "min": 1, "max": 4, "grace": 30 * SECOND, **settings}
        self.brain = Brain(NodeSettings(target="tasks:app", **given), ["tasks.work"], lambda: 0.0)
        self.brain.wall_offset = WALL
        self.now = 1_000 * SECOND
        self.workers: dict[int, FakeWorker] = {}
        self.ended: dict[int, Success | Ending] = {}
        self.dead: list[FakeWorker] = []
        if zygote:
            self.zygote()

    # what happens

    def zygote(self) -> list[Action]:
        return self.perform(self.brain.on_zygote_ready(self.now))

    def ready(self, *slots: int) -> list[Action]:
        found: list[Action] = []
        for slot in slots or [slot for slot, worker in self.workers.items() if not worker.ready]:
            self.workers[slot].ready = True
            found += self.perform(self.brain.on_worker_ready(slot, 100 + slot, self.now))
        return found

    def claimed(self, *found: Claimed, failed: bool = False) -> list[Action]:
        return self.perform(self.brain.on_claimed(found, CLAIM, self.now, failed=failed))

    def marked(self, *ids: int) -> list[Action]:
        return self.perform(self.brain.on_marked(ids, self.now))

    def start(self, slot: int = 1) -> int:
        return self.workers[slot].start().id

    def end(self, slot: int = 1, outcome: int = wire.RETURNED, **how: Any) -> list[Action]:
        self.workers[slot].end(self.now, outcome, **how)
        return self.read(slot)

    def read(self, slot: int = 1) -> list[Action]:
        worker = self.workers[slot]
        results, worker.results = worker.results, []
        return self.perform(self.brain.on_results(slot, results, self.now))

    def work_off(self, slot: int, count: int, *, spent: int = MS) -> None:
        for _ in range(count):
            self.start(slot)
            self.end(slot, spent=spent)

    def tick(self, after: int = 0) -> list[Action]:
        self.now += after
        views = {slot: worker.view() for slot, worker in self.workers.items()}
        return self.perform(self.brain.on_tick(self.now, views))

    def cancel(self, id: int, how: str = "cancel", reason: str | None = None) -> list[Action]:
        done = self.perform(self.brain.on_cancel(id, how, reason, self.now))
        return done + self.tick()

    def die(self, slot: int = 1, status: int | None = signal.SIGKILL, cpu: int = 5) -> list[Action]:
        heard = self.read(slot)
        worker = self.workers.pop(slot)
        self.dead.append(worker)
        return heard + self.perform(
            self.brain.on_worker_ended(slot, status, cpu, 6, worker.view(), self.now)
        )

    def swept(self, token: int) -> list[Action]:
        return self.perform(self.brain.on_swept(token, self.now))

    def guard_dies(self) -> list[Action]:
        views = {slot: worker.view() for slot, worker in self.workers.items()}
        found = [action for slot in list(self.workers) for action in self.read(slot)]
        found += self.perform(self.brain.on_guard_died(views, self.now))
        self.workers.clear()
        return found

    def drain(self, *, hurry: bool = False) -> list[Action]:
        return self.perform(self.brain.on_drain(self.now, hurry=hurry))

    # what is done

    def perform(self, actions: list[Action]) -> list[Action]:
        """Gives them all, with those that followed from taking back."""
        done: list[Action] = []
        for action in actions:
            done.append(action)
            match action:
                case do.SpawnWorker(slot):
                    self.workers[slot] = FakeWorker()
                case do.GiveJobs(slot, serial, given):
                    self.workers[slot].give(serial, given)
                case do.TakeJobsBack(slot):
                    count = self.workers[slot].take_back()
                    done += self.perform(self.brain.on_taken_back(slot, count, self.now))
                case do.RequestStop(slot, place):
                    self.workers[slot].asked = place
                case do.SignalWorker(slot, number):
                    self.workers[slot].signals.append(number)
                case do.DismissWorker(slot):
                    self.workers[slot].dismissed = True
                case do.RequestStopOfAll():
                    for worker in self.workers.values():
                        worker.drains = True
                case do.WriteSuccesses(fine):
                    self.ended.update({one.id: one for one in fine})
                case do.WriteEndings(other):
                    self.ended.update({one.id: one for one in other})
                case _:
                    pass
        return done

    def ending(self, id: int) -> Ending:
        found = self.ended[id]
        assert isinstance(found, Ending)
        return found

    def given(self, slot: int = 1) -> list[int]:
        """What the worker has not started yet."""
        return [job.id for _, job in self.workers[slot].unread]


def of(kind: type[A], actions: Sequence[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def a_stage(workers: int = 1, *, mean: int | None = None, **settings: Any) -> Stage:
    """All workers are there; `mean`: and have shown how long a job takes."""
    stage = Stage(min=workers, **settings)
    stage.ready()
    if mean is not None:
        stage.claimed(a_job(1_000_000))
        stage.work_off(1, 1, spent=mean)
        stage.ended.clear()
    return stage


# giving


def test_while_nothing_is_measured_each_worker_gets_one_job() -> None:
    stage = a_stage(2)

    stage.claimed(*jobs(1, 5))

    assert (stage.given(1), stage.given(2)) == ([1], [2])


def test_heavy_jobs_are_given_in_advance_by_their_weight() -> None:
    few, many = a_stage(mean=MS), a_stage(10, mean=MS)

    for stage in (few, many):
        stage.claimed(*(job._replace(args=bytes(1 << 20)) for job in jobs(1, 200)))

    assert few.given() == list(range(1, 41))
    assert [len(many.given(slot)) for slot in range(1, 11)] == [8] * 10


def test_heavy_jobs_travel_in_smaller_bunches() -> None:
    stage = a_stage(mean=1)

    given = of(
        do.GiveJobs, stage.claimed(*(job._replace(args=bytes(10_000)) for job in jobs(1, 30)))
    )

    assert [len(give.jobs) for give in given] == [13, 13, 4]


def test_after_heavy_jobs_light_ones_are_given_as_before() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*(job._replace(args=bytes(1 << 20)) for job in jobs(1, 8)))
    stage.work_off(1, 8)
    for id in range(9, 19):
        stage.claimed(a_job(id))
        stage.work_off(1, 1)

    stage.claimed(*jobs(20, 200))

    assert len(stage.given()) == 50


def patience(actions: list[Action]) -> list[int]:
    return [one.patience for one in of(do.WriteSuccesses, actions)]


@pytest.mark.parametrize(
    ("mean", "count", "waits"),
    [(MS, 50, True), (MS, 5, False), (20, 2000, False), (10 * MS, 5, False)],
    ids=["short", "short, but few", "tiny", "long"],
)
def test_the_end_of_a_short_job_may_wait_for_others_while_there_are_more(
    mean: int, count: int, waits: bool
) -> None:
    stage = a_stage(mean=mean)
    stage.claimed(*jobs(1, count))
    stage.start()

    assert [time > 0 for time in patience(stage.end(spent=mean))] == [waits]


def test_an_end_that_frees_a_slot_of_a_limit_does_not_wait() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*(job._replace(buckets="b") for job in jobs(1, 50)))
    stage.start()

    assert patience(stage.end(spent=MS)) == [0]


def test_short_jobs_are_given_in_advance_as_much_as_fifty_milliseconds_of_work() -> None:
    stage = a_stage(mean=MS)

    stage.claimed(*jobs(1, 200))

    assert stage.given() == list(range(1, 51))


def test_very_short_jobs_travel_in_bunches_up_to_a_limit() -> None:
    stage = a_stage(mean=1)

    given = of(do.GiveJobs, stage.claimed(*jobs(1, 4000)))

    assert [len(give.jobs) for give in given] == [64] * 32
    assert stage.given() == list(range(1, 2049))


def test_long_jobs_are_never_given_in_advance() -> None:
    stage = a_stage(mean=30 * MS)

    stage.claimed(*jobs(1, 10))

    assert stage.given() == [1]


def test_a_tiny_job_that_was_held_up_hardly_counts() -> None:
    stage = a_stage(mean=20)
    stage.claimed(a_job(1))
    stage.work_off(1, 1, spent=20 * MS)

    stage.claimed(*jobs(2, 4000))

    assert len(stage.given()) > 1000


def test_a_long_job_after_tiny_ones_counts_at_once() -> None:
    stage = a_stage(mean=20)
    stage.claimed(a_job(1))
    stage.work_off(1, 1, spent=10_000 * MS)

    stage.claimed(*jobs(2, 4000))

    assert len(stage.given()) == 1


def test_what_is_ready_is_shared_among_the_workers() -> None:
    stage = a_stage(3, mean=MS)

    stage.claimed(*jobs(1, 30))

    assert [len(stage.given(slot)) for slot in (1, 2, 3)] == [10, 10, 10]


def test_a_worker_is_refilled_when_half_of_its_work_is_done() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*jobs(1, 200))

    stage.work_off(1, 24)
    assert len(stage.given()) == 26
    stage.work_off(1, 1)
    assert len(stage.given()) == 50


def test_nothing_is_given_behind_a_job_that_has_turned_out_to_be_long() -> None:
    stage = a_stage(2, mean=MS)
    stage.claimed(*jobs(1, 20))
    stage.start(1)
    stage.tick()
    stage.tick(300 * MS)
    assert stage.given(1) == []

    stage.claimed(*jobs(21, 200))
    while stage.given(2):
        stage.work_off(2, 1)

    assert stage.given(1) == []
    assert len(stage.ended) == 199


def test_a_clock_that_is_set_back_during_a_job_spoils_no_measurement() -> None:
    stage = a_stage(mean=-3600 * SECOND)

    stage.claimed(*jobs(1, 100))

    assert len(stage.given()) == 100


@pytest.mark.parametrize(
    "options", [{"timeout": SECOND}, {"stall_timeout": SECOND}, {"memory": 1 << 20}]
)
def test_a_job_that_is_watched_has_its_worker_for_itself(options: dict[str, int]) -> None:
    stage = a_stage(mean=MS)

    stage.claimed(a_job(1, **options), *jobs(2, 9))
    assert stage.given() == [1]
    stage.work_off(1, 1)
    assert stage.given() == [2, 3, 4, 5, 6, 7, 8, 9]


def test_no_job_waits_behind_one_that_takes_longer_than_expected() -> None:
    stage = a_stage(1, mean=MS, pool="dynamic", max=2)
    stage.claimed(a_job(1))
    stage.start(1)
    stage.now += 20 * MS
    stage.claimed(a_job(2))
    assert stage.given(1) == [2]  # it may be over in a moment

    stage.now += 40 * MS
    spawned = of(do.SpawnWorker, stage.claimed(a_job(3)))

    assert [one.slot for one in spawned] == [2]
    assert stage.given(1) == [2]
    stage.ready()
    assert stage.given(2) == [3]


def test_a_job_that_must_start_alone_does_not_starve_behind_short_ones() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*jobs(1, 100))
    stage.claimed(a_job(500, timeout=SECOND))

    stage.work_off(1, 50)

    assert stage.given() == [500]


# mark before start


@pytest.mark.parametrize("job", [a_job(1, at_most_once=True), a_job(1, losses=1)])
def test_what_must_not_run_unseen_starts_only_when_its_mark_is_written(job: Claimed) -> None:
    stage = a_stage()

    done = stage.claimed(job)
    assert of(do.MarkStarted, done) == [
        do.MarkStarted([(1, 1, CLAIM, WALL + stage.now)], first=True)
    ]
    assert stage.given() == []
    assert stage.brain.claimed_ids() == [1]

    stage.marked(1)
    assert stage.given() == [1]


def test_a_job_whose_mark_was_refused_is_not_ours() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, at_most_once=True))

    stage.brain.on_mark_lost([1])

    stage.marked()
    assert stage.given() == []
    assert stage.brain.claimed_ids() == []


def test_a_job_cancelled_while_its_mark_is_being_written_never_starts() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, at_most_once=True))

    stage.cancel(1, reason="not any more")
    stage.marked(1)

    assert stage.given() == []
    assert (stage.ending(1).state, stage.ending(1).reason) == ("cancelled", "not any more")
    assert not stage.ending(1).happened


def test_a_drain_gives_back_what_was_being_marked() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, at_most_once=True))

    stage.drain()
    assert not stage.brain.empty
    stage.marked(1)

    assert stage.ending(1).state == "waiting"
    assert stage.brain.empty


# claiming


def test_it_claims_as_much_as_its_workers_can_use_and_never_twice_at_a_time() -> None:
    stage = Stage(min=3, zygote=False)

    assert of(do.ClaimJobs, stage.zygote()) == [do.ClaimJobs({"default": 3})]
    assert of(do.ClaimJobs, stage.ready()) == []
    assert of(do.ClaimJobs, stage.claimed(*jobs(1, 3))) == []
    stage.start(1)
    assert of(do.ClaimJobs, stage.end(1, spent=MS)) == [do.ClaimJobs({"default": 148})]


def test_after_a_claim_that_found_nothing_it_waits_to_be_rung() -> None:
    stage = a_stage()
    stage.claimed()

    assert of(do.ClaimJobs, stage.tick(60 * SECOND)) == []
    assert of(do.ClaimJobs, stage.perform(stage.brain.on_wakeup(stage.now))) == [
        do.ClaimJobs({"default": 1})
    ]


def test_a_node_woken_while_it_claims_claims_once_more() -> None:
    """The answer may be older than what it was rung for."""
    stage = a_stage()
    assert of(do.ClaimJobs, stage.perform(stage.brain.on_wakeup(stage.now))) == []

    assert of(do.ClaimJobs, stage.claimed()) == [do.ClaimJobs({"default": 1})]
    assert of(do.ClaimJobs, stage.claimed()) == []


def test_after_a_claim_that_failed_it_asks_again_soon_and_by_itself() -> None:
    stage = a_stage()
    stage.claimed(failed=True)

    assert of(do.ClaimJobs, stage.tick(400 * MS)) == []
    assert of(do.ClaimJobs, stage.tick(200 * MS)) == [do.ClaimJobs({"default": 1})]


def test_each_queue_gets_its_part_of_a_claim() -> None:
    stage = Stage(min=4, queues={"a": None, "b": None}, zygote=False)

    assert of(do.ClaimJobs, stage.zygote()) == [do.ClaimJobs({"a": 2, "b": 2})]


# taking back


def test_what_waits_behind_a_long_job_goes_to_another_worker() -> None:
    stage = a_stage(2, mean=MS)
    stage.claimed(*jobs(1, 10))
    assert (stage.given(1), stage.given(2)) == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    stage.work_off(2, 5)
    stage.start(1)
    stage.tick()

    assert of(do.TakeJobsBack, stage.tick(200 * MS)) == []
    assert of(do.TakeJobsBack, stage.tick(100 * MS)) == [do.TakeJobsBack(1)]

    assert stage.given(1) == []
    assert stage.given(2) == [2]  # jobs are long, it seems: no more in advance
    assert sorted(stage.brain.claimed_ids()) == [1, 2, 3, 4, 5]


def test_of_several_bunches_exactly_those_come_back_that_have_not_started() -> None:
    stage = a_stage(2, mean=100)
    stage.claimed(*jobs(1, 400))
    stage.work_off(1, 100, spent=100)  # into its second bunch, and refilled
    running = stage.start(1)
    before = sorted(stage.brain.claimed_ids())
    stage.tick()
    stage.tick(300 * MS)

    assert stage.given(1) == []
    assert running in stage.brain.claimed_ids()
    assert sorted(stage.brain.claimed_ids()) == before

    stage.end(1, spent=300 * MS)
    assert isinstance(stage.ended[running], Success)


def test_more_bunches_than_a_byte_can_number_come_back_whole_and_in_order() -> None:
    stage = a_stage(mean=50)
    for id in range(1, 300):
        stage.claimed(a_job(id))  # one by one: as many bunches
    assert len(stage.given()) > 256
    stage.start()

    stage.cancel(5)

    rest = [2, 3, 4, *range(6, 300)]
    assert sorted(stage.brain.claimed_ids()) == [1, *rest]
    stage.end(spent=10)
    order = []
    while stage.given():
        order.append(stage.start())
        stage.end(spent=10)
    assert order == rest
    assert stage.brain.claimed_ids() == []


# death of a worker


def exited(code: int) -> int:
    return code << 8


@pytest.mark.parametrize(
    ("status", "cause", "state"),
    [
        (signal.SIGKILL, "signal 9", "scheduled"),
        (signal.SIGSEGV, "signal 11", "scheduled"),
        (signal.SIGSEGV | 0x80, "signal 11", "scheduled"),  # with a core file
        (exited(0), "exit 0", "scheduled"),
        (exited(3), "exit 3", "scheduled"),
        (None, "collateral", "waiting"),
    ],
)
def test_the_running_job_of_a_dead_worker_gets_the_cause_of_the_death(
    status: int | None, cause: str, state: str
) -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    (sweep,) = of(do.SweepLeftovers, stage.die(1, status))
    stage.swept(sweep.token)

    ending = stage.ending(1)
    assert (ending.cause, ending.state, ending.happened) == (cause, state, True)
    assert (ending.pid, ending.cpu, ending.peak) == (101, 5, 6)
    assert os.WIFSIGNALED(status or 0) == cause.startswith("signal")


def test_usage_of_earlier_jobs_is_not_counted_for_the_job_that_killed_the_worker() -> None:
    stage = a_stage(mean=20)
    stage.claimed(a_job(1))
    stage.start()
    stage.tick(after=3 * MS)
    stage.tick(after=3 * MS)

    (sweep,) = of(do.SweepLeftovers, stage.die(cpu=10 * SECOND))
    stage.swept(sweep.token)

    assert 0 <= (stage.ending(1).cpu or 0) <= 10 * MS


def test_a_crash_is_counted_and_the_job_waits_before_it_comes_again() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, crashes=1))
    stage.start()

    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    ending = stage.ending(1)
    assert (ending.crashes, ending.wait) == (2, 2 * SECOND)
    assert ending.rank_priority == -2  # one lower each time


def test_an_at_most_once_job_that_died_is_not_run_again() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, at_most_once=True))
    stage.marked(1)
    stage.start()

    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    assert (stage.ending(1).state, stage.ending(1).cause) == ("failed", "maybe_ran")


def test_the_tree_of_a_dead_worker_is_gone_before_its_job_is_let_go() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    done = stage.die()

    assert of(do.SweepLeftovers, done)
    assert of(do.WriteEndings, done) == []
    assert stage.brain.claimed_ids() == [1]
    assert not stage.brain.empty
    stage.swept(of(do.SweepLeftovers, done)[0].token)
    assert 1 in stage.ended
    assert stage.brain.claimed_ids() == []


@pytest.mark.parametrize("phase", [wire.IDLE, wire.DONE])
def test_a_worker_that_dies_between_two_jobs_has_no_victim(phase: int) -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*jobs(1, 3))
    if phase == wire.DONE:
        stage.start()
        stage.workers[1].end(stage.now)

    stage.die()

    unstarted = [2, 3] if phase == wire.DONE else [1, 2, 3]
    assert sorted(stage.ended) == ([1] if phase == wire.DONE else [])
    assert stage.brain.claimed_ids() == unstarted
    stage.ready()
    assert stage.given(2) == unstarted


def test_a_result_that_lay_in_the_ring_is_heard_before_the_death() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*jobs(1, 3))
    stage.start()
    stage.workers[1].end(stage.now)
    stage.start()

    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    assert isinstance(stage.ended[1], Success)
    assert stage.ending(2).cause == "signal 9"
    assert 3 not in stage.ended


def test_one_that_died_after_its_result_and_before_its_last_word_is_no_victim() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.workers[1].end(stage.now)
    stage.workers[1].phase = wire.RUNNING  # the result is written first

    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    assert isinstance(stage.ended[1], Success)


def test_innocents_keep_their_place_in_the_queue() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*(a_job(id, rank=-id) for id in (9, 8, 7, 6)))
    stage.claimed(a_job(1, rank=1))
    stage.start()

    stage.die()
    stage.ready()

    assert stage.given(2) == [8, 7, 6, 1]


def test_the_death_of_the_guard_is_nobodys_fault() -> None:
    stage = a_stage(2, mean=MS)
    stage.claimed(*jobs(1, 6))
    stage.start(1)
    (sweep,) = of(do.SweepLeftovers, stage.die(1))
    stage.start(2)

    stage.guard_dies()

    assert (stage.ending(1).cause, stage.ending(1).crashes) == (
        "signal 9",
        1,
    )  # it waited for its sweep
    assert (stage.ending(4).cause, stage.ending(4).state, stage.ending(4).crashes) == (
        "collateral",
        "waiting",
        0,
    )
    assert stage.brain.claimed_ids() == [2, 3, 5, 6]
    assert stage.swept(sweep.token) == []
    stage.zygote()
    stage.ready()
    assert sorted(id for slot in stage.workers for id in stage.given(slot)) == [2, 3, 5, 6]


def test_while_there_is_no_zygote_nothing_is_started_and_nothing_claimed() -> None:
    stage = a_stage(2)
    stage.perform(stage.brain.on_zygote_gone())
    stage.claimed()

    done = stage.die(1) + stage.perform(stage.brain.on_wakeup(stage.now))

    assert not of(do.SpawnWorker, done)
    assert not of(do.ClaimJobs, done)
    assert len(of(do.SpawnWorker, stage.zygote())) == 1


def an_orphan(**facts: Any) -> Orphan:
    given: dict[str, Any] = dict.fromkeys(Orphan._fields, 0) | {
        "id": 1,
        "claim": CLAIM,
        "task": "tasks.work",
        "started_mark": None,
        "options": None,
        "cancel_requested": None,
    }
    return Orphan(**given | facts)


def test_a_job_of_a_lost_node_has_crashed_if_its_start_was_marked_and_else_is_lost() -> None:
    crashed = judge_lost_job(an_orphan(started_mark=WALL), WALL, lambda: 0.0)
    lost = judge_lost_job(an_orphan(), WALL, lambda: 0.0)
    cancelled = judge_lost_job(
        an_orphan(started_mark=WALL, cancel_requested="cancel"), WALL, lambda: 0.0
    )

    assert (crashed.state, crashed.crashes, crashed.losses, crashed.happened) == (
        "scheduled",
        1,
        0,
        True,
    )
    assert (lost.state, lost.crashes, lost.losses) == ("waiting", 0, 1)
    assert lost.happened  # its number is not given again
    assert (cancelled.state, cancelled.reason) == ("cancelled", "cancelled")
    killed = judge_lost_job(
        an_orphan(started_mark=WALL, cancel_requested="kill"), WALL, lambda: 0.0
    )
    assert (killed.state, killed.reason) == ("cancelled", "killed")


# cancel and kill


def test_a_job_that_is_ready_is_cancelled_at_once_and_leaves_no_attempt() -> None:
    stage = a_stage()
    stage.claimed(*jobs(1, 3))

    stage.cancel(2, reason="wrong")

    assert (stage.ending(2).state, stage.ending(2).reason, stage.ending(2).happened) == (
        "cancelled",
        "wrong",
        False,
    )
    assert sorted(stage.brain.claimed_ids()) == [1, 3]


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_a_job_given_in_advance_comes_back_by_its_token_and_no_worker_is_stopped(how: str) -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*jobs(1, 5))
    stage.start()

    stage.cancel(3, how)

    assert (stage.ending(3).state, stage.ending(3).happened) == ("cancelled", False)
    assert (stage.workers[1].asked, stage.workers[1].signals) == (None, [])
    assert stage.given() == [2, 4, 5]


def test_a_job_alone_in_its_worker_comes_back_too_if_it_has_not_started() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, timeout=SECOND), a_job(2))

    stage.cancel(1)

    assert not stage.ending(1).happened
    assert stage.given() == [2]


def test_a_running_job_gets_the_flag_and_sigterm_at_once_and_sigkill_after_its_grace() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, grace=4 * SECOND))
    stage.start()
    worker = stage.workers[1]

    stage.cancel(1)
    assert (worker.asked, worker.signals) == (worker.place, [signal.SIGTERM])
    stage.tick(3900 * MS)
    assert worker.signals == [signal.SIGTERM]
    stage.tick(200 * MS)
    assert worker.signals == [signal.SIGTERM, signal.SIGKILL]

    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)
    assert (stage.ending(1).state, stage.ending(1).cause) == ("cancelled", "cancelled")


def test_a_job_that_looks_at_the_flag_has_half_of_its_grace_before_sigterm() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, grace=4 * SECOND))
    stage.start()
    worker = stage.workers[1]
    worker.checked_stop = True

    stage.cancel(1)
    for _ in range(39):
        stage.tick(50 * MS)
    assert (worker.asked, worker.signals) == (worker.place, [])
    stage.tick(50 * MS)
    assert worker.signals == [signal.SIGTERM]
    stage.tick(2 * SECOND)
    assert worker.signals == [signal.SIGTERM, signal.SIGKILL]


def test_a_kill_does_not_ask_the_job() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    stage.cancel(1, "kill", "now")
    assert stage.workers[1].signals == [signal.SIGKILL]
    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    assert (stage.ending(1).state, stage.ending(1).cause, stage.ending(1).reason) == (
        "cancelled",
        "killed",
        "now",
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ([("kill", None)], "killed"),
        ([("cancel", None), ("kill", None)], "killed"),
        ([("kill", None), ("cancel", None)], "killed"),
        ([("cancel", "enough"), ("kill", None)], "enough"),
        ([("cancel", "enough"), ("kill", "now")], "now"),
    ],
)
def test_the_reason_of_a_kill_is_the_given_one_or_that_it_was_killed(
    asked: list[tuple[str, str | None]], reason: str
) -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    for how, said in asked:
        stage.cancel(1, how, said)
    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    assert (stage.ending(1).cause, stage.ending(1).reason) == ("killed", reason)


def test_asking_again_gives_no_more_time_and_does_not_take_back_a_kill() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, grace=4 * SECOND))
    stage.start()
    stage.cancel(1)
    stage.now += 3 * SECOND
    stage.cancel(1)

    stage.tick(SECOND)
    assert stage.workers[1].signals == [signal.SIGTERM, signal.SIGKILL]
    stage.cancel(1, "kill")
    stage.cancel(1)
    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)
    assert stage.ending(1).cause == "killed"


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [(wire.RETURNED, "cancelled"), (wire.STOPPED, "cancelled"), (wire.RAISED, "exception")],
)
def test_however_it_ends_after_it_was_asked_to_stop_it_is_cancelled(
    outcome: int, cause: str
) -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.cancel(1, reason="enough")

    stage.end(1, outcome, payload=an_error())

    assert (stage.ending(1).state, stage.ending(1).cause, stage.ending(1).reason) == (
        "cancelled",
        cause,
        "enough",
    )
    assert stage.brain.claimed_ids() == []


def test_a_cancelled_job_that_is_queued_anew_starts_with_a_clean_slate() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.cancel(1)
    stage.end()

    stage.claimed(a_job(1, on_exception="fail"))
    stage.start()
    stage.end(1, wire.RAISED, payload=an_error())

    assert stage.ending(1).state == "failed"


def test_a_job_cancelled_while_its_worker_dies_is_not_given_to_another() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    worker = stage.workers[1]
    worker.unread.popleft()  # its token is read, its status word not yet written
    stage.cancel(1)
    assert worker.signals == []

    stage.die()
    stage.ready()

    assert (stage.ending(1).state, stage.ending(1).happened) == ("cancelled", False)
    assert stage.given(2) == []


def test_signals_meant_for_a_job_that_has_ended_do_not_hit_the_next() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*jobs(1, 3))
    stage.start()
    worker = stage.workers[1]
    first = worker.place
    worker.end(stage.now)  # its result is in the ring, and not read yet
    stage.start()

    stage.cancel(1)
    stage.tick(60 * SECOND)

    assert first != worker.place
    assert worker.signals == []
    stage.read(1)
    assert stage.ending(1).state == "cancelled"


def test_a_cancel_of_a_job_that_we_do_not_have_is_nothing() -> None:
    stage = a_stage()

    assert stage.brain.on_cancel(5, "cancel", None, stage.now) == []


# timers


def test_a_job_is_stopped_when_its_time_is_over() -> None:
    stage = a_stage()
    stage.claimed(
        a_job(1, timeout=10 * SECOND, grace=2 * SECOND, retry={"times": 1, "delay": "1s"})
    )
    stage.tick(3 * SECOND)  # the worker was slow to begin: the time counts from when it was given
    stage.start()
    worker = stage.workers[1]

    stage.tick(6900 * MS)
    assert worker.signals == []
    stage.tick(200 * MS)
    assert (worker.asked, worker.signals) == (worker.place, [signal.SIGTERM])
    stage.end(1, wire.STOPPED, payload=an_error("stopped"))

    ending = stage.ending(1)
    assert (ending.cause, ending.state, ending.retries) == ("timeout", "scheduled", 1)
    assert ending.error == an_error("stopped").decode()


def test_one_that_looks_at_the_flag_gets_its_time_also_at_a_timeout() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, timeout=10 * SECOND, grace=2 * SECOND))
    stage.start()
    stage.workers[1].checked_stop = True

    stage.tick()
    stage.tick(10 * SECOND)
    assert (stage.workers[1].asked, stage.workers[1].signals) == (stage.workers[1].place, [])
    stage.tick(SECOND)
    assert stage.workers[1].signals == [signal.SIGTERM]


def test_one_that_does_not_stop_is_killed_and_has_timed_out() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, timeout=SECOND, grace=SECOND))
    stage.start()
    stage.tick(SECOND)
    stage.tick(SECOND)
    assert stage.workers[1].signals == [signal.SIGTERM, signal.SIGKILL]

    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    assert (stage.ending(1).state, stage.ending(1).cause) == ("timed_out", "timeout")


def test_a_job_stalls_when_it_gives_no_sign_of_life() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, stall_timeout=2 * SECOND))
    stage.start()
    worker = stage.workers[1]
    stage.tick()
    for _ in range(5):
        worker.beats += 1
        stage.tick(1900 * MS)
    assert worker.signals == []

    stage.tick(2 * SECOND)
    assert worker.signals == [signal.SIGTERM]
    stage.end(1, wire.STOPPED, payload=an_error())
    assert (stage.ending(1).cause, stage.ending(1).state) == ("stall", "timed_out")


def test_a_job_that_runs_for_a_second_is_marked_once() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.tick(100 * MS)
    began = stage.now

    done = [action for _ in range(30) for action in stage.tick(100 * MS)]

    assert of(do.MarkStarted, done) == [do.MarkStarted([(1, 1, CLAIM, WALL + began)])]


def test_progress_is_written_at_most_every_half_second_and_with_the_end() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    notes = []
    for n in range(20):
        stage.workers[1].note(n, "tile")
        notes += of(do.WriteProgress, stage.tick(100 * MS))
    assert len(notes) == 4
    assert notes[0] == do.WriteProgress([(1, 1, CLAIM, '[0.0,100.0,"tile"]')])

    stage.workers[1].note(20)
    stage.end(1, wire.RAISED, payload=an_error(), extra={"progress": '[20.0,100.0,""]'})

    assert stage.ending(1).progress == '[20.0,100.0,""]'


def test_a_job_that_reports_progress_is_marked_as_running_before() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.workers[1].note(1)
    done = [
        action
        for _ in range(30)
        for action in stage.tick(100 * MS)
        if isinstance(action, do.MarkStarted | do.WriteProgress)
    ]

    assert [type(action) for action in done] == [do.MarkStarted, do.WriteProgress]


def test_a_task_may_have_its_progress_written_less_often() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, progress_every=SECOND))
    stage.start()
    notes = []
    for n in range(20):
        stage.workers[1].note(n)
        notes += of(do.WriteProgress, stage.tick(100 * MS))

    assert len(notes) == 2


def test_progress_of_a_killed_job_is_kept_and_that_of_an_earlier_one_is_not() -> None:
    stage = a_stage(2)
    stage.claimed(*jobs(1, 2))
    for slot in (1, 2):
        stage.start(slot)
        stage.workers[slot].note(7)
    stage.end(2)
    stage.claimed(a_job(3))
    stage.start(2)

    for slot in (1, 2):
        (sweep,) = of(do.SweepLeftovers, stage.die(slot))
        stage.swept(sweep.token)

    assert stage.ending(1).progress == '[7.0,100.0,""]'
    assert stage.ending(3).progress is None


# drain


def test_a_drain_gives_back_all_that_has_not_started_and_lets_the_rest_end() -> None:
    stage = a_stage(2, mean=MS)
    stage.claimed(*jobs(1, 10))
    stage.start(1)

    stage.drain()

    assert sorted(stage.ended) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert {stage.ending(id).state for id in stage.ended} == {"waiting"}
    assert not any(stage.ending(id).happened for id in stage.ended)
    assert stage.workers[1].drains
    assert not stage.brain.empty
    stage.end(1)
    assert isinstance(stage.ended[1], Success)
    assert stage.brain.empty
    assert stage.given(1) == []


def test_jobs_that_come_while_it_drains_go_back() -> None:
    stage = a_stage()
    stage.drain()

    stage.claimed(*jobs(1, 3))

    assert [stage.ending(id).state for id in (1, 2, 3)] == ["waiting"] * 3


def test_a_job_that_outlives_the_grace_of_a_drain_is_stopped_and_released_uncounted() -> None:
    stage = a_stage(grace=10 * SECOND)
    stage.claimed(a_job(1))
    stage.start()
    stage.drain()

    stage.tick(9 * SECOND)
    assert stage.workers[1].signals == []
    stage.tick(SECOND)
    stage.tick(50 * MS)
    assert (stage.workers[1].asked, stage.workers[1].signals) == (
        stage.workers[1].place,
        [signal.SIGTERM],
    )
    stage.tick(2 * SECOND)
    assert stage.workers[1].signals == [signal.SIGTERM, signal.SIGKILL]
    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    assert (stage.ending(1).state, stage.ending(1).cause, stage.ending(1).crashes) == (
        "waiting",
        "drain",
        0,
    )
    assert stage.brain.empty


def test_a_second_signal_hurries() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.drain()
    stage.drain(hurry=True)

    stage.tick()
    stage.tick(50 * MS)

    assert stage.workers[1].signals == [signal.SIGTERM]
    stage.end(1, wire.STOPPED, payload=an_error())
    assert (stage.ending(1).state, stage.ending(1).cause, stage.ending(1).error) == (
        "waiting",
        "drain",
        None,
    )


def test_a_worker_asked_to_exit_has_a_second_more_than_the_grace_of_a_drain() -> None:
    stage = a_stage(grace=3 * SECOND)
    stage.claimed(a_job(1))
    stage.start()
    stage.end(1)
    stage.drain()

    stage.tick(3 * SECOND)
    assert (stage.workers[1].dismissed, stage.workers[1].signals) == (True, [])
    stage.tick(SECOND)
    assert stage.workers[1].signals == [signal.SIGKILL]


def test_a_drain_has_a_moment_at_which_the_node_is_gone_and_a_second_signal_brings_it_nearer() -> (
    None
):
    stage = a_stage(grace=10 * SECOND)
    assert stage.brain.leave_by is None
    stage.drain()
    assert stage.brain.leave_by == stage.now + 11 * SECOND + 750 * MS
    stage.drain(hurry=True)
    assert stage.brain.leave_by == stage.now + SECOND + 750 * MS


def test_a_worker_that_dies_during_a_drain_does_not_keep_it_from_ending() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*jobs(1, 3))
    worker = stage.workers[1]
    stage.start()
    worker.unread.clear()  # read, and not yet begun
    stage.drain()

    (sweep,) = of(do.SweepLeftovers, stage.die())
    stage.swept(sweep.token)

    assert {id: stage.ending(id).state for id in (1, 2, 3)} == {
        1: "scheduled",
        2: "waiting",
        3: "waiting",
    }
    assert stage.brain.empty


def test_the_guard_may_die_during_a_drain() -> None:
    stage = a_stage(mean=MS)
    stage.claimed(*jobs(1, 3))
    worker = stage.workers[1]
    stage.start()
    worker.unread.popleft()
    stage.drain()

    stage.guard_dies()

    assert {stage.ending(id).state for id in (1, 2, 3)} == {"waiting"}
    assert stage.brain.empty


# staff


def test_a_static_pool_has_its_workers_from_the_start_and_replaces_them() -> None:
    stage = Stage(min=3, zygote=False)

    assert len(of(do.SpawnWorker, stage.zygote())) == 3
    stage.ready()
    stage.claimed()
    assert len(of(do.SpawnWorker, stage.die(2))) == 1
    assert of(do.DismissWorker, stage.tick(3600 * SECOND)) == []


def test_a_dynamic_pool_grows_with_the_work_and_shrinks_when_idle() -> None:
    stage = Stage(pool="dynamic", min=1, max=3, zygote=False)
    assert len(of(do.SpawnWorker, stage.zygote())) == 1
    stage.ready()

    assert len(of(do.SpawnWorker, stage.claimed(*jobs(1, 3)))) == 2
    assert of(do.SpawnWorker, stage.tick(SECOND)) == []  # they are coming
    stage.ready()
    for slot in (1, 2, 3):
        stage.work_off(slot, 1, spent=SECOND)
    stage.claimed()

    assert of(do.DismissWorker, stage.tick(9 * SECOND)) == []
    assert len(of(do.DismissWorker, stage.tick(2 * SECOND))) == 2
    assert (
        of(do.DismissWorker, stage.tick(10 * SECOND)) == []
    )  # one stays, although the others have not left yet
    done = [action for slot in (1, 2) for action in stage.die(slot, exited(0))]
    assert of(do.SpawnWorker, done) == []


def test_a_dynamic_pool_never_has_more_than_its_maximum() -> None:
    stage = Stage(pool="dynamic", min=0, max=3, zygote=False)
    assert of(do.SpawnWorker, stage.zygote()) == []

    assert len(of(do.SpawnWorker, stage.claimed(*jobs(1, 9)))) == 3


def test_an_ondemand_pool_has_one_process_for_each_job_which_finds_it_on_arrival() -> None:
    stage = Stage(pool="ondemand", min=2, max=2, zygote=False)
    assert of(do.SpawnWorker, stage.zygote()) == []

    done = stage.claimed(*jobs(1, 3))
    assert len(of(do.SpawnWorker, done)) == 2
    assert (stage.given(1), stage.given(2)) == ([1], [2])
    assert of(do.DismissWorker, done) == [do.DismissWorker(1), do.DismissWorker(2)]
    stage.ready()
    stage.start(1)
    done = stage.end(1, spent=10)
    assert of(do.SpawnWorker, done) == [
        do.SpawnWorker(3)
    ]  # without waiting for the end of the first
    assert stage.given(3) == [3]
    assert stage.given(1) == []
    assert of(do.SpawnWorker, stage.die(1, exited(0))) == []


def an_ondemand_stage(*, forks: bool, mean: int) -> Stage:
    """Two workers at most; it is known how long a job takes."""
    stage = Stage(pool="ondemand", max=2)
    stage.brain.workers_fork = forks
    stage.claimed(a_job(1_000_000))
    stage.ready()
    stage.work_off(1, 1, spent=mean)
    stage.die(1, exited(0))
    return stage


def test_an_ondemand_worker_gets_several_short_jobs_and_forks_for_each() -> None:
    stage = an_ondemand_stage(forks=True, mean=MS)

    done = of(do.GiveJobs, stage.claimed(*jobs(1, 8)))
    assert [(give.slot, give.each) for give in done] == [(2, True), (3, True)]
    assert (stage.given(2), stage.given(3)) == ([1, 2, 3, 4], [5, 6, 7, 8])
    assert stage.workers[2].dismissed  # after them
    stage.ready(2)
    stage.start(2)
    stage.end(2, extra={"pid": 77})
    assert stage.ended[1].pid == 77


@pytest.mark.parametrize(("forks", "mean"), [(False, MS), (True, 20 * MS)])
def test_an_ondemand_worker_gets_one_job_if_it_cannot_fork_or_a_fork_is_little(
    forks: bool, mean: int
) -> None:
    stage = an_ondemand_stage(forks=forks, mean=mean)

    done = of(do.GiveJobs, stage.claimed(*jobs(1, 8)))
    assert [(give.slot, len(give.jobs), give.each) for give in done] == [
        (2, 1, False),
        (3, 1, False),
    ]


def test_a_job_that_dies_in_its_own_process_harms_none_of_those_behind_it() -> None:
    stage = an_ondemand_stage(forks=True, mean=MS)
    stage.claimed(*jobs(1, 4))
    stage.ready()
    stage.start(2)
    stage.workers[2].pid = 77
    stage.workers[2].unread.clear()  # gone with the worker
    for sweep in of(do.SweepLeftovers, stage.die(2, signal.SIGSEGV)):
        stage.swept(sweep.token)

    assert (stage.ending(1).cause, stage.ending(1).pid) == ("signal 11", 77)
    assert 2 not in stage.ended
    assert stage.given(max(stage.workers)) == [2]


def test_a_job_with_its_own_process_is_killed_by_its_worker_unless_that_is_stuck() -> None:
    stage = an_ondemand_stage(forks=True, mean=MS)
    stage.claimed(*jobs(1, 4))
    stage.ready()
    stage.start(2)
    stage.workers[2].pid = 77

    done = stage.cancel(1, "kill")
    assert [doom.slot for doom in of(do.KillJobProcess, done)] == [2]
    assert stage.workers[2].signals == [signal.SIGTERM]
    stage.tick(SECOND // 2)
    assert stage.workers[2].signals[-1] == signal.SIGKILL


def test_an_ondemand_pool_is_not_full_of_workers_that_do_not_leave() -> None:
    stage = Stage(pool="ondemand", max=2)
    stage.claimed(*jobs(1, 9))
    for slot in (1, 2, 3, 4):
        stage.ready(slot)
        stage.start(slot)
        stage.end(slot, spent=10)

    assert max(stage.workers) == 4  # two work and two leave: more must wait


def test_a_job_whose_ondemand_worker_could_not_come_is_not_lost() -> None:
    stage = Stage(pool="ondemand", max=2)
    stage.claimed(a_job(1))
    assert stage.given(1) == [1]
    stage.workers.pop(1)
    stage.perform(stage.brain.on_spawn_failed(1, stage.now))

    stage.tick(SECOND)
    assert stage.given(2) == [1]


def test_the_time_of_a_job_begins_when_its_ondemand_worker_is_there() -> None:
    stage = Stage(pool="ondemand", max=2)
    stage.claimed(a_job(1, timeout=SECOND))
    stage.tick(5 * SECOND)
    stage.ready(1)
    stage.start(1)

    assert of(do.RequestStop, stage.tick(SECOND // 2)) == []
    assert of(do.RequestStop, stage.tick(SECOND)) != []


def test_an_ondemand_worker_whose_job_was_cancelled_before_it_came_goes_again() -> None:
    stage = Stage(pool="ondemand", max=2)
    done = stage.claimed(a_job(1))
    stage.cancel(1)
    stage.ready()

    assert of(do.DismissWorker, done) == [do.DismissWorker(1)]
    assert (stage.given(1), stage.ending(1).state) == ([], "cancelled")


def test_workers_that_die_before_they_are_ready_are_started_ever_more_slowly() -> None:
    stage = Stage(min=1)
    waits = []
    for _ in range(12):
        slot = max(stage.workers)
        assert of(do.SpawnWorker, stage.die(slot, exited(1))) == []
        waited = 0
        while not of(do.SpawnWorker, stage.tick(100 * MS)):
            waited += 100 * MS
        waits.append(waited + 100 * MS)

    assert waits[:4] == [200 * MS, 400 * MS, 800 * MS, 1600 * MS]
    assert waits[-1] == 30 * SECOND
    stage.ready()
    stage.die(max(stage.workers), exited(1))
    stage.die(max(stage.workers), exited(1))
    assert of(do.SpawnWorker, stage.tick(200 * MS))


def test_a_worker_that_cannot_be_forked_is_tried_again_later() -> None:
    stage = Stage(min=1)
    del stage.workers[1]

    assert of(do.SpawnWorker, stage.perform(stage.brain.on_spawn_failed(1, stage.now))) == []
    assert of(do.SpawnWorker, stage.tick(200 * MS)) == [do.SpawnWorker(2)]


def test_what_is_ready_goes_to_other_nodes_when_everybody_here_is_busy_for_long() -> None:
    stage = a_stage(2, mean=MS)
    stage.claimed(*jobs(1, 10))
    stage.start(1)
    stage.start(2)
    stage.tick()
    assert stage.ended == {}

    stage.tick(300 * MS)
    stage.tick(50 * MS)

    assert {id: stage.ending(id).state for id in sorted(stage.ended)} == dict.fromkeys(
        [2, 3, 4, 5, 7, 8, 9, 10], "waiting"
    )
    assert of(do.ClaimJobs, stage.tick(SECOND)) == []


# results


def test_a_return_is_a_success_with_its_times_by_the_clock_of_the_store() -> None:
    stage = a_stage()
    stage.brain.skew = 100
    stage.claimed(a_job(1))
    stage.start()

    stage.end(1, payload=b"42", spent=300)

    assert stage.ended[1] == Success(
        1, 1, CLAIM, b"42", WALL, stage.now - 200, stage.now + 100, 101, 5, 6
    )


def test_a_result_that_is_reported_twice_counts_once() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.workers[1].end(stage.now)
    twice = list(stage.workers[1].results)
    stage.read()
    stage.ended.clear()

    stage.perform(stage.brain.on_results(1, twice, stage.now))

    assert stage.ended == {}


def test_a_job_that_left_processes_behind_keeps_its_result() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    actions = stage.end(1, payload=b"42", extra={"strays": 2})

    assert of(do.WriteEvent, actions) == [
        do.WriteEvent("strays_killed", 1, {"attempt": 1, "processes": 2})
    ]
    found = stage.ended[1]
    assert isinstance(found, Success)
    assert found.result == b"42"


def test_a_result_that_could_not_be_kept_is_a_success_with_a_reason() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    stage.end(1, payload=None, extra={"reason": "too large"})

    assert (stage.ending(1).state, stage.ending(1).reason) == ("succeeded", "too large")


def test_an_exception_uses_the_budget_and_leaves_its_headline() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, retry={"times": 1, "delay": "7s"}))
    stage.start()

    stage.end(1, wire.RAISED, payload=an_error("too bad"))

    ending = stage.ending(1)
    assert (ending.state, ending.retries, ending.reason) == ("scheduled", 1, "ValueError: too bad")
    assert ending.wait == 7 * SECOND
    assert ending.error == an_error("too bad").decode()


def test_an_exception_without_a_message_is_reported_by_its_name() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    stage.end(1, wire.RAISED, payload=an_error(""))

    assert stage.ending(1).reason == "ValueError"


def test_of_a_job_that_has_written_its_own_end_nothing_more_is_written() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, retry={"times": 3}))
    stage.start()

    done = stage.end(1, wire.APPLIED, payload=None)

    assert not of(do.WriteEndings, done)
    assert not of(do.WriteSuccesses, done)
    assert stage.brain.claimed_ids() == []
    stage.claimed(a_job(2))  # its worker is free again
    assert stage.start() == 2


def test_a_free_retry_does_not_count() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    stage.end(1, payload=None, extra={"wants": "retry", "delay": SECOND, "free": True})

    ending = stage.ending(1)
    assert (ending.state, ending.retries, ending.cause) == ("scheduled", 0, "returned")
    assert ending.wait == SECOND


@pytest.mark.parametrize(
    ("policy", "state", "reason"),
    [("retry", "failed", "ValueError: no"), ("hold", "held", "panic: ValueError: no")],
)
def test_an_exception_that_is_not_worth_a_retry_ends_the_job(
    policy: str, state: str, reason: str
) -> None:
    stage = a_stage()
    stage.claimed(a_job(1, retry={"times": 3}, on_exception=policy))
    stage.start()

    stage.end(1, wire.RAISED, payload=an_error("no"), extra={"final": True})

    assert (stage.ending(1).state, stage.ending(1).reason) == (state, reason)


def test_a_log_comes_with_the_end() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()

    stage.end(1, extra={"log": "printed", "progress": '[1.0,2.0,""]'})

    ending = stage.ending(1)
    assert (ending.state, ending.result, ending.log, ending.progress) == (
        "succeeded",
        b"1",
        "printed",
        '[1.0,2.0,""]',
    )


def test_a_job_may_say_when_it_wants_to_be_tried_again() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, retry={"times": 3}))
    stage.start()
    moment = WALL + stage.now + 99 * SECOND

    stage.end(
        1, wire.RAISED, payload=an_error(), extra={"wants": "retry", "at": moment, "reason": "busy"}
    )

    assert (stage.ending(1).state, stage.ending(1).due_at, stage.ending(1).reason) == (
        "scheduled",
        moment,
        "busy",
    )


def test_a_job_may_fail_for_good() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, retry={"times": 3}))
    stage.start()

    stage.end(1, wire.RAISED, payload=an_error(), extra={"wants": "fail", "reason": "never"})

    assert (stage.ending(1).state, stage.ending(1).reason) == ("failed", "never")


def test_arguments_that_no_longer_fit_hold_the_job_whatever_its_budget() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, retry={"times": -1}))
    stage.start()

    stage.end(1, wire.BAD_ARGUMENTS, payload=None, extra={"reason": "x is missing"})

    assert (stage.ending(1).state, stage.ending(1).reason) == ("held", "x is missing")


def test_a_task_that_must_say_how_it_ended_and_does_not_is_held() -> None:
    stage = a_stage()
    stage.claimed(a_job(1, explicit_outcome=True))
    stage.start()

    stage.end(1)

    assert stage.ending(1).state == "held"
    assert "panic" in (stage.ending(1).reason or "")


def test_a_stray_sigterm_is_a_release_uncounted() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.workers[1].signalled = True
    stage.tick()
    assert stage.workers[1].signals == []
    stage.tick(SECOND // 2)
    assert stage.workers[1].signals == [signal.SIGTERM]

    stage.end(1, wire.STOPPED, payload=an_error())

    assert (stage.ending(1).state, stage.ending(1).cause, stage.ending(1).error) == (
        "waiting",
        "drain",
        None,
    )


def test_a_job_whose_worker_gets_a_sigterm_again_and_again_has_done_it_itself() -> None:
    stage = a_stage()
    causes = []
    for _ in range(7):
        stage.claimed(a_job(1))
        [slot] = stage.workers
        stage.start(slot)
        stage.workers[slot].signalled = True
        stage.tick()
        stage.tick(SECOND // 2)
        stage.end(slot, wire.STOPPED, payload=an_error())
        causes.append(stage.ending(1).cause)
        stage.die(slot, 0)
        stage.tick(SECOND)
        stage.ready()

    assert causes == ["drain"] * 5 + ["signal 15"] * 2


def test_a_sigterm_to_all_processes_is_a_drain_and_the_job_has_its_time() -> None:
    stage = a_stage(grace=30 * SECOND)
    stage.claimed(a_job(1))
    stage.start()
    stage.workers[1].signalled = True
    stage.tick()
    stage.drain()

    stage.tick(29 * SECOND)
    assert stage.workers[1].signals == []
    stage.tick(SECOND)
    stage.tick()
    assert stage.workers[1].signals == [signal.SIGTERM]


def test_a_success_that_the_store_refused_ends_as_cancelled_if_it_is_still_ours() -> None:
    stage = a_stage()
    stage.claimed(a_job(1))
    stage.start()
    stage.end(1)
    lost = stage.ended.pop(1)
    assert isinstance(lost, Success)

    stage.perform(stage.brain.on_refused([lost], stage.now))

    ending = stage.ending(1)
    assert (ending.state, ending.attempt, ending.claim, ending.started) == (
        "cancelled",
        1,
        CLAIM,
        lost.started,
    )
    assert stage.brain.on_refused([], stage.now) == []


# anything at any time


class Walk:
    """A node's life out of a seed; every job must end exactly once, and in one hand at a time."""

    OPTIONS: tuple[dict[str, Any], ...] = (
        {}, {}, {}, {"timeout": SECOND, "grace": SECOND}, {"stall_timeout": SECOND}, {"at_most_once": True},
        {"grace": 500 * MS}, {"explicit_outcome": True}, {"losses": 1},
    )  # fmt: skip

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pool = self.random.choice(["static", "dynamic", "ondemand"])
        self.stage = Stage(
            pool=pool, min=self.random.randint(1, 3), max=3, grace=2 * SECOND, zygote=False
        )
        self.next_id = 0
        self.open: set[int] = set()
        self.claims = 0
        self.marking: list[int] = []
        self.sweeps: list[int] = []
        self.wanted = False
        self.asked: set[int] = set()

    def run(self, steps: int) -> None:
        self.after(self.stage.zygote())
        moves = [
            self.answer,
            self.tick,
            self.become_ready,
            self.start,
            self.end,
            self.mark,
            self.sweep,
            self.cancel,
        ]
        for _ in range(steps):
            move = self.random.choices([*moves, self.accident], [6, 4, 3, 12, 10, 4, 2, 2, 1])[0]
            self.after(move())
        self.after(self.stage.drain())
        for _ in range(400):
            if self.stage.brain.empty and not self.wanted:
                break
            for move in (self.answer, self.tick, self.read, self.end, self.mark, self.sweep):
                self.after(move())
        assert self.stage.brain.empty
        assert self.open == set()

    def after(self, done: list[Action]) -> None:
        """Look at all that was decided, and at what is left."""
        for action in done:
            match action:
                case do.ClaimJobs():
                    assert not self.wanted
                    self.wanted = True
                case do.MarkStarted(marks, first=True):
                    self.marking += [id for id, *_ in marks]
                case do.SweepLeftovers(token):
                    self.sweeps.append(token)
                case do.WriteSuccesses(fine):
                    self.close(one.id for one in fine)
                    assert not {one.id for one in fine} & self.asked
                case do.WriteEndings(other):
                    self.close(one.id for one in other)
                case _:
                    pass
        claimed = self.stage.brain.claimed_ids()
        assert len(claimed) == len(set(claimed))
        assert set(claimed) == self.open
        running = [worker.running.id for worker in self.stage.workers.values() if worker.running]
        assert len(running) == len(set(running))
        assert set(running) <= self.open
        for worker in self.stage.workers.values():
            assert signal.SIGTERM not in worker.signals or worker.asked is not None

    def close(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.open.remove(id)

    # moves

    def answer(self) -> list[Action]:
        if not self.wanted:
            return self.stage.perform(self.stage.brain.on_wakeup(self.stage.now))
        self.wanted = False
        if self.random.random() < 0.1:
            return self.stage.claimed(failed=True)
        found = []
        for _ in range(self.random.choice([0, 1, 5, 60])):
            self.next_id += 1
            found.append(a_job(self.next_id, **self.random.choice(self.OPTIONS)))
            self.open.add(self.next_id)
        return self.stage.claimed(*found)

    def tick(self) -> list[Action]:
        done = self.stage.tick(self.random.choice([0, MS, 50 * MS, 300 * MS, SECOND]))
        for slot, worker in list(self.stage.workers.items()):
            if signal.SIGKILL in worker.signals:
                done += self.stage.die(slot, signal.SIGKILL)
            elif signal.SIGTERM in worker.signals:
                worker.signals.clear()
                if worker.running and worker.place == worker.asked and self.random.random() < 0.5:
                    done += self.stage.end(slot, wire.STOPPED, payload=an_error())
            elif worker.dismissed and not worker.running:
                done += self.stage.die(slot, 0)
        return done

    def read(self) -> list[Action]:
        """As the loop does before each tick: a result may lie there unrung."""
        return [action for slot in list(self.stage.workers) for action in self.stage.read(slot)]

    def become_ready(self) -> list[Action]:
        coming = [slot for slot, worker in self.stage.workers.items() if not worker.ready]
        return self.stage.ready(self.random.choice(coming)) if coming else []

    def start(self) -> list[Action]:
        """Its last result may still lie in the ring."""
        free = [
            worker for worker in self.stage.workers.values() if worker.unread and not worker.running
        ]
        if free:
            worker = self.random.choice(free)
            worker.start()
            worker.checked_stop = self.random.random() < 0.3
        return []

    def end(self) -> list[Action]:
        slots = [slot for slot, worker in self.stage.workers.items() if worker.running]
        if not slots:
            return []
        slot = self.random.choice(slots)
        worker = self.stage.workers[slot]
        outcome = self.random.choice([wire.RETURNED] * 5 + [wire.RAISED, wire.BAD_ARGUMENTS])
        payload = an_error() if outcome == wire.RAISED else b"1"
        worker.end(
            self.stage.now, outcome, payload=payload, spent=self.random.choice([10, MS, 100 * MS])
        )
        return self.stage.read(slot) if self.random.random() < 0.8 or not worker.unread else []

    def mark(self) -> list[Action]:
        if not self.marking:
            return []
        id = self.marking.pop(self.random.randrange(len(self.marking)))
        if self.random.random() < 0.1:
            self.open.remove(id)
            self.stage.brain.on_mark_lost([id])
            return self.stage.marked()
        return self.stage.marked(id)

    def sweep(self) -> list[Action]:
        if not self.sweeps:
            return []
        return self.stage.swept(self.sweeps.pop(self.random.randrange(len(self.sweeps))))

    def cancel(self) -> list[Action]:
        if not self.open:
            return []
        id = self.random.choice(sorted(self.open))
        if id in self.stage.brain.claimed_ids() and not self.is_dying(id):
            self.asked.add(id)
        return self.stage.cancel(id, self.random.choice(["cancel", "cancel", "kill"]))

    def is_dying(self, id: int) -> bool:
        """Its worker is dead already; that it was cancelled is the store's to know."""
        return id in {job.id for worker in self.stage.dead for job in [worker.running] if job}

    def accident(self) -> list[Action]:
        stage = self.stage
        kind = self.random.choice(["death", "death", "death", "guard", "zygote", "fork"])
        if kind == "death" and stage.workers:
            return stage.die(
                self.random.choice(sorted(stage.workers)),
                self.random.choice([9, 11, exited(1), None]),
            )
        if kind == "guard":
            self.sweeps.clear()
            done = stage.guard_dies()
            self.after(done)
            return stage.zygote()
        if kind == "zygote":
            return stage.perform(stage.brain.on_zygote_gone()) + stage.zygote()
        coming = [slot for slot, worker in stage.workers.items() if not worker.ready]
        if kind == "fork" and coming:
            del stage.workers[coming[0]]
            return stage.perform(stage.brain.on_spawn_failed(coming[0], stage.now))
        return []


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_whatever_happens_every_job_ends_once_and_a_drain_comes_to_its_end(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            Walk(seed).run(150)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
