"""Writes what jobs log among the lines of their node, for `genba node start --log-jobs`."""

from __future__ import annotations

import logging
import os
from typing import Any

from genba.client.current_job import find_job
from genba.log_lines import JOB_LOG_VARIABLE, LineFormatter, LineHandler


class JobLog:
    """Turns every record of `logging` in this process into a line that names its job."""

    def __init__(self) -> None:
        settings = os.environ.get(JOB_LOG_VARIABLE)
        self._handler: LineHandler | None = None
        if not settings:
            return
        form, _, node = settings.partition(" ")
        self._handler = LineHandler(os.dup(2), LineFormatter(form, {"node": node}, _job))
        root = logging.getLogger()
        if not root.handlers:  # the app has not set up logging
            root.setLevel(logging.INFO)
        root.addHandler(self._handler)

    def write(self, text: str) -> None:
        """Write a text of `current_job().log`, which is not a record."""
        if self._handler is not None:
            record = {
                "name": "genba.job",
                "msg": text,
                "levelname": "INFO",
                "levelno": logging.INFO,
            }
            self._handler.handle(logging.makeLogRecord(record))


def _job() -> dict[str, Any]:
    job = find_job()
    return {} if job is None else {"job": job.id, "task": job.task, "attempt": job.attempt}
