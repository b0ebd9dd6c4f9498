"""The workloads: what is asked of every contender, in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from measure.figures import Plan as OwnPlan
from measure.workloads import Bench

from beside.services import Services
from beside.stage import START_WITHIN, Contender, Stage, Wrong, stage
from beside.steady import Watch

PRODUCERS = 8


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything."""

    backlog: int = 30_000
    singles: int = 500
    samples: int = 100
    rounds: int = 3
    within: float = 10.0  # seconds, after which a drain is judged by what has run
    steady: float = 600.0  # seconds of a load that does not end

    @classmethod
    def quick(cls) -> Plan:
        return cls(backlog=3_000, singles=100, samples=20, rounds=1, within=5.0, steady=10.0)


Figures = dict[str, float]  # by the name of the figure


def drain(contender: Contender, services: Services, plan: Plan, *, workers: int = 2) -> Figures:
    """A backlog that is there before the workers come; on the way, how quick it was to make."""
    with _filled(contender, services, plan.backlog, workers=workers, singles=plan.singles) as (
        place,
        made,
    ):
        place.start(workers)
        return {**made, f"drain, {workers}": place.drain(plan.backlog, plan.within).rate}


def drain_1(contender: Contender, services: Services, plan: Plan) -> Figures:
    figures = drain(contender, services, plan, workers=1)
    return {"drain, 1": figures["drain, 1"]}


