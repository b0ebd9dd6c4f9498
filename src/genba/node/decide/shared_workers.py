"""Jobs in company: a worker that runs several of one task at a time, and is one at a time again when empty."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from genba.node.decide.actions import Action, SetSeats, TakeJobsBack
from genba.node.decide.dispatch import Dispatcher
from genba.node.decide.state import NodeState
from genba.node.decide.worker_state import ClaimedJob, WorkerState
from genba.storage.records import Micros

log = logging.getLogger("genba.node")


class SharedWorkers:
    def __init__(self, floor: NodeState, giving: Dispatcher) -> None:
        self._floor = floor
        self._giving = giving

    def give_seats(self, actions: list[Action], now: Micros) -> None:
        """To each a seat beside others of its task, if need be in one more worker."""
        if self._floor.refit:
            self._refit(actions, now)
        self._seat(actions, now)
        if self._make_room(actions, now) and not (self._floor.ready or self._floor.alone_next):
            self._seat(actions, now)

    def _refit(self, actions: list[Action], now: Micros) -> None:
        """Who has more or fewer seats than its task has now gets no more jobs, and stands up after the last."""
        misfits = [hand for hand in self._floor.workers() if hand.seats and not self._fits(hand)]
        for host in misfits:
            host.closing = host.closing or now
            if not host.outstanding and host.told_to_go is None:
                self._stand_up(actions, host)
        self._floor.refit = any(host.seats for host in misfits)

    def _fits(self, host: WorkerState) -> bool:
        return len(host.seats) == self._floor.concurrency.get(host.task or "", 1)

    def _seat(self, actions: list[Action], now: Micros) -> None:
        if not self._floor.shared:
            return
        piles: dict[str, list[ClaimedJob]] = {}
        for held in self._floor.shared:
            piles.setdefault(held.job.task, []).append(held)
        self._floor.shared.clear()
        for task, jobs in piles.items():
            self._floor.shared.extend(self._give(actions, task, jobs, now))

    def _give(
        self, actions: list[Action], task: str, jobs: Sequence[ClaimedJob], now: Micros
    ) -> Sequence[ClaimedJob]:
        """First the free seats, then those of one more worker, then some to spare for all; gives what is left."""
        hosts = self._hosts(task)
        for host in hosts:
            jobs = self._fill(actions, host, len(host.seats), jobs, now)
        while jobs and (one_more := self._one_more(actions, task)) is not None:
            jobs = self._fill(actions, one_more, len(one_more.seats), jobs, now)
            hosts.append(one_more)
        depth = self._giving.depth_in_company(task)
        hosts = [host for host in hosts if not host.slow and 2 * host.outstanding <= depth]
        hosts.sort(key=lambda host: host.outstanding)
        for i, host in enumerate(hosts):
            fair = -(-len(jobs) // (len(hosts) - i))
            jobs = self._fill(actions, host, min(depth, host.outstanding + fair), jobs, now)
        return jobs

    def _fill(
        self,
        actions: list[Action],
        host: WorkerState,
        upto: int,
        jobs: Sequence[ClaimedJob],
        now: Micros,
    ) -> Sequence[ClaimedJob]:
        """Until it has so many; gives the rest."""
        room = max(0, upto - host.outstanding)
        given = jobs[:room]
        host.timed = host.timed or any(held.alone for held in given)
        self._giving.give_many(actions, host, given, now)
        return jobs[room:]

    def _make_room(self, actions: list[Action], now: Micros) -> bool:
        """Others wait for a worker: a shared one is theirs as soon as its seats are empty.  True if one is."""
        hosts = [
            hand
            for hand in self._floor.workers()
            if hand.seats and hand.told_to_go is None and self._fits(hand)
        ]
        seated = {hand.task for hand in self._floor.workers() if hand.seats}
        if not (
            self._floor.ready or self._floor.alone_next or self._floor.in_company().keys() - seated
        ):
            for host in hosts:
                host.closing = None
            return False
        empty = [host for host in hosts if not host.outstanding]
        for host in empty:
            self._stand_up(actions, host)
            hosts.remove(host)
        there = sum(1 for hand in self._floor.workers() if not hand.apart)
        open_hosts = [host for host in hosts if host.closing is None]
        if (
            there >= self._floor.settings.slots
            and hosts
            and open_hosts == hosts
            and self._floor.free() is None
        ):
            min(hosts, key=lambda host: host.outstanding).closing = now
        return bool(empty)

    def _one_more(self, actions: list[Action], task: str) -> WorkerState | None:
        """A worker that has nothing in hand, with seats now; None if there is none."""
        host = self._floor.free()
        if host is None:
            return None
        first = self._floor.slot + 1
        self._floor.slot += self._floor.concurrency.get(task, 1)  # a reload may have changed it
        host.seats, host.task = tuple(range(first, self._floor.slot + 1)), task
        for number in host.seats:
            self._floor.hands[number] = host.seat(number)
        actions.append(SetSeats(host.slot, host.seats))
        return host

    def _hosts(self, task: str | None = None) -> list[WorkerState]:
        """Those whom more may be given."""
        return [
            hand
            for hand in self._floor.workers()
            if hand.seats
            and task in (None, hand.task)
            and not hand.leaving
            and hand.closing is None
        ]

    def room(self) -> dict[str, int]:
        """How many more of each task can be given now; asked for by the hundred, if they are short."""
        found: dict[str, int] = {}
        for host in self._hosts():
            assert host.task is not None
            depth = len(host.seats) if host.slow else self._giving.depth_in_company(host.task)
            if host.outstanding < len(host.seats) or 2 * host.outstanding <= depth:
                found[host.task] = found.get(host.task, 0) + depth - host.outstanding
        return found

    def look(self, actions: list[Action]) -> None:
        """Where most of those that run are long, what was given to spare goes to others."""
        for host in self._floor.workers():
            if host.seats:
                long = sum(self._floor.hands[number].slow for number in host.seats)
                host.slow = 2 * long >= len(host.seats)
                if host.slow and host.outstanding > len(host.seats):
                    actions.append(TakeJobsBack(host.slot))

    def _stand_up(self, actions: list[Action], host: WorkerState) -> None:
        """One at a time again."""
        for number in host.seats:
            del self._floor.hands[number]
        host.seats, host.task, host.closing, host.slow = (), None, None, False
        actions.append(SetSeats(host.slot, ()))


def concurrency_of(hello: Mapping[str, Any], ruled: Mapping[str, int]) -> dict[str, int]:
    """Of the tasks that run several at a time: by the code, and what operators say over it."""
    seats: dict[str, int] = {}
    for task in hello["tasks"]:
        name, said = task["name"], task.get("concurrency", 1)
        wanted = ruled.get(name, said)
        if wanted > said and not (task.get("async") and hello.get("shareable")):
            log.warning(
                "concurrency=%d of task %s is left alone: it cannot share a worker", wanted, name
            )
            wanted = said
        if wanted > 1:
            seats[name] = wanted
    return seats
