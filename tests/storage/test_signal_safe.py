"""A stop is an exception that a signal raises, between any two steps: nothing may stay locked or open by it."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.storage.builders import CLAIM, connection, joined, one, running
from tests.support import eventually

from genba.domain.outcome import AttemptReport, OutcomeRequest
from genba.errors import Stopped
from genba.signal_safe import defer_stop, stop_when_safe
from genba.storage.engines.sqlite.write_queue import WriteQueue
from genba.storage.store import Store, open_store

REPORT = AttemptReport(progress=None, log="", ran=5, pid=4, cpu=3, peak=2)


def _stop() -> None:
    raise Stopped("now")


def _looks(name: str) -> bool:
    """Whether the interpreter looks for signals after this instruction."""
    return name.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))


def played(deed: Callable[[], object], look: int) -> BaseException | None:
    """Stopped when the interpreter looks for signals for the nth time, as by a handler; None: it was over before."""
    left = look
    before: dict[FrameType, str] = {}

    def watch(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            left -= _looks(before.get(frame, ""))
            before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if left == 0:
                sys.settrace(None)
                stop_when_safe(_stop)
        return watch if left > 0 else None

    sys.settrace(watch)
    try:
        deed()
    except Stopped as stopped:
        return stopped  # with its frames, and what they hold: user code may keep it for long, too
    finally:
        sys.settrace(None)
        before.clear()
    return None


def stopped_everywhere(deed: Callable[[], object]) -> Iterator[BaseException]:
    for _ in range(
        2
    ):  # what is made at the first time only: connections, plans; from 3.12 on also what is watched
        assert played(deed, sys.maxsize) is None
    look = 0
    while (stopped := played(deed, look := look + 1)) is not None:
        yield stopped
    assert look > 2  # it was played at all


def in_a_thread(deed: Callable[[], object]) -> bool:
    thread = threading.Thread(target=deed, name="other", daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()


@pytest.fixture
def free(url: str) -> Iterator[Callable[[], bool]]:
    """Say whether no transaction is open and the turn is free."""
    with connection(url) as conn:
        if not url.startswith("sqlite"):
            idle = "application_name = 'genba' AND state LIKE 'idle in transaction%'"
            left = f"SELECT 1 FROM pg_stat_activity WHERE {idle}"
            yield lambda: not conn.execute(left).fetchall()
            return

        def is_free() -> bool:
            conn.execute("BEGIN IMMEDIATE")
            conn.execute("ROLLBACK")
            turns = WriteQueue.of(Path(url.removeprefix("sqlite:///")))
            return turns.holder() is None and not turns._mine.locked()

        yield is_free


@pytest.fixture
def stopped_store(url: str) -> Iterator[Store]:
    """By the system's clock, and no other has its connections."""
    with closing(open_store(url)) as store:
        yield store


def _transaction(store: Store) -> None:
    with store._db.transaction() as tx:
        tx.all("now")


def _statement(store: Store) -> None:
    with store._db.statement() as tx:
        tx.all("now")


def _session(store: Store) -> None:
    store.listener.enter()
    store.listener.session()
    store.listener.leave()


DEEDS = {
    "transaction": _transaction,
    "statement": _statement,
    "in turn": lambda store: store._db.pipeline(("now", {})),
    "enqueue": one,
    "publish": lambda store: store.messages.publish("news", b"{}"),
    "mark": lambda store: store.write_marker(),
    "session": _session,
}


def test_what_was_stopped_while_it_waited_is_stopped_when_nothing_is_under_way():
    reported = []

    def work() -> None:
        with defer_stop:
            with defer_stop:
                stop_when_safe(_stop)
                reported.append("inner")
            reported.append("outer")
        reported.append("after it")

    with pytest.raises(Stopped):
        work()
    stop_when_safe(lambda: reported.append("now"))

    assert reported == ["inner", "outer", "now"]


@pytest.mark.parametrize("deed", DEEDS)
def test_a_stop_leaves_nothing_open_wherever_it_comes(stopped_store, free, deed):
    for stopped in stopped_everywhere(lambda: DEEDS[deed](stopped_store)):
        assert free(), stopped.__traceback__
    assert in_a_thread(lambda: DEEDS[deed](stopped_store))


class Undo(Exception):
    pass


def test_a_job_that_is_stopped_in_its_own_transaction_leaves_it(stopped_store, free):
    """Or is known to have one, so that it ends with the job."""
    joined(stopped_store)
    job = running(stopped_store)
    fence, reported = (job.id, job.attempt, CLAIM), (OutcomeRequest(wants="succeed"), REPORT, 0.0)
    last: list[Any] = []

    def deed() -> None:
        last[:] = [stopped_store.own_writes.transaction(fence, lambda: reported)]
        with suppress(Undo), last[0] as conn:
            conn.execute("SELECT 1")
            raise Undo

    for stopped in stopped_everywhere(deed):
        last[0].__exit__(Stopped, stopped, None)
        eventually(free, within=5)  # PostgreSQL hears of a cut connection a moment later