def small_payload(contender: Contender, services: Services, plan: Plan) -> Figures:
    return _with(contender, services, plan, "100 B", jobs=plan.backlog // 3, size=100)


def middle_payload(contender: Contender, services: Services, plan: Plan) -> Figures:
    return _with(contender, services, plan, "10 kB", jobs=plan.backlog // 3, size=10_000)


def great_payload(contender: Contender, services: Services, plan: Plan) -> Figures:
    return _with(
        contender, services, plan, "1 MB", jobs=max(20, plan.backlog // 300), size=1_000_000
    )


def cpu(contender: Contender, services: Services, plan: Plan) -> Figures:
    return _with(contender, services, plan, "1 ms of CPU", jobs=plan.backlog // 6, work="cpu")


def io(contender: Contender, services: Services, plan: Plan) -> Figures:
    return _with(contender, services, plan, "5 ms of I/O", jobs=plan.backlog // 6, work="io")


def _with(
    contender: Contender,
    services: Services,
    plan: Plan,
    name: str,
    *,
    jobs: int,
    size: int = 0,
    work: str = "nothing",
) -> Figures:
    with _filled(contender, services, jobs, size=size, work=work) as (place, _):
        place.start(2)
        return {name: place.drain(jobs, plan.within).rate}


def limited(contender: Contender, services: Services, plan: Plan) -> Figures:
    return _of_kind(contender, services, plan, "limited", "each job limited")


def graph(contender: Contender, services: Services, plan: Plan) -> Figures:
    return _of_kind(contender, services, plan, "graph", "each job waits for another")


def _of_kind(contender: Contender, services: Services, plan: Plan, kind: str, name: str) -> Figures:
    """For those who have it."""
    jobs = min(10_000, plan.backlog)
    with stage(contender, services, slots=jobs, workers=2) as place:
        if place.ask("many", first=0, count=jobs, size=0, kind=kind)["lacking"]:
            return {}
        place.settle()
        place.start(2)
        return {name: place.drain(jobs, 6 * plan.within).rate}


def events(contender: Contender, services: Services, plan: Plan) -> Figures:
    """A drain that somebody reads along, until all ends are read; for those who have it."""
    jobs = min(10_000, plan.backlog)
    with stage(contender, services, slots=jobs, workers=2) as place:
        if place.ask("consume")["lacking"]:
            return {}
        place.fill(jobs)
        place.settle()
        place.start(2)
        drained = place.drain(jobs, 6 * plan.within)
        if (seen := place.ask("consumed", jobs=jobs, within=START_WITHIN)["seen"]) != jobs:
            raise Wrong(f"the ends of {seen} of {jobs} jobs were seen")
        return {"events read along": drained.rate}


def ondemand(contender: Contender, services: Services, plan: Plan) -> Figures:
    """A process for each job, two at a time; for those who have it."""
    jobs = plan.singles
    with stage(contender, services, slots=jobs, workers=2) as place:
        if not place.ask("ondemand", count=2)["commands"]:
            return {}
        place.fill(jobs)
        place.settle()
        place.start(2, "ondemand")
        return {"a process for each job": place.drain(jobs, plan.within).rate}


def own(contender: Contender, services: Services, plan: Plan) -> Figures:
    """What `benchmarks/alone.py` measures of genba alone, each beside its own limit."""
    if not contender.adapter.is_ours:
        return {}
    less = OwnPlan(
        repeat=3, singles=plan.singles, samples=plan.samples // 2, idle_seconds=plan.within
    )
    bench = Bench(contender.on, services.fresh(contender.on), less)
    bench.enqueue_singly()
    bench.enqueue_in_bulk()
    bench.idle()
    if faults := [check for check in bench.checks if check.fault]:
        raise Wrong(f"{faults[0].name}: {faults[0].fault}")
    found = {figure.name: figure for figure in bench.figures}
    single, bulk = found["enqueue, one by one"], found[f"enqueue, bulk of {less.bulk:,}"]
    return {
        "enqueue, of a bare commit": 100 * (single.ratio or 0),
        "enqueue, bulk, of a copy of the same rows": 100 * (bulk.ratio or 0),
        "idle node, of a core": found["idle node, all processes"].value,
        "idle node, supervisor": found["idle node, supervisor"].value,
    }


def over(contender: Contender, services: Services, plan: Plan, *, backlog: int) -> Figures:
    """How the rate changes with what waits: of the first seconds, over so many."""
    with _filled(contender, services, backlog) as (place, _):
        place.start(2)
        return {f"drain over {backlog:,}": place.drain(backlog, plan.within).rate}


@contextmanager
def _filled(
    contender: Contender,
    services: Services,
    jobs: int,
    *,
    size: int = 0,
    work: str = "nothing",
    workers: int = 2,
    singles: int = 0,
) -> Iterator[tuple[Stage, Figures]]:
    with stage(contender, services, slots=jobs, workers=workers, work=work) as place:
        made: Figures = {}
        if singles:
            made["enqueue"] = (
                singles / place.ask("singly", first=0, count=singles, size=size)["seconds"]
            )
        seconds = place.fill(jobs - singles, singles, size)
        if seconds is not None:
            made["enqueue, bulk"] = (jobs - singles) / seconds
        place.settle()
        yield place, made


def pick_up(contender: Contender, services: Services, plan: Plan) -> Figures:
    """Milliseconds from before the enqueue to the job's mark, with two workers that have nothing to do."""
    warm = 4
    with stage(contender, services, slots=warm + plan.samples, workers=2) as place:
        place.start(2)
        place.ask("at_times", first=0, count=warm, size=0)
        if place.wait_for(warm, START_WITHIN) < warm:
            raise Wrong(f"{warm} jobs did not run in {START_WITHIN:g} s")
        sent = place.ask("at_times", first=warm, count=plan.samples, size=0)["sent"]
        if place.wait_for(warm + plan.samples, START_WITHIN) < warm + plan.samples:
            raise Wrong(f"{plan.samples} jobs did not run in {START_WITHIN:g} s")
        waits = sorted((ran - at) / 1e6 for ran, at in zip(place.marks()[warm:], sent, strict=True))
        return {
            "pick-up p50": median(waits),
            "pick-up p99": waits[min(len(waits) - 1, int(len(waits) * 0.99))],
        }


def half_load(contender: Contender, services: Services, plan: Plan) -> Figures:
    """Milliseconds to the end of jobs of 1 ms that come at random, half as many as it can do, but 150/s at most."""
    warm = max(100, plan.samples * 3)
    most = 10 * plan.samples
    with stage(contender, services, slots=warm + most, workers=2, work="cpu") as place:
        place.fill(warm)
        place.start(2)
        if place.wait_for(warm, START_WITHIN) < warm:
            raise Wrong(f"{warm} jobs did not run in {START_WITHIN:g} s")
        marks = place.marks()[:warm]
        pace = min(150.0, (warm - 1) / ((max(marks) - min(marks)) / 1e9) / 2)
        count = min(most, max(10, int(pace * plan.within)))
        sent = place.ask("at_pace", first=warm, count=count, pace=pace)["sent"]
        if place.wait_for(warm + count, START_WITHIN) < warm + count:
            raise Wrong(f"{count} jobs did not run in {START_WITHIN:g} s")
        waits = sorted(
            (ran - at) / 1e6
            for ran, at in zip(place.marks()[warm : warm + count], sent, strict=True)
        )
        return {
            "half load p50": median(waits),
            "half load p99": waits[min(len(waits) - 1, int(len(waits) * 0.99))],
        }


def steady(contender: Contender, services: Services, plan: Plan) -> Figures:
    """A load that does not end, half of what it can do, but 2,000/s at most: what grows meanwhile?"""
    warm, most = 3_000, 2_000.0
    with stage(contender, services, slots=warm + int(most * plan.steady), workers=2) as place:
        place.fill(warm)
        place.start(2)
        if place.wait_for(warm, START_WITHIN) < warm:
            raise Wrong(f"{warm} jobs did not run in {START_WITHIN:g} s")
        marks = place.marks()[:warm]
        pace = min(most, (warm - 1) / ((max(marks) - min(marks)) / 1e9) / 2)
        jobs = int(pace * plan.steady)
        with Watch(place, contender.on) as watch:
            taken = place.ask("steadily", first=warm, count=jobs, pace=pace)["seconds"]
        left = place.ask("left")["left"]
        if place.wait_for(warm + jobs, START_WITHIN) < warm + jobs:
            raise Wrong(f"{jobs} jobs did not run in {START_WITHIN:g} s after the last")
        return {"steady load": jobs / taken, "steady load, left over": left, **watch.figures(jobs)}


def producers(contender: Contender, services: Services, plan: Plan) -> Figures:
    """Single enqueues from eight processes at once."""
    each = plan.singles
    jobs = each * PRODUCERS
    with stage(contender, services, slots=jobs, workers=2) as place:
        place.asked_all(PRODUCERS, "left", [{}] * PRODUCERS)  # all are connected
        asked = [{"first": i * each, "count": each, "size": 0} for i in range(PRODUCERS)]
        slowest = max(one["seconds"] for one in place.asked_all(PRODUCERS, "singly", asked))
        if (left := place.ask("left")["left"]) != jobs:
            raise Wrong(f"{jobs} jobs were enqueued, and it says that {left} are left")
        return {"enqueue, 8 processes": jobs / slowest}


Workload = Callable[[Contender, Services, Plan], Figures]

WORKLOADS: dict[str, Workload] = {
    "drain": drain,
    "drain-1": drain_1,
    "pick-up": pick_up,
    "producers": producers,
    "payload-100B": small_payload,
    "payload-10kB": middle_payload,
    "payload-1MB": great_payload,
    "cpu": cpu,
    "io": io,
    "limited": limited,
    "graph": graph,
    "events": events,
    "half-load": half_load,
    "ondemand": ondemand,
    "own": own,
    "over-10k": partial(over, backlog=10_000),
    "over-100k": partial(over, backlog=100_000),
    "over-1M": partial(over, backlog=1_000_000),
    "over-5M": partial(over, backlog=5_000_000),
    "steady": steady,
}
LONG = ("over-1M", "over-5M", "steady")  # only if they are asked for by name
