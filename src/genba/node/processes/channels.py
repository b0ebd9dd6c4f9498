"""The lines to all workers, and to the seats in them: each is listened to for what it can still say."""

from __future__ import annotations

import selectors
from collections.abc import Sequence

from genba import wire
from genba.node.decide.worker_state import WorkerView
from genba.node.processes.channel import Channel, SeatChannel


class Channels:
    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._lines: dict[int, Channel] = {}
        self._seats: dict[int, SeatChannel] = {}
        self._watched: dict[int, int] = {}

    def open(self, slot: int) -> Channel:
        line = self._lines[slot] = Channel(slot)
        self.watch(line)
        return line

    def get(self, slot: int) -> Channel | None:
        return self._lines.get(slot)

    def has(self, slot: int) -> bool:
        return slot in self._lines

    def all(self) -> list[Channel]:
        return list(self._lines.values())

    def _each(self) -> list[tuple[int, Channel | SeatChannel]]:
        return [*self._lines.items(), *self._seats.items()]

    def sights(self) -> dict[int, WorkerView]:
        return {slot: line.sight() for slot, line in self._each()}

    def last_sights(self) -> dict[int, WorkerView]:
        return {slot: line.last_sight() for slot, line in self._each()}

    # deeds

    def give(self, slot: int, serial: int, jobs: list[wire.JobMessage], each: bool = False) -> None:
        line = self._lines[slot]
        line.give(serial, jobs, each)
        self.watch(line)

    def ask(self, slot: int, serial: int, job: wire.JobMessage, conditions: Sequence[str]) -> None:
        line = self._lines[slot]
        line.ask(serial, job, conditions)
        self.watch(line)

    def share(self, slot: int, seats: Sequence[int]) -> None:
        line = self._lines[slot]
        if seats:
            self._seats.update({seat.slot: seat for seat in line.share(seats)})
        else:
            self._drop_seats(line)
            line.unshare()
        self.watch(line)

    def interrupt(self, slot: int, place: int) -> None:
        seat = self._seats[slot]
        seat.stop(place)
        self.watch(seat.host)

    def take_back(self, slot: int) -> int:
        """How many tokens its worker had not read."""
        return self._lines[slot].take_back()

    def ask_to_stop(self, slot: int, place: int) -> None:
        (self._seats.get(slot) or self._lines[slot]).memory.ask_to_stop(place)

    def doom(self, slot: int, place: int) -> None:
        self._lines[slot].memory.mark_for_kill(place)

    def bow_out(self, slot: int, place: int) -> None:
        (self._seats.get(slot) or self._lines[slot]).memory.request_stop(place)

    def refuse(self, slot: int, place: int) -> None:
        (self._seats.get(slot) or self._lines[slot]).memory.refuse(place)

    def dismiss(self, slot: int) -> None:
        line = self._lines[slot]
        line.send((wire.EXIT,))
        self.watch(line)

    def drain(self) -> None:
        for _, each in self._each():
            each.memory.drain()

    def drop(self, slot: int) -> None:
        line = self._lines.pop(slot, None)
        if line is not None:
            if slot in self._watched:
                self._selector.unregister(line.sock)
                self._watched.pop(slot)
            self._watch_outside(line, wanted=False)
            self._drop_seats(line)
            line.close()

    def close(self) -> None:
        """The selector goes with them."""
        for line in self._lines.values():
            line.close()

    # listening

    def _drop_seats(self, line: Channel) -> None:
        for seat in line.seats:
            del self._seats[seat.slot]
            seat.close()

    def watch(self, line: Channel) -> None:
        """Registered for what it can still do."""
        self._watch_outside(line, wanted=not line.silent)
        if not line.open:
            if line.slot in self._watched:
                self._selector.unregister(line.sock)
                self._watched.pop(line.slot)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.stuffed else 0)
        if self._watched.get(line.slot) != wanted:
            if line.slot in self._watched:
                self._selector.modify(line.sock, wanted, line)
            else:
                self._selector.register(line.sock, wanted, line)
            self._watched[line.slot] = wanted

    def _watch_outside(self, line: Channel, *, wanted: bool) -> None:
        if line.outside == -1 or wanted == line.overheard:
            return
        line.overheard = wanted
        if wanted:
            self._selector.register(line.outside, selectors.EVENT_READ, line)
        else:
            self._selector.unregister(line.outside)
