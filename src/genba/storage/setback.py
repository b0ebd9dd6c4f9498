"""The store's clock was set back: what was to happen soon must not wait until the clock is there again.

What a person has asked for by its moment (`at`, `expires`, a pause until then) stays as it is; schedules look after
their own, in schedules.py, and leases are watched by steady clocks, in rescuer.py.
"""

from __future__ import annotations

from genba.storage.database import Database

BATCH = 500


class Setback:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    def mend(self) -> int:
        """Rates, conditions and locks that wait for a moment far ahead; how many.  Cheap if there are none."""
        with self._db.transaction() as tx:
            names = ("rates_set_back", "questions_set_back", "calls_set_back", "grants_set_back")
            return sum(len(tx.all(name, namespace=self._namespace)) for name in names)

    def mend_retries(self) -> int:
        """Jobs to be tried again that ran in what is the future now; reads all that are scheduled."""
        with self._db.statement() as tx:
            ids = tx.all("tried_in_the_future", namespace=self._namespace)
        for begin in range(0, len(ids), BATCH):
            with self._db.transaction() as tx:
                tx.batch("retries_set_back", ids[begin : begin + BATCH])
        return len(ids)
