"""Jobs in company: a worker whose seats are filled with jobs of one task, and is one at a time again when empty."""

from __future__ import annotations

from collections.abc import Iterator

from genba.node.actions import Action, Share
from genba.node.floor import Floor
from genba.node.giving import Giving
from genba.node.hands import Hand, Held
from genba.storage.records import Micros


class Seats:
    def __init__(self, floor: Floor, giving: Giving) -> None:
        self._floor = floor
        self._giving = giving

    def give_seats(self, actions: list[Action], now: Micros) -> None:
        """To each a seat beside others of its task, if need be in one more worker."""
        self._seat(actions, now)
        if self._make_room(actions, now) and not (self._floor.ready or self._floor.alone_next):
            self._seat(actions, now)

    def _seat(self, actions: list[Action], now: Micros) -> None:
        left: list[Held] = []
        free: dict[str, list[Hand]] = {}  # the next one last
        while self._floor.shared:
            held = self._floor.shared.popleft()
            task = held.job.task
            if task not in free:
                free[task] = list(self.free_seats(task))[::-1]
            if not free[task]:
                free[task] = self._one_more(actions, task, now)
            if not free[task]:
                left.append(held)
                continue
            seat = free[task].pop()
            self._giving.give(actions, seat, [held], now)
            seat.alone = True
        self._floor.shared.extend(left)

    def _make_room(self, actions: list[Action], now: Micros) -> bool:
        """Others wait for a worker: a shared one is theirs as soon as its seats are empty.  True if one is."""
        hosts = [hand for hand in self._floor.workers() if hand.seats and hand.told_to_go is None]
        seated = {hand.task for hand in self._floor.hands.values() if hand.host is not None}
        if not (self._floor.ready or self._floor.alone_next or self._floor.in_company().keys() - seated):
            for host in hosts:
                host.closing = None
            return False
        empty = [host for host in hosts if not host.outstanding]
        for host in empty:
            self._stand_up(actions, host)
            hosts.remove(host)
        there = sum(1 for hand in self._floor.workers() if not hand.apart)
        open_hosts = [host for host in hosts if host.closing is None]
        if there >= self._floor.settings.slots and hosts and open_hosts == hosts and self._floor.free() is None:
            min(hosts, key=lambda host: host.outstanding).closing = now
        return bool(empty)

    def _one_more(self, actions: list[Action], task: str, now: Micros) -> list[Hand]:
        """The seats of a worker that has nothing in hand, if there is one."""
        host = self._floor.free()
        if host is None:
            return []
        first = self._floor.slot + 1
        self._floor.slot += self._floor.concurrency.get(task, 1)  # a reload may have changed it
        host.seats = tuple(range(first, self._floor.slot + 1))
        for number in host.seats:
            self._floor.hands[number] = Hand(number, host.pid, ready=True, host=host.slot, task=task, idle_since=now)
        actions.append(Share(host.slot, host.seats))
        return [self._floor.hands[number] for number in reversed(host.seats)]

    def free_seats(self, task: str | None = None) -> Iterator[Hand]:
        for hand in self._floor.hands.values():
            free = hand.host is not None and not hand.outstanding and task in (None, hand.task)
            host = self._floor.hands[hand.host] if free and hand.host is not None else None
            if host is not None and not host.leaving and host.closing is None:
                yield hand

    def _stand_up(self, actions: list[Action], host: Hand) -> None:
        """One at a time again."""
        for number in host.seats:
            del self._floor.hands[number]
        host.seats, host.closing = (), None
        actions.append(Share(host.slot, ()))
