"""Job ids in blocks, so that most enqueues need no round trip for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BLOCK = 100  # ids that one step of the sequence stands for
# Then the rest of a block is dropped, so that ids grow with time (storage/jobs/search: SKEW_US).
MAX_AGE_SECONDS = 60.0


class JobIdBlocks:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[range] = []
        self._until = 0.0

    def take(self, count: int, next_blocks: Callable[[int], list[int]]) -> list[int]:
        """Take ids from the blocks in stock; get new blocks if they do not suffice.

        `next_blocks` returns the first ids of that many new blocks, from a sequence, so that no
        rollback gives them back.
        """
        with self._lock:
            now = time.monotonic()
            if now > self._until:
                self._blocks = []
            in_stock = sum(map(len, self._blocks))
            if in_stock < count:
                self._until = now + MAX_AGE_SECONDS if not in_stock else self._until
                missing = -(-(count - in_stock) // BLOCK)
                self._blocks += [range(start, start + BLOCK) for start in next_blocks(missing)]
            ids: list[int] = []
            while len(ids) < count:
                block = self._blocks.pop(0)
                needed = count - len(ids)
                ids += block[:needed]
                if len(block) > needed:
                    self._blocks.insert(0, block[needed:])
            return ids
