"""Connections that do not wait for ever.

The server's deadlines end a statement there, and TCP's notice a peer that is gone. Neither helps
against a proxy that accepts everything and passes nothing on: its kernel acknowledges, and the
client would wait for ever.
"""

from __future__ import annotations

import inspect
from typing import Any

ANSWER_SECONDS = 11.0  # for one answer; a statement has ten on the server
_TIMEOUT = "timeout"  # a parameter of psycopg's wait, since 3.3


def connection_class(psycopg: Any) -> Any:
    """Return psycopg's Connection, with calls that fail after `limit` seconds.

    An older psycopg cannot do that: then it is the plain class.
    """
    if _TIMEOUT not in inspect.signature(psycopg.Connection.wait).parameters:
        return psycopg.Connection

    class Deadlined(psycopg.Connection):  # type: ignore[misc]  # known only when psycopg is there
        limit: float | None = ANSWER_SECONDS  # None: for ever

        def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
            if _TIMEOUT in options or len(args) > 1 or self.limit is None:
                return super().wait(gen, *args, **options)
            try:
                return super().wait(gen, *args, timeout=self.limit, **options)
            except psycopg.errors._WaitTimeout as error:
                self.pgconn.finish()  # it is unknown whether the statement was executed
                raise psycopg.OperationalError(f"no answer within {self.limit:g} s") from error

    return Deadlined
