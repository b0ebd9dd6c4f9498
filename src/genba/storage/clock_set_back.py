"""Repair of moments in the database after its clock was set back.

Otherwise jobs that were due soon would wait until the clock reaches their moment again. Moments
that a person chose (`at`, `expires`, a pause until then) stay as they are. Schedules repair their
own, in schedules.py, and leases are watched by steady clocks, in dead_nodes.py.
"""

from __future__ import annotations

from genba.storage.engines.database import Database

BATCH = 500


class ClockSetBack:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    def repair(self) -> int:
        """Move retries, delays, rates, conditions and locks that wait for a moment far ahead.

        Returns how many. Cheap if there are none.
        """
        with self._db.transaction() as tx:
            names = ("rates_set_back", "conditions_set_back", "calls_set_back", "grants_set_back")
            repaired = sum(len(tx.all(name, namespace=self._namespace)) for name in names)
        return repaired + self._repair_delays()

    def repair_ranks(self) -> int:
        """Move the ranks of waiting jobs, which new jobs would overtake; return how many.

        Reads all waiting jobs.
        """
        with self._db.statement() as tx:
            ids = tx.all("waiting_since_future", namespace=self._namespace)
        for begin in range(0, len(ids), BATCH):
            with self._db.transaction() as tx:
                tx.batch("ranks_set_back", ids[begin : begin + BATCH])
        return len(ids)

    def _repair_delays(self) -> int:
        """Move retries, crash back-offs and delays, which wait for a duration, not for a moment."""
        repaired = 0
        while True:
            with self._db.transaction() as tx:
                some = len(tx.all("waits_set_back", namespace=self._namespace))
            repaired += some
            if some < BATCH:
                return repaired
