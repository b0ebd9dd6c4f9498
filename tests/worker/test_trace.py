"""Trace context goes with a job from enqueue to run, with OpenTelemetry in the worker and without it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest
from tests.support import NodeProcess, eventually, load_module, sqlite_url

otel: Any = pytest.importorskip("opentelemetry.trace", reason="pip install opentelemetry-sdk")
sdk: Any = pytest.importorskip("opentelemetry.sdk.trace")

TASKS = """
import asyncio
from genba import Genba, current_job

app = Genba()

def finished(job):
    pass

@app.task(name="outer")
def outer(enqueue: bool) -> list[str | None]:
    parents = [current_job().traceparent]
    if enqueue:
        parents += inner.enqueue().result(20)
    return parents

@app.task(name="inner")
def inner() -> list[str | None]:
    return [current_job().traceparent]

@app.task(name="bad", on_final=finished)
def bad() -> None:
    raise ValueError("no such thing")

@app.task(name="together", concurrency=2)
async def together() -> str | None:
    await asyncio.sleep(0)
    return current_job().traceparent
"""

SPANS = """
import json, os
from plain import *
from plain import app

@app.lifespan
def traced():
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class ToFile(SpanExporter):
        def export(self, spans):
            fd = os.open(os.environ["SPANS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for span in spans:
                seen = {"name": span.name, "trace": span.context.trace_id, "span": span.context.span_id,
                        "parent": span.parent and span.parent.span_id, "status": span.status.status_code.name,
                        "job": span.attributes["genba.job.id"], "kind": span.kind.name}
                os.write(fd, json.dumps(seen).encode() + b"\\n")
            os.close(fd)
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToFile()))
    trace.set_tracer_provider(provider)
    yield
    provider.shutdown()
"""

tracer = sdk.TracerProvider().get_tracer("tests")


def written(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@pytest.fixture(scope="module", params=["plain", "traced"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def shop(kind, tmp_path_factory):
    """One node without OpenTelemetry in its workers, and one with workers that make spans."""
    folder = tmp_path_factory.mktemp(kind)
    url = sqlite_url(folder)
    (folder / "plain.py").write_text(TASKS)
    (folder / "traced.py").write_text(SPANS)
    spans = folder / f"{kind}.spans"
    with ExitStack() as stack:
        module = load_module("plain", folder, url)
        stack.callback(module.app.close)
        node = NodeProcess.start(
            f"{kind}:app", url, "--max", "2", cwd=folder, env={"SPANS": str(spans)}
        )
        stack.callback(lambda: print(node.log))
        stack.callback(node.end)
        eventually(module.app.nodes, within=40)
        yield (
            module,
            lambda: (
                [json.loads(line) for line in spans.read_text().splitlines()]
                if spans.exists()
                else []
            ),
        )


def test_the_context_goes_with_a_job_and_with_those_that_it_enqueues(shop, kind):
    module, spans = shop
    with tracer.start_as_current_span("a request") as request:
        job = module.outer.enqueue(True)
    own, child = job.result(30)

    assert own == written(request)
    if kind == "plain":
        assert child == written(request)  # passed on as it is: there was no span of the run
        assert spans() == []
        return
    mine = {
        span["name"]: span
        for span in spans()
        if span["trace"] == request.get_span_context().trace_id
    }
    assert mine["outer"]["parent"] == request.get_span_context().span_id
    assert mine["inner"]["parent"] == mine["outer"]["span"]
    assert int(child.split("-")[2], 16) == mine["outer"]["span"]
    assert (mine["outer"]["job"], mine["outer"]["kind"], mine["outer"]["status"]) == (
        job.id,
        "CONSUMER",
        "UNSET",
    )


def test_an_untraced_job_has_no_context(shop, kind):
    module, spans = shop
    job = module.outer.enqueue(False)

    assert job.result(30) == [None]
    if kind == "traced":
        (span,) = [span for span in spans() if span["job"] == job.id]
        assert span["parent"] is None


def test_a_job_that_fails_and_one_among_others_are_spans_too(shop, kind):
    module, spans = shop
    with tracer.start_as_current_span("a request") as request:
        bad = module.bad.enqueue()
        many = [module.together.enqueue() for _ in range(4)]
    module.app.wait([bad, *many], timeout=30)

    assert [job.result() for job in many] == [written(request)] * 4
    (hook,) = eventually(lambda: module.app.jobs(task="bad#final", state="any"), within=20)
    assert written(request) in hook.record.options
    if kind == "traced":
        mine = {
            span["job"]: span
            for span in spans()
            if span["trace"] == request.get_span_context().trace_id
        }
        assert mine[bad.id]["status"] == "ERROR"
        assert {mine[job.id]["parent"] for job in many} == {request.get_span_context().span_id}


def test_a_bulk_has_it_and_a_second_run_keeps_it(shop):
    module, _ = shop
    with tracer.start_as_current_span("a request") as request:
        group = module.app.enqueue_many([module.inner.call() for _ in range(3)])
    group[0].wait(30)
    group[0].requeue()
    module.app.wait(group, timeout=30)

    assert [job.result() for job in group] == [[written(request)]] * 3


def test_a_schedule_does_not_keep_the_trace_of_its_declaration(shop):
    module, _ = shop
    with tracer.start_as_current_span("a request"):
        module.app.recur("traced", module.inner.call(), cron="0 3 1 1 *")
    job = module.app.schedule("traced").trigger()

    assert job.result(30) == [None]
    module.app.schedule("traced").delete()
