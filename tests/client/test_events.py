"""Events through the public API: read, followed, handled; and waiting for jobs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support import (
    eventually,
    lines,
    load_jobs,
    load_module,
    run_genba,
    sqlite_url,
    without_settings,
)

from genba import BadOption, CursorExpired, JobCancelled, JobFailed, JobGone, Retry

LONG = 20


def kinds(shop, job):
    return [event.kind for event in shop.app.events(job=job)]


def test_the_story_of_a_job_is_read_again_by_its_events(shop):
    job = shop.jobs.add.enqueue(1)
    job.wait(LONG)
    story = list(shop.app.events(job=job))

    assert [event.kind for event in story] == ["waiting", "running", "succeeded"]
    assert all(event.job == job and event.job_id == job.id for event in story)
    assert [event.at for event in story] == sorted(event.at for event in story)
    assert story[-1].job.refresh().state == "succeeded"


def test_a_retried_job_tells_of_each_attempt(shop):
    job = shop.jobs.fail_at_first.using(retry=Retry(times=2, delay="0.1s")).enqueue(1)
    job.wait(LONG)

    reported = [(event.kind, event.data.get("attempt")) for event in shop.app.events(job=job)]
    assert reported == [
        ("waiting", None),
        ("running", 1),
        ("retrying", 1),
        ("waiting", None),
        ("running", 2),
        ("succeeded", 2),
    ]


def test_a_reader_resumes_by_cursor_and_filters_by_kind_and_task(shop):
    cursor = shop.app.store.events.end().cursor
    fine, bad = shop.jobs.add.enqueue(1), shop.jobs.fail.enqueue("no")
    shop.app.wait([fine, bad], timeout=LONG)

    (failed,) = shop.app.events(after=cursor, kinds=["failed"])
    assert (failed.job_id, failed.data["cause"]) == (bad.id, "exception")
    assert "no" in failed.data["reason"]
    assert [e.kind for e in shop.app.events(after=cursor, task="jobs.add")] == [
        "waiting",
        "running",
        "succeeded",
    ]
    assert bad.id not in [e.job_id for e in shop.app.events(after=failed.cursor, kinds="done")]
    with pytest.raises(BadOption, match="no event"):
        shop.app.events(kinds="finnished")


def test_a_blocking_reader_gets_what_comes_sync_and_async(shop):
    cursor = shop.app.store.events.end().cursor
    seen: list[int] = []

    def follow() -> None:
        seen.extend(
            event.job_id
            for event in [next(shop.app.events(after=cursor, kinds="done", block=True))]
        )

    thread = threading.Thread(target=follow, name="reader")
    thread.start()
    job = shop.jobs.add.enqueue(1)
    thread.join(LONG)
    assert seen == [job.id]

    async def afollow() -> int:
        async for event in shop.app.aevents(after=cursor, kinds="done", block=True):
            return event.job_id
        raise AssertionError

    assert asyncio.run(afollow()) == job.id


def test_listen_ends_when_the_callback_says_so(shop):
    seen: list[str] = []

    def note(event) -> bool:
        seen.append(event.kind)
        return event.kind == "succeeded"

    ready = threading.Timer(0.2, lambda: shop.jobs.add.enqueue(1))
    ready.start()
    shop.app.listen(note, task="jobs.add")
    assert seen == ["waiting", "running", "succeeded"]

    job = shop.jobs.add.enqueue(2)

    async def anote(event) -> bool:
        return event.kind == "succeeded"

    asyncio.run(asyncio.wait_for(shop.app.alisten(anote, job=job), LONG))


def test_regression_04_cancel_is_not_timeout_and_all_gets_both(shop, path):
    by_name: dict[str, list[tuple[str, int]]] = {"cancel": [], "timeout": [], "*": []}
    app = shop.app
    for name in by_name:
        assert (
            app.on(name, lambda event, name=name: by_name[name].append((event.kind, event.job_id)))
            is app
        )
    slow = shop.jobs.wait_for.enqueue(str(path))
    late = shop.jobs.wait_for.using(timeout="0.2s", grace=0).enqueue(str(path))
    eventually(lambda: slow.refresh().state == "running")
    slow.cancel("enough")
    app.wait([slow, late], timeout=LONG)

    eventually(lambda: by_name["cancel"] and by_name["timeout"])
    assert by_name["cancel"] == [("cancelled", slow.id)]
    assert by_name["timeout"] == [("timed_out", late.id)]
    eventually(lambda: {("cancelled", slow.id), ("timed_out", late.id)} <= set(by_name["*"]))


def test_a_handler_that_raises_harms_no_other(shop, caplog):
    seen: list[int] = []

    @shop.app.on("taskscheduler.onDone")
    def broken(event) -> None:
        raise ValueError("broken handler")

    shop.app.on("done", lambda event: seen.append(event.job_id))
    jobs = [shop.jobs.add.enqueue(i) for i in range(3)]
    shop.app.wait(jobs, timeout=LONG)

    eventually(lambda: {job.id for job in jobs} <= set(seen))
    assert "broken handler" in caplog.text


def test_nodes_and_workers_have_events(shop):
    shop.jobs.add.enqueue(1).wait(LONG)
    (joined,) = shop.app.events(kinds="node_joined")
    assert (joined.job, joined.data["name"]) == (None, "shop")

    spawned = eventually(lambda: list(shop.app.events(kinds="workerSpawn")))
    assert spawned[0].data["workers"][0]["pid"]
    assert spawned[0].node == joined.node


NAMES = {
    *(
        "waiting",
        "scheduled",
        "blocked",
        "running",
        "progress",
        "succeeded",
        "failed",
        "timed_out",
        "cancelled",
    ),
    *(
        "held",
        "released",
        "retrying",
        "crashed",
        "worker_started",
        "worker_ended",
        "node_joined",
        "node_left",
    ),
    *("schedule_skipped", "gate_closed"),
}


def test_named_things_have_events_with_their_name_for_all_readers(tmp_path, path, start_node):
    jobs = load_jobs(sqlite_url(tmp_path), tmp_path)
    app, heard = jobs.app, set()
    app.on("*", lambda event: heard.add(event.kind))
    node = start_node(
        "jobs:app", sqlite_url(tmp_path), "--max", "4", "--grace", "0.1s", "--name", "works"
    )
    start_node("jobs:app", sqlite_url(tmp_path), "--name", "full", "--min-free-memory", "1000000G")
    eventually(lambda: len(app.nodes()) == 2, within=40)
    works = next(one.id for one in app.nodes() if one.name == "works")
    long = jobs.count_on.enqueue(str(path))
    jobs.add.using(after=[long]).enqueue(1)
    jobs.add.using(at="+1 hour").enqueue(1).cancel()
    app.recur("nightly", jobs.wait_for.call(str(path)), cron="0 3 1 1 *", overlap="skip")
    app.schedule("nightly").trigger()
    app.schedule("nightly").trigger()
    ends = [
        jobs.add.enqueue(1),
        jobs.fail.enqueue("no"),
        jobs.fail_at_first.using(retry=Retry(times=1, delay="0.1s")).enqueue(1),
        jobs.wait_for.using(timeout="0.2s").enqueue(str(path)),
        jobs.die_at_first.enqueue(str(tmp_path / "died")),
    ]
    app.wait(ends, timeout=60)
    jobs.add.using(delay="1h").enqueue(1).hold("why not")
    eventually(
        lambda: {"progress", "gate_closed"} <= {event.kind for event in app.events()}, within=LONG
    )

    assert node.stop(60) == 0

    assert {event.kind for event in app.events()} >= NAMES
    assert {event.node for event in app.events(kinds="running")} == {works}  # whose gate was open
    eventually(lambda: heard >= NAMES, within=LONG)
    app.close()


def test_the_actor_and_reason_of_a_change_are_in_the_history_of_a_job(jobs):
    job = jobs.add.using(delay="1h").enqueue(1)
    job.hold("stock-taking")
    job.resume()
    job.cancel("not needed")

    reported = {event.kind: event.data for event in jobs.app.events(job=job)}
    assert reported["held"]["reason"] == "stock-taking"
    assert reported["cancelled"]["reason"] == "not needed"
    assert all("@" in reported[kind]["by"] for kind in ("held", "resumed", "cancelled"))


def test_a_cursor_older_than_what_is_kept_is_refused(jobs):
    jobs.add.enqueue(1)
    (first,) = jobs.app.events()
    for i in range(10):
        jobs.add.enqueue(i)
    jobs.app.store.events.prune(0, 3)

    with pytest.raises(CursorExpired):
        list(jobs.app.events(after=first.cursor))
    assert len(list(jobs.app.events())) == 3


# waiting


def test_regression_05_wait_for_a_finished_job_returns_at_once(shop):
    fine, bad = shop.jobs.add.enqueue(1), shop.jobs.fail.enqueue("no luck")
    shop.app.wait([fine, bad], timeout=LONG)

    assert fine.wait(5).state == "succeeded"
    assert fine.result(5) == 2
    with pytest.raises(JobFailed, match="no luck") as raised:
        bad.result(5)
    assert "Traceback" in (raised.value.traceback or "")
    assert "in fail" in (raised.value.traceback or "")


def test_a_wait_with_throw_raises_as_soon_as_one_has_failed(shop, path):
    slow, bad = shop.jobs.wait_for.enqueue(str(path)), shop.jobs.fail.enqueue("at once")

    with pytest.raises(JobFailed, match="at once"):
        shop.app.wait([slow, bad], timeout=LONG, throw=True)
    slow.cancel("no more")
    with pytest.raises(JobCancelled, match="no more"):
        shop.app.wait([slow], timeout=LONG, throw=True)


def test_a_job_that_is_pruned_meanwhile_is_gone(jobs):
    job = jobs.add.enqueue(1)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            job.wait(LONG)
        except JobGone as error:
            failures.append(error)

    thread = threading.Thread(target=wait, name="waiter")
    thread.start()
    with jobs.app.store._db.transaction() as tx:
        tx.select(f"DELETE FROM genba.job WHERE id = {job.id} RETURNING id")
    thread.join(LONG)
    assert len(failures) == 1


def test_all_waits_of_a_process_share_one_thread_and_a_cancelled_one_leaves_none(jobs):
    job = jobs.add.enqueue(1)
    before = set(threading.enumerate())

    async def give_up() -> None:
        waits = [asyncio.create_task(job.await_()) for _ in range(50)]
        await asyncio.sleep(0.05)
        for one in waits:
            one.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    asyncio.run(give_up())
    new = {thread.name for thread in set(threading.enumerate()) - before}
    assert new <= {"genba-waiter"}
    assert not jobs.app._connection.wait_thread._waits
    eventually(lambda: not set(threading.enumerate()) - before)


# a consumer that dies

CONSUMER = """
import os, sys
from genba import Genba
app = Genba(sys.argv[1])
place, seen = sys.argv[2:4]
cursor = open(place).read() if os.path.exists(place) else None
out = open(seen, "a", buffering=1)
for event in app.events(after=cursor, kinds=["waiting", "succeeded", "failed"], block=True):
    out.write(f"{event.job_id} {event.kind}\\n")
    with open(place + ".new", "w") as file:
        file.write(event.cursor)
    os.replace(place + ".new", place)
