"""Sort jobs by their dependencies."""

from __future__ import annotations

from collections.abc import Sequence


def parents_first(waits_for: Sequence[Sequence[int]]) -> list[int]:
    """Return the indexes so that each comes after those it waits for, otherwise in list order.

    There is no cycle: a call can only name calls that were made before it.
    """
    order: list[int] = []
    done: set[int] = set()
    for start in range(len(waits_for)):
        path = [start]
        while path:
            index = path[-1]
            parents = [parent for parent in waits_for[index] if parent not in done]
            if index in done:
                path.pop()
            elif parents:
                path += reversed(parents)
            else:
                done.add(index)
                order.append(index)
                path.pop()
    return order
