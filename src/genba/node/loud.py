"""What a node does, in words: for `--debug`."""

from __future__ import annotations

from collections.abc import Iterator

from genba.node import actions as do


def words(action: do.Action) -> Iterator[str]:
    """One line for each job that the action is about."""
    match action:
        case do.Give(slot, _, jobs):
            for job in jobs:
                yield f"job {job.id} ({job.task}), attempt {job.attempt}: given to worker {slot}"
        case do.Succeed(ended):
            for one in ended:
                spent = f" in {(one.ended - one.started) / 1_000_000:.3f} s" if one.started is not None else ""
                yield f"job {one.id}, attempt {one.attempt}: succeeded{spent}"
        case do.Finish(endings):
            for end in endings:
                why = f" ({end.reason})" if end.reason else ""
                yield f"job {end.id}, attempt {end.attempt}: {end.cause}, now {end.state}{why}"
        case do.Spawn(slot):
            yield f"worker {slot}: asked for"
        case do.Dismiss(slot):
            yield f"worker {slot}: told to go"
        case do.Signal(slot, number):
            yield f"worker {slot}: signal {number}"
