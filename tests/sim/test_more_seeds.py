"""More worlds of `test_seeds.py`, in a file of their own: two processes share the time that they take."""

from __future__ import annotations

import pytest

from tests.sim.test_seeds import play_all, silence

__all__ = ["silence"]  # a fixture


@pytest.mark.parametrize("first", [1_000, 1_500])
def test_whatever_goes_wrong_nothing_is_lost_or_doubled_and_all_is_done_in_the_end(first):
    play_all(first, 500)
