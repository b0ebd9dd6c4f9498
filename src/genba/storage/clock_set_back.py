"""The store's clock was set back.

What was to happen soon must not wait until the clock is there again.

What a person has asked for by its moment (`at`, `expires`, a pause until then) stays as it is;
schedules look after their own, in schedules.py, and leases are watched by steady clocks, in
rescuer.py.
"""

from __future__ import annotations

from genba.storage.engines.database import Database

BATCH = 500


class ClockSetBack:
    def __init__(self, database: Database, namespace: str) -> None:
        self._db = database
        self._namespace = namespace

    def repair(self) -> int:
        """Retries, delays, rates, conditions and locks that wait for a moment far ahead.

        How many. Cheap if none.
        """
        with self._db.transaction() as tx:
            names = ("rates_set_back", "conditions_set_back", "calls_set_back", "grants_set_back")
            mended = sum(len(tx.all(name, namespace=self._namespace)) for name in names)
        return mended + self._mend_waits()

    def repair_ranks(self) -> int:
        """Of jobs that wait to be claimed: all who come now would go before them.

        Reads all that wait.
        """
        with self._db.statement() as tx:
            ids = tx.all("waiting_since_future", namespace=self._namespace)
        for begin in range(0, len(ids), BATCH):
            with self._db.transaction() as tx:
                tx.batch("ranks_set_back", ids[begin : begin + BATCH])
        return len(ids)

    def _mend_waits(self) -> int:
        """Retries, crash back-offs and delays.

        They wait for as long as was said, and not for a moment.
        """
        mended = 0
        while True:
            with self._db.transaction() as tx:
                some = len(tx.all("waits_set_back", namespace=self._namespace))
            mended += some
            if some < BATCH:
                return mended
