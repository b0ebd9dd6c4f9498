"""A peer's side of the benchmark: `python -m peers.side NAME` answers one JSON line for each that it reads."""

import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any


def singly(peer: Any, first: int, count: int, size: int) -> dict[str, Any]:
    payload = "x" * size
    began = time.perf_counter()
    for n in range(first, first + count):
        peer.enqueue(n, payload)
    return {"seconds": time.perf_counter() - began}


def many(peer: Any, first: int, count: int, size: int, kind: str = "") -> dict[str, Any]:
    if kind:
        if not hasattr(peer, f"enqueue_{kind}"):
            return {"lacking": True}
        getattr(peer, f"enqueue_{kind}")(range(first, first + count))
        return {"lacking": False}
    if not hasattr(peer, "enqueue_many"):
        return {"bulk": False}
    payload = "x" * size
    began = time.perf_counter()
    peer.enqueue_many(range(first, first + count), payload)
    return {"seconds": time.perf_counter() - began, "bulk": True}


def at_times(peer: Any, first: int, count: int, size: int) -> dict[str, Any]:
    """One by one with pauses, so that each finds the workers idle; gives the moment before each."""
    sent = []
    for n in range(first, first + count):
        time.sleep(random.uniform(0.02, 0.05))
        sent.append(time.time_ns())
        peer.enqueue(n, "x" * size)
    return {"sent": sent}


def at_pace(peer: Any, first: int, count: int, pace: float) -> dict[str, Any]:
    """So many a second, at random moments; gives that before each."""
    sent = []
    moment = time.time()
    for n in range(first, first + count):
        moment += random.expovariate(pace)
        time.sleep(max(0.0, moment - time.time()))
        sent.append(time.time_ns())
        peer.enqueue(n, "")
    return {"sent": sent}


def steadily(peer: Any, first: int, count: int, pace: float) -> dict[str, Any]:
    """So many a second, some at a time if it can do that; gives the seconds that it took."""
    began = time.perf_counter()
    done = 0
    while done < count:
        due = min(count, int((time.perf_counter() - began) * pace) + 1)
        if due > done and hasattr(peer, "enqueue_many"):
            peer.enqueue_many(range(first + done, first + due), "")
        else:
            for n in range(done, due):
                peer.enqueue(first + n, "")
        done = due
        time.sleep(0.05)
    return {"seconds": time.perf_counter() - began}


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "prepare": lambda peer: {"done": peer.prepare() is None},
    "singly": singly,
    "many": many,
    "at_times": at_times,
    "at_pace": at_pace,
    "steadily": steadily,
    "consume": lambda peer: {"lacking": not hasattr(peer, "consume") or peer.consume()},
    "consumed": lambda peer, jobs, within: {"seen": peer.consumed(jobs, within)},
    "left": lambda peer: {"left": peer.left()},
    "verify": lambda peer, jobs: {"fault": peer.verify(jobs) if hasattr(peer, "verify") else None},
    "clean": lambda peer: {"done": hasattr(peer, "clean") and peer.clean() is None},
    "workers": lambda peer, count: {"commands": peer.workers(count)},
    "ondemand": lambda peer, count: {
        "commands": peer.ondemand(count) if hasattr(peer, "ondemand") else []
    },
}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    peer = importlib.import_module(f"peers.{sys.argv[1]}")
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(ANSWERS[asked.pop("do")](peer, **asked)), file=answers, flush=True)


if __name__ == "__main__":
    main()
