"""`python -m tests.sim 0 1000`: play these seeds, and print what went wrong in them and what came of it."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter

from tests.sim.test_seeds import play
from tests.sim.world import Stage


def main(first: int, last: int) -> int:
    logging.disable(logging.CRITICAL)
    stage, hits, harm = Stage(), Counter[str](), 0
    began = time.process_time()
    for seed in range(first, last):
        try:
            hits.update(play(stage, seed))
        except AssertionError as error:
            harm += 1
            print(str(error)[:300], flush=True)
    spent = (time.process_time() - began) / max(1, last - first)
    print(
        f"worlds {last - first}, with harm {harm}, {spent * 1000:.0f} ms of CPU each; worlds in which it happened:"
    )
    for what, count in sorted(hits.items()):
        print(f"  {what:28} {count}")
    return int(harm > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
