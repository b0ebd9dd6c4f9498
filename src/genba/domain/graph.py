"""Who waits for whom, as places in a list."""

from __future__ import annotations

from collections.abc import Sequence


def parents_first(waits_for: Sequence[Sequence[int]]) -> list[int]:
    """The places in an order in which each comes after those that it waits for, and else as they stand.

    There is no cycle: a call is made after those that it names.
    """
    order: list[int] = []
    done: set[int] = set()
    for start in range(len(waits_for)):
        path = [start]
        while path:
            place = path[-1]
            ahead = [other for other in waits_for[place] if other not in done]
            if place in done:
                path.pop()
            elif ahead:
                path += reversed(ahead)
            else:
                done.add(place)
                order.append(place)
                path.pop()
    return order
