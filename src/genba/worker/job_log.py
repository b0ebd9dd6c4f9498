"""What jobs log, among the lines of their node as well: if the node was started with `--log-jobs`."""

from __future__ import annotations

import logging
import os
from typing import Any

from genba.client.current_job import find_job
from genba.log_lines import JOB_LOG_VARIABLE, LineFormatter, LineHandler


class JobLog:
    """Every record of `logging` in this process becomes a line that names the job it comes from."""

    def __init__(self) -> None:
        asked = os.environ.get(JOB_LOG_VARIABLE)
        self._handler: LineHandler | None = None
        if not asked:
            return
        form, _, node = asked.partition(" ")
        self._handler = LineHandler(os.dup(2), LineFormatter(form, {"node": node}, _job))
        root = logging.getLogger()
        if not root.handlers:  # the app has nothing to say about it
            root.setLevel(logging.INFO)
        root.addHandler(self._handler)

    def write(self, text: str) -> None:
        """What a job tells by `current_job().log`, which is not a record."""
        if self._handler is not None:
            told = {"name": "genba.job", "msg": text, "levelname": "INFO", "levelno": logging.INFO}
            self._handler.handle(logging.makeLogRecord(told))


def _job() -> dict[str, Any]:
    job = find_job()
    return {} if job is None else {"job": job.id, "task": job.task, "attempt": job.attempt}
