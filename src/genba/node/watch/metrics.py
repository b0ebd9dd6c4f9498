"""The text that Prometheus reads (its format 0.0.4); no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from genba.node.watch.counters import Counters, Histogram
from genba.storage.jobs.counts import OpenJobCounts, StateCount

Labels = Mapping[str, str]


@dataclass(slots=True)
class NodeStatus:
    """How a node is; written by its loop, read by whoever is asked."""

    name: str
    namespace: str = ""
    version: str = ""
    turned: float = 0.0  # when the loop last came round, by the monotonic clock
    seen: float | None = None  # when the database last answered
    trouble: str | None = None  # ... and why it does not
    slots: int = 0
    workers: int = 0  # that are ready
    busy: int = 0
    needs_workers: bool = True
    draining: bool = False
    gate: str | None = None  # why nothing is claimed


def text(vitals: NodeStatus, meter: Counters, levels: OpenJobCounts | None) -> str:
    """`levels` is None if the database could not be asked: what the node knows itself is told all the same."""
    families = [*_of_node(vitals), *_of_work(meter)]
    up = (
        levels is not None and vitals.trouble is None
    )  # a file that somebody else writes to can still be read
    families.append(
        _single("database_up", "1 if the database has answered, this look and the node.", up)
    )
    if levels is not None:
        families += _of_queue(levels)
    return "".join(families)


def _of_node(vitals: NodeStatus) -> Iterator[str]:
    about = {"node": vitals.name, "namespace": vitals.namespace, "version": vitals.version}
    yield _family("node_info", "gauge", "What this node is.", [(about, 1)])
    busy = [({"state": "busy"}, vitals.busy), ({"state": "idle"}, vitals.workers - vitals.busy)]
    yield _family("workers", "gauge", "Workers of this node.", busy)
    yield _single("slots", "How many workers it may have.", vitals.slots)
    yield _single("draining", "1 if it claims nothing more and is about to end.", vitals.draining)
    yield _single(
        "gate_closed", "1 if it claims nothing, for want of CPU or memory.", vitals.gate is not None
    )


def _of_work(meter: Counters) -> Iterator[str]:
    ends = [
        ({"queue": q, "task": t, "state": s}, n)
        for (q, t, s), n in sorted(meter.ends.copy().items())
    ]
    yield _family(
        "attempts_total", "counter", "Attempts that ended here, by what the job came to.", ends
    )
    deaths = [({"cause": cause}, n) for cause, n in sorted(meter.deaths.copy().items())]
    yield _family(
        "deaths_total", "counter", "Attempts that did not end by themselves, by cause.", deaths
    )
    runs = [({"queue": q, "task": t}, one) for (q, t), one in sorted(meter.runs.copy().items())]
    yield _histograms("run_seconds", "How long attempts ran here.", runs)
    waits = [({"queue": queue}, one) for queue, one in sorted(meter.waits.copy().items())]
    yield _histograms(
        "wait_seconds",
        "How long jobs that ran here had waited, from the moment they were due.",
        waits,
    )
    claims: list[tuple[Labels, Histogram]] = [({}, meter.claims)]
    yield _histograms(
        "claim_seconds", "How long a claim took, with what it finished in one commit.", claims
    )
    yield _family(
        "claimed_total", "counter", "Jobs that this node has claimed.", [({}, meter.claimed)]
    )


def _of_queue(levels: OpenJobCounts) -> Iterator[str]:
    jobs = [
        ({"state": one.state, "queue": one.queue, "task": one.task}, one.jobs)
        for one in levels.jobs
    ]
    yield _family(
        "jobs", "gauge", "Open jobs of the namespace, up to a bound (see jobs_bounded).", jobs
    )
    more = [({"state": state, "queue": queue}, 1) for state, queue in sorted(levels.more)]
    yield _family("jobs_bounded", "gauge", "1 for what there is more of than was counted.", more)
    waiting: dict[str, int] = {}
    for one in levels.jobs:
        if one.state == "waiting":
            waiting[one.queue] = waiting.get(one.queue, 0) + one.jobs
    counts = [({"queue": queue}, n) for queue, n in waiting.items()]
    yield _family(
        "waiting_jobs", "gauge", "Jobs that may start now, up to a bound: scale on this.", counts
    )
    ages = [({"queue": queue}, age) for queue, age in _ages(levels.jobs, levels.now)]
    yield _family(
        "oldest_waiting_seconds", "gauge", "For how long the oldest of them has been due.", ages
    )
    yield _single("locks", "Places of mutexes and semaphores that are taken.", levels.locks)
    yield _single("lock_waiters", "Who waits for a mutex or a semaphore.", levels.lock_waiters)
    since = levels.lock_waiting_since
    longest = 0.0 if since is None else max(0, levels.now - since) / 1_000_000
    yield _single("lock_wait_seconds", "For how long the first of them has waited.", longest)


def _ages(jobs: Iterable[StateCount], now: int) -> Iterator[tuple[str, float]]:
    oldest: dict[str, int] = {}
    for one in jobs:
        if one.state == "waiting":
            oldest[one.queue] = min(one.oldest, oldest.get(one.queue, one.oldest))
    for queue, due in oldest.items():
        yield queue, max(0, now - due) / 1_000_000


# the format


def _family(name: str, kind: str, told: str, samples: Iterable[tuple[Labels, float]]) -> str:
    lines = "".join(
        f"genba_{name}{_labels(labels)} {_number(value)}\n" for labels, value in samples
    )
    return f"# HELP genba_{name} {told}\n# TYPE genba_{name} {kind}\n{lines}"


def _single(name: str, told: str, value: float) -> str:
    return _family(name, "gauge", told, [({}, value)])


def _histograms(name: str, told: str, samples: Iterable[tuple[Labels, Histogram]]) -> str:
    lines = []
    for labels, one in samples:
        places, count = list(one.places), 0
        for bound, here in zip((*one.bounds, float("inf")), places, strict=True):
            count += here
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(f"genba_{name}_bucket{_labels({**labels, 'le': le})} {count}\n")
        lines.append(f"genba_{name}_sum{_labels(labels)} {_number(one.total)}\n")
        lines.append(f"genba_{name}_count{_labels(labels)} {count}\n")
    return f"# HELP genba_{name} {told}\n# TYPE genba_{name} histogram\n{''.join(lines)}"


def _labels(labels: Labels) -> str:
    return (
        "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"
        if labels
        else ""
    )


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 6))
