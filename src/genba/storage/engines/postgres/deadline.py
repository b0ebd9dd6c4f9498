"""Connections that do not wait for ever.

The server's deadlines end a statement there, and TCP's notice a peer that is gone.  Neither helps against a proxy that
takes all and passes nothing on: its kernel acknowledges, and the client would wait for ever.
"""

from __future__ import annotations

import inspect
from typing import Any

ANSWER_SECONDS = 11.0  # seconds for one answer; a statement has ten on the server
KNOWN = "timeout"  # the parameter that psycopg's wait has, from 3.3 on


def connection_class(psycopg: Any) -> Any:
    """psycopg's Connection, whose calls come back after `limit` seconds; plain where psycopg cannot do that."""
    if KNOWN not in inspect.signature(psycopg.Connection.wait).parameters:
        return psycopg.Connection

    class Deadlined(psycopg.Connection):  # type: ignore[misc]  # known only when psycopg is there
        limit: float | None = ANSWER_SECONDS  # None: for ever

        def wait(self, gen: Any, *args: Any, **given: Any) -> Any:
            if KNOWN in given or len(args) > 1 or self.limit is None:
                return super().wait(gen, *args, **given)
            try:
                return super().wait(gen, *args, timeout=self.limit, **given)
            except psycopg.errors._WaitTimeout as error:
                self.pgconn.finish()  # nobody knows whether it has happened
                raise psycopg.OperationalError(f"no answer within {self.limit:g} s") from error

    return Deadlined
