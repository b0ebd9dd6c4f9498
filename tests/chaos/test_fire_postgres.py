"""`test_fire.py` on PostgreSQL, in a file of its own: two processes share the time that they take."""

from __future__ import annotations

import pytest
from tests.chaos.test_fire import EACH, play, site

__all__ = ["site"]  # a fixture


@EACH
@pytest.mark.parametrize("engine", ["postgres"])
def test_whatever_goes_wrong_with_real_processes_nothing_is_lost_or_doubled(
    site, tmp_path, seed, jobs, faults
):
    play(site, tmp_path, seed, jobs, faults)
