"""Trace context from the code that enqueues to the job that runs, as W3C writes it (traceparent).

It is stored with the job, whoever runs it.  OpenTelemetry is never imported here: if the app has imported it, its spans
are asked for and made; otherwise what came with a job is passed on to the jobs that it enqueues.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from genba.client.current_job import RunningJob, find_job

_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def current_traceparent() -> str | None:
    """The traceparent of what goes on here; None: nobody traces it."""
    otel = _opentelemetry()
    if otel is not None:
        span = otel.get_current_span().get_span_context()
        if span.is_valid:
            return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    job = find_job()
    return None if job is None else job.traceparent


def tracing() -> bool:
    """Whether runs of jobs are to be spans."""
    return _opentelemetry() is not None


def trace_run(job: RunningJob, call: Callable[[], Any]) -> Any:
    """Middleware: the run as a span, child of what enqueued the job."""
    with _span(job):
        return call()


async def trace_async_run(job: RunningJob, call: Callable[[], Awaitable[Any]]) -> Any:
    with _span(job):
        return await call()


@contextmanager
def _span(job: RunningJob) -> Iterator[None]:
    otel = _opentelemetry()
    with otel.get_tracer("genba").start_as_current_span(
        job.task,
        context=otel.set_span_in_context(_parent(otel, job.traceparent)),
        kind=otel.SpanKind.CONSUMER,
        attributes={
            "messaging.system": "genba",
            "genba.job.id": job.id,
            "genba.job.attempt": job.attempt,
        },
    ):
        yield


def _parent(otel: Any, written: str | None) -> Any:
    found = _PARENT.fullmatch(written or "")
    if found is None:
        return otel.INVALID_SPAN  # a trace of its own, not of what ran here before
    trace, span, flags = (int(part, 16) for part in found.groups())
    return otel.NonRecordingSpan(
        otel.SpanContext(trace, span, is_remote=True, trace_flags=otel.TraceFlags(flags))
    )


def _opentelemetry() -> Any:
    return sys.modules.get("opentelemetry.trace")
