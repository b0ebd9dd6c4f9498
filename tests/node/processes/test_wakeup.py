"""A node hears its bell, also when that was lost and is there again."""

from __future__ import annotations

import os
import selectors
from typing import Any

from genba.node.processes.wakeup import WakeupSocket


class Rope:
    """As much of a presence as the bell needs: a pipe."""

    times_connected = 0

    def open_receiver(self) -> None:
        self.out, self.into = os.pipe()
        self.times_connected += 1

    def fileno(self) -> int:
        return self.out

    def cut(self) -> None:
        os.close(self.out)
        os.close(self.into)


def rings(selector: selectors.BaseSelector, rope: Rope) -> bool:
    os.write(rope.into, b"!")
    return bool(selector.select(0))


def test_a_bell_that_is_hung_up_again_under_the_same_number_is_heard():
    rope: Any = Rope()
    with selectors.DefaultSelector() as selector:
        bell = WakeupSocket(selector)
        rope.open_receiver()
        bell.follow(rope)
        assert rings(selector, rope)

        number = rope.fileno()
        rope.cut()
        rope.open_receiver()
        assert rope.fileno() == number
        bell.follow(rope)

        assert rings(selector, rope)
        rope.cut()
