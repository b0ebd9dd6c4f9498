"""`genba bench`: how fast genba is on this machine, in four figures."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import click

from genba.cli.child_node import signals_as_exceptions, signals_blocked
from genba.cli.output import Invocation, common_options, pass_invocation, say, say_json, table
from genba.domain.url import mask_password, split_url
from genba.errors import BadOption, StoreUnreachable


@click.command()
@click.option(
    "--jobs",
    type=click.IntRange(100, 1_000_000),
    default=10_000,
    show_default=True,
    metavar="N",
    help="Jobs of the drain.",
)
@click.option("--quick", is_flag=True, help="500 jobs: shows that it works, not how fast.")
@common_options
@pass_invocation
def bench(invocation: Invocation, jobs: int, quick: bool) -> int:
    """Measure enqueue, drain and pick-up with a node of two workers and jobs that do nothing.

    It makes an SQLite file in a temporary folder, or beside the one that --url names, and deletes
    it afterwards.  With --url postgresql://… it works in that database, in a namespace of its own,
    and deletes its jobs.  The exit code is 1 if a job did not succeed.

    The source has more: `python benchmarks/alone.py` sets each figure beside what the database
    gives without genba, and measures limits, locks, history, a large backlog and an idle node;
    `make bench` compares other task queues.

    \b
    Example:
      genba bench --jobs 50000
    """
    from genba.cli.bench_app import WORKERS, measure

    jobs, singles, samples = (500, 50, 10) if quick else (jobs, 500, 100)
    with signals_as_exceptions(), _database(invocation.url) as (folder, namespace):
        result = measure(folder, jobs, singles, samples)
    if invocation.json:
        say_json(
            {"ok": not result.failed, "namespace": namespace, "jobs": jobs, **result._asdict()}
        )
    else:
        rows = [
            ("enqueue, one by one", f"{result.enqueue_per_second:,.0f} jobs/s"),
            ("enqueue, in bulk", f"{result.bulk_per_second:,.0f} jobs/s"),
            (f"drain, {WORKERS} workers", f"{result.drain_per_second:,.0f} jobs/s"),
            ("idle pick-up, p50", f"{result.pick_up_p50_ms:.1f} ms"),
            ("idle pick-up, p99", f"{result.pick_up_p99_ms:.1f} ms"),
        ]
        table(("WHAT", "FIGURE"), rows)
        if result.failed:
            say(f"WRONG: {result.failed} jobs did not succeed")
    return 1 if result.failed else 0


@contextmanager
def _database(url: str | None) -> Iterator[tuple[Path, str]]:
    """Give the app a database of its own; yield a folder for the node, and the namespace."""
    from genba.cli.bench_app import app

    scheme = split_url(url).scheme if url else "sqlite"
    if scheme not in ("sqlite", "postgresql", "postgres"):
        raise BadOption(
            f"{mask_password(url or '')!r} is not a database URL; "
            "use sqlite:///file.db or postgresql://…"
        )
    on_disk = None
    if url and scheme == "sqlite":
        on_disk = Path(unquote(split_url(url).path)[1:]).absolute().parent
    try:
        folder = Path(tempfile.mkdtemp(prefix="genba-bench-", dir=on_disk))
    except OSError as error:
        raise StoreUnreachable(f"cannot make a folder in {on_disk}: {error.strerror}") from error
    own_url = f"sqlite:///{folder / 'genba.db'}" if scheme == "sqlite" or not url else url
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    app.settings = replace(app.settings, url=own_url, namespace=namespace)
    try:
        app.install()
        try:
            yield folder, namespace
        finally:
            if scheme != "sqlite":
                with signals_blocked():
                    app.delete_many(state="any")
    finally:
        with signals_blocked():
            app.close()
            shutil.rmtree(folder, ignore_errors=True)
