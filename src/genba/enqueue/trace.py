"""Trace context from the code that enqueues to the job that runs, as W3C writes it (traceparent).

It is stored with the job.  genba never imports OpenTelemetry: if the app has imported it, its
current span is read and each run becomes a span; otherwise a job passes the context that it came
with on to the jobs that it enqueues.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class TracedJob(Protocol):
    """A running job, as far as its span needs it."""

    @property
    def id(self) -> int: ...

    @property
    def attempt(self) -> int: ...

    @property
    def task(self) -> str: ...

    @property
    def traceparent(self) -> str | None: ...


def current_traceparent(job: TracedJob | None) -> str | None:
    """Return the traceparent of the current span, else of the job that runs here, or None."""
    otel = _opentelemetry()
    if otel is not None:
        span = otel.get_current_span().get_span_context()
        if span.is_valid:
            return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return None if job is None else job.traceparent


def tracing() -> bool:
    """Whether runs of jobs become spans."""
    return _opentelemetry() is not None


def trace_run(job: TracedJob, call: Callable[[], Any]) -> Any:
    """Middleware: make the run a span, child of the span that enqueued the job."""
    with _span(job):
        return call()


async def trace_async_run(job: TracedJob, call: Callable[[], Awaitable[Any]]) -> Any:
    with _span(job):
        return await call()


@contextmanager
def _span(job: TracedJob) -> Iterator[None]:
    otel = _opentelemetry()
    with otel.get_tracer("genba").start_as_current_span(
        job.task,
        context=otel.set_span_in_context(_parent_span(otel, job.traceparent)),
        kind=otel.SpanKind.CONSUMER,
        attributes={
            "messaging.system": "genba",
            "genba.job.id": job.id,
            "genba.job.attempt": job.attempt,
        },
    ):
        yield


def _parent_span(otel: Any, traceparent: str | None) -> Any:
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None:
        return otel.INVALID_SPAN  # a trace of its own, not of the job that ran here before
    trace, span, flags = (int(part, 16) for part in match.groups())
    return otel.NonRecordingSpan(
        otel.SpanContext(trace, span, is_remote=True, trace_flags=otel.TraceFlags(flags))
    )


def _opentelemetry() -> Any:
    return sys.modules.get("opentelemetry.trace")
