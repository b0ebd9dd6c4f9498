"""Whatever a job does and however it is stopped, it stops in time, leaves nothing, and has the right cause.

`python -m tests.support.stop_table` writes the same table into docs/explanation/processes.md.
"""

from __future__ import annotations

import re
import sys

import pytest
from tests.support import stop_table

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the process tree is built on Linux calls"
)

MACHINE = 1.0  # seconds that a busy machine may take on top


@pytest.fixture(scope="module")
def cells(home):
    """All of them, stopped at the same time."""
    return stop_table.run(*home)


@pytest.mark.parametrize("way", stop_table.WAYS)
@pytest.mark.parametrize("name", stop_table.JOBS)
def test_a_stubborn_job_stops_in_time_leaves_nothing_and_has_the_right_cause(cells, name, way):
    assert stop_table.faults(name, way, cells[name, way], MACHINE) == []


def test_the_table_in_the_document_has_every_cell_and_all_are_in_time():
    titles, _, bounds, *rows, causes = stop_table.documented()
    ways = stop_table.WAYS.values()

    assert titles[1:] == [way.title for way in ways]
    assert bounds[1:] == [f"*{way.bound:.1f} s*" for way in ways]
    assert causes[1:] == [f"*{way.cause}*" for way in ways]
    assert [row[0] for row in rows] == list(stop_table.JOBS.values())
    for row in rows:
        for way, cell in zip(ways, row[1:], strict=True):
            sqlite, postgres = map(float, re.findall(r"\d+\.\d+", cell))
            assert max(sqlite, postgres) <= way.bound