"""


@pytest.mark.parametrize(
    ("count", "deaths"),
    [(500, 5), pytest.param(5000, 50, marks=pytest.mark.soak)],
    ids=["tenth", "whole"],
)
def test_a_consumer_that_is_killed_again_and_again_sees_every_end_in_order(
    shop, tmp_path, count, deaths
):
    (tmp_path / "consumer.py").write_text(CONSUMER)
    place, seen = tmp_path / "place", tmp_path / "seen"
    place.write_text(shop.app.store.events.end().cursor)
    command = [sys.executable, "consumer.py", shop.url, str(place), str(seen)]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=tmp_path, env=without_settings(os.environ))

    consumer = start()
    ids: set[int] = set()
    try:
        for _ in range(deaths):
            ids |= {
                job.id
                for job in shop.app.enqueue_many(
                    [shop.jobs.add.call(i) for i in range(count // deaths)]
                )
            }
            reported = len(lines(seen))
            _until_longer(seen, reported)
            consumer.send_signal(signal.SIGKILL)
            consumer.wait()
            consumer = start()

        def ended() -> set[int]:
            return {int(line[0]) for line in lines(seen) if line[-1] == "succeeded"}

        eventually(lambda: ids <= ended(), within=60 + count / 10, every=0.5)
    finally:
        consumer.kill()
        consumer.wait()
    first: dict[tuple[int, str], int] = {}
    for number, line in enumerate(lines(seen)):
        first.setdefault((int(line[0]), line[-1]), number)
    assert all(first[id, "waiting"] < first[id, "succeeded"] for id in ids)


def _until_longer(path: Path, than: int) -> None:
    eventually(lambda: len(lines(path)) > than, within=LONG)


# the command line


def test_event_tail_and_job_tail_print_what_happened(shop, tmp_path):
    job = shop.jobs.add.enqueue(1)
    job.wait(LONG)

    def said(*words: str) -> str:
        return run_genba(shop.url, *words, cwd=tmp_path).stdout

    assert [line.split()[2] for line in said("job", "tail", str(job.id), "-f").splitlines()] == [
        "waiting",
        "running",
        "succeeded",
    ]
    reported = [
        json.loads(line) for line in said("event", "tail", "--kind", "done", "--json").splitlines()
    ]
    assert job.id in [one["job"] for one in reported]
    assert reported[0].keys() == {"cursor", "kind", "job", "node", "at", "data"}
    assert said("event", "tail", "--kind", "done", "--after", reported[-1]["cursor"]) == ""
    assert said("event", "tail", "--new") == ""


def test_handlers_of_the_apps_module_do_not_run_in_programs_that_import_it(tmp_path: Path):
    (tmp_path / "handled.py").write_text(
        "from genba import Genba\napp = Genba('sqlite:///handled.db')\n"
        "@app.on('done')\ndef note(event): pass\n"
    )
    before = set(threading.enumerate())
    module = load_module("handled", tmp_path, "sqlite:///handled.db")

    assert module.app.handlers
    assert not Path("handled.db").exists()
    assert not set(threading.enumerate()) - before


def test_a_program_that_imports_the_module_gets_events_for_its_own_handlers_alone(
    url, tmp_path: Path
):
    (tmp_path / "handled.py").write_text(
        "from genba import Genba\napp = Genba()\nseen = []\n"
        "@app.task\ndef add(x: int) -> int: return x + 1\n"
        "app.on('*', seen.append)\n"
    )
    module, seen = load_module("handled", tmp_path, url), []
    module.app.on("waiting", lambda event: seen.append(event.job_id))

    job = module.add.enqueue(1)

    assert eventually(lambda: seen) == [job.id]
    assert module.seen == []
    module.app.close()


def test_a_listener_that_was_too_slow_goes_on_with_the_events_of_its_own_node(
    url, tmp_path: Path, caplog
):
    (tmp_path / "handled.py").write_text(
        "from genba import Genba\napp = Genba()\nseen = []\n"
        "class Enough(BaseException): pass\n"
        "@app.on('gate_opened')\ndef note(event):\n"
        "    seen.append(event.node)\n"
        "    if len(seen) > 3: raise Enough\n"
    )
    module, over = load_module("handled", tmp_path, url), threading.Event()
    store = module.app.store

    def opened(*nodes: int) -> None:
        for node in nodes:
            with store._db.transaction() as tx:
                store.events.add(tx, "gate_opened", node=node)

    def go_on() -> None:
        while not over.wait(0.02):
            opened(8, 7)

    def expire() -> None:
        opened(*[8] * 10)
        store.events.prune(0, 3)
        others.start()

    others = threading.Thread(target=go_on, name="other nodes")
    with pytest.raises(module.Enough):
        module.app.handlers.serve(7, expire)
    over.set()
    others.join()

    assert "handlers were too slow" in caplog.text
    assert module.seen == [7, 7, 7, 7]
    module.app.close()
