"""The text that Prometheus reads (its format 0.0.4); no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from genba.domain.duration import SECOND
from genba.node.watch.counters import Counters, Histogram
from genba.storage.jobs.counts import OpenJobCounts, StateCount

Labels = Mapping[str, str]


@dataclass(slots=True)
class NodeStatus:
    """How a node is; its loop writes it, the metrics server reads it.

    Moments are of the monotonic clock.
    """

    name: str
    namespace: str = ""
    version: str = ""
    loop_at: float = 0.0  # when the loop last came round
    database_at: float | None = None  # when the database last answered
    trouble: str | None = None  # ... and why it does not
    slots: int = 0
    workers: int = 0  # that are ready
    busy: int = 0
    needs_workers: bool = True
    draining: bool = False
    gate: str | None = None  # why nothing is claimed


def text(status: NodeStatus, counters: Counters, levels: OpenJobCounts | None) -> str:
    """Give all metrics; `levels` is None if the database did not answer."""
    families = [*_of_node(status), *_of_work(counters)]
    # Both, since a file that another process writes to can still be read.
    up = levels is not None and status.trouble is None
    help = "1 if the database has answered, this look and the node."
    families.append(_single("database_up", help, up))
    if levels is not None:
        families += _of_queue(levels)
    return "".join(families)


def _of_node(status: NodeStatus) -> Iterator[str]:
    about = {"node": status.name, "namespace": status.namespace, "version": status.version}
    yield _family("node_info", "gauge", "What this node is.", [(about, 1)])
    busy = [({"state": "busy"}, status.busy), ({"state": "idle"}, status.workers - status.busy)]
    yield _family("workers", "gauge", "Workers of this node.", busy)
    yield _single("slots", "How many workers it may have.", status.slots)
    yield _single("draining", "1 if it claims nothing more and is about to end.", status.draining)
    help = "1 if it claims nothing, for want of CPU or memory."
    yield _single("gate_closed", help, status.gate is not None)


def _of_work(counters: Counters) -> Iterator[str]:
    """The counters are copied, as the loop writes them meanwhile."""
    ends = [
        ({"queue": queue, "task": task, "state": state}, count)
        for (queue, task, state), count in sorted(counters.ends.copy().items())
    ]
    help = "Attempts that ended here, by what the job came to."
    yield _family("attempts_total", "counter", help, ends)
    deaths = [({"cause": cause}, count) for cause, count in sorted(counters.deaths.copy().items())]
    help = "Attempts that did not end by themselves, by cause."
    yield _family("deaths_total", "counter", help, deaths)
    runs = [
        ({"queue": queue, "task": task}, histogram)
        for (queue, task), histogram in sorted(counters.runs.copy().items())
    ]
    yield _histograms("run_seconds", "How long attempts ran here.", runs)
    waits = [
        ({"queue": queue}, histogram) for queue, histogram in sorted(counters.waits.copy().items())
    ]
    help = "How long jobs that ran here had waited, from the moment they were due."
    yield _histograms("wait_seconds", help, waits)
    claims: list[tuple[Labels, Histogram]] = [({}, counters.claims)]
    help = "How long a claim took, with what it finished in one commit."
    yield _histograms("claim_seconds", help, claims)
    help = "Jobs that this node has claimed."
    yield _family("claimed_total", "counter", help, [({}, counters.claimed)])


def _of_queue(levels: OpenJobCounts) -> Iterator[str]:
    jobs = [
        ({"state": level.state, "queue": level.queue, "task": level.task}, level.jobs)
        for level in levels.jobs
    ]
    help = "Open jobs of the namespace, up to a bound (see jobs_bounded)."
    yield _family("jobs", "gauge", help, jobs)
    more = [({"state": state, "queue": queue}, 1) for state, queue in sorted(levels.more)]
    yield _family("jobs_bounded", "gauge", "1 for what there is more of than was counted.", more)
    waiting: dict[str, int] = {}
    for level in levels.jobs:
        if level.state == "waiting":
            waiting[level.queue] = waiting.get(level.queue, 0) + level.jobs
    counts = [({"queue": queue}, count) for queue, count in waiting.items()]
    help = "Jobs that may start now, up to a bound: scale on this."
    yield _family("waiting_jobs", "gauge", help, counts)
    ages = [({"queue": queue}, age) for queue, age in _ages(levels.jobs, levels.now)]
    help = "For how long the oldest of them has been due."
    yield _family("oldest_waiting_seconds", "gauge", help, ages)
    yield _single("locks", "Places of mutexes and semaphores that are taken.", levels.locks)
    help = "Clients and jobs that wait for a mutex or a semaphore."
    yield _single("lock_waiters", help, levels.lock_waiters)
    since = levels.lock_waiting_since
    longest = 0.0 if since is None else max(0, levels.now - since) / SECOND
    yield _single("lock_wait_seconds", "For how long the first of them has waited.", longest)


def _ages(jobs: Iterable[StateCount], now: int) -> Iterator[tuple[str, float]]:
    oldest: dict[str, int] = {}
    for level in jobs:
        if level.state == "waiting":
            oldest[level.queue] = min(level.oldest, oldest.get(level.queue, level.oldest))
    for queue, due in oldest.items():
        yield queue, max(0, now - due) / SECOND


# the format


def _family(name: str, kind: str, help: str, samples: Iterable[tuple[Labels, float]]) -> str:
    lines = "".join(
        f"genba_{name}{_labels(labels)} {_number(value)}\n" for labels, value in samples
    )
    return f"# HELP genba_{name} {help}\n# TYPE genba_{name} {kind}\n{lines}"


def _single(name: str, help: str, value: float) -> str:
    return _family(name, "gauge", help, [({}, value)])


def _histograms(name: str, help: str, samples: Iterable[tuple[Labels, Histogram]]) -> str:
    lines = []
    for labels, histogram in samples:
        counts, total = list(histogram.counts), 0
        for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            lines.append(f"genba_{name}_bucket{_labels({**labels, 'le': le})} {total}\n")
        lines.append(f"genba_{name}_sum{_labels(labels)} {_number(histogram.total)}\n")
        lines.append(f"genba_{name}_count{_labels(labels)} {total}\n")
    return f"# HELP genba_{name} {help}\n# TYPE genba_{name} histogram\n{''.join(lines)}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 6))
