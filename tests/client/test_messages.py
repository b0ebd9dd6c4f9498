"""Messages between processes: to running jobs, and to the listeners of a topic."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support import PATIENCE, NodeProcess, eventually, lines, load_module, without_settings

from genba import BadArguments, BadOption, IllegalMove, PayloadTooLarge

_TASKS = """
import asyncio, os, signal, time
from genba import Genba, current_job

app = Genba()
here = os.path.dirname(os.path.abspath(__file__))

def tell(name, *words):
    fd = os.open(os.path.join(here, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (" ".join(map(str, words)) + "\\n").encode())
    os.close(fd)

@app.task
def collect(name: str) -> list:
    tell(name, os.getpid())
    got = []
    while (message := current_job().inbox()) not in ("end", None):
        got.append(message)
        tell(f"{name}-got", time.monotonic())
    return got

@app.task
def collect_impatiently() -> list:
    return [current_job().inbox(timeout=0.1), current_job().inbox(0)]

@app.task
async def collect_async(name: str) -> list:
    job = current_job()
    try:
        await asyncio.wait_for(job.ainbox(), 0.05)
    except TimeoutError:
        tell(name, os.getpid())
    return [await job.ainbox("20s"), await job.ainbox(0)]

@app.task
def until_stopped(name: str) -> str:
    tell(name, os.getpid())
    got = current_job().inbox()
    tell(f"{name}-end", got)

@app.task
def answer(topic: str) -> None:
    while (question := current_job().inbox(timeout="20s")) is not None:
        app.publish(topic, {"answer": question * 2})
"""


class Place:
    def __init__(self, url: str, folder: Path, tasks: Any) -> None:
        self.url, self.folder, self.tasks, self.app = url, folder, tasks, tasks.app

    def wait_for_lines(self, name: str, count: int = 1) -> list[list[str]]:
        return eventually(
            lambda: found if len(found := lines(self.folder / name)) >= count else [], within=20
        )


@pytest.fixture(scope="module")
def place(home: tuple[str, Path]) -> Iterator[Place]:
    url, folder = home
    (folder / "tasks.py").write_text(_TASKS)
    with ExitStack() as stack:
        tasks = load_module("tasks", folder, url)
        stack.callback(tasks.app.close)
        node = NodeProcess.start("tasks:app", url, "--max", "4", cwd=folder)
        stack.callback(lambda: print(node.log))
        stack.callback(node.end)
        eventually(tasks.app.nodes, within=60)
        yield Place(url, folder, tasks)


def test_a_job_receives_in_order_what_was_sent_before_and_while_it_ran(place: Place) -> None:
    job = place.tasks.collect.using(delay="0.2s").enqueue("order")
    for i in range(3):
        job.send({"n": i})
    place.wait_for_lines("order-got", 3)
    job.send(None)  # a message may be anything that JSON can tell, and this one ends it
    assert job.result(timeout=20) == [{"n": 0}, {"n": 1}, {"n": 2}]
    with pytest.raises(IllegalMove, match="succeeded"):
        job.send("too late")


def test_a_message_wakes_the_job_that_waits_for_it(place: Place) -> None:
    job = place.tasks.collect.enqueue("wake")
    place.wait_for_lines("wake")
    for i in range(3):
        sent = time.monotonic()
        job.send(i)
        got = float(place.wait_for_lines("wake-got", i + 1)[i][0])
        assert got - sent < PATIENCE * 1
    job.send("end")
    assert job.result(timeout=20) == [0, 1, 2]


def test_without_a_message_the_inbox_gives_none_when_its_time_is_over(place: Place) -> None:
    assert place.tasks.collect_impatiently.enqueue().result(timeout=20) == [None, None]


def test_async_jobs_receive_and_a_cancelled_wait_loses_nothing(place: Place) -> None:
    job = place.tasks.collect_async.enqueue("async")
    place.wait_for_lines("async")
    asyncio.run(job.asend([1]))

    assert job.result(timeout=20) == [[1], None]


def test_a_killed_attempt_leaves_the_messages_that_it_has_not_received_to_the_next(
    place: Place,
) -> None:
    job = place.tasks.collect.enqueue("killed")
    ((pid,),) = place.wait_for_lines("killed")
    job.send("first")
    place.wait_for_lines("killed-got")
    os.kill(int(pid), signal.SIGSTOP)
    job.send("second")
    os.kill(int(pid), signal.SIGKILL)
    place.wait_for_lines("killed", 2)
    job.send("end")

    assert job.result(timeout=20) == ["second"]


def test_a_cancelled_job_does_not_wait_on(place: Place) -> None:
    job = place.tasks.until_stopped.using(grace="10s").enqueue("stop")
    place.wait_for_lines("stop")
    job.cancel()
    job.wait(timeout=5)

    assert job.refresh().state == "cancelled"


def test_jobs_and_clients_talk_through_topics(place: Place) -> None:
    with place.app.subscribe("answers") as answers:
        job = place.tasks.answer.enqueue("answers")
        for i in range(3):
            job.send(i)
        assert [answers.get(timeout=10) for _ in range(3)] == [
            {"answer": 0},
            {"answer": 2},
            {"answer": 4},
        ]
        job.send(None)
        assert answers.get(timeout=0.1) is None
    job.wait(timeout=10)


def test_every_process_that_listens_hears_all_in_order(place: Place) -> None:
    code = (
        "import sys\nfrom genba import Genba\napp = Genba(sys.argv[1])\n"
        "with app.subscribe('news') as news:\n"
        "    print('ready', flush=True)\n"
        "    for message in news:\n"
        "        if message == 'end': break\n"
        "        print(message, flush=True)\n"
        "app.close()\n"
    )
    env = without_settings(os.environ)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", code, place.url], env=env, stdout=subprocess.PIPE, text=True
        )
        for _ in "ab"
    ]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    assert place.app.publish("nobody", 1) == 0
    for i in range(20):
        assert place.app.publish("news", i) == 2
    place.app.publish("news", "end")

    for reader in readers:
        out, _ = reader.communicate(timeout=20)
        assert out.split() == [str(i) for i in range(20)]
    eventually(lambda: place.app.publish("news", "gone") == 0)


def test_a_listener_is_woken_and_a_killed_one_is_forgotten(place: Place) -> None:
    code = (
        "import sys, time\nfrom genba import Genba\n"
        "news = Genba(sys.argv[1]).subscribe('n')\nprint('ready', flush=True)\n"
        "for m in news: print(time.monotonic(), flush=True)\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", code, place.url],
        env=without_settings(os.environ),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    for _ in range(3):
        sent = time.monotonic()
        assert place.app.publish("n", 1) == 1
        assert float(reader.stdout.readline()) - sent < PATIENCE * 1
    reader.kill()
    reader.communicate()
    eventually(lambda: place.app.publish("n", 1) == 0, within=6)


def test_async_listeners(place: Place) -> None:
    app = place.app

    async def listen() -> list[Any]:
        got = []
        async with await app.asubscribe("a") as messages:
            await app.apublish("a", 1)
            await app.apublish("a", {"x": [2]})
            async for message in messages:
                got.append(message)
                if len(got) == 2:
                    break
            waiting = asyncio.create_task(messages.aget())
            await asyncio.sleep(0.05)
            waiting.cancel()
            await app.apublish("a", 3)
            return [*got, await messages.aget(timeout=10), await messages.aget(timeout=0)]

    assert asyncio.run(listen()) == [1, {"x": [2]}, 3, None]


def test_closing_ends_the_iteration_of_another_thread(place: Place) -> None:
    messages = place.app.subscribe("c")
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(messages))
    thread.start()
    place.app.publish("c", 1)
    eventually(lambda: got == [1])
    messages.close()
    thread.join(5)

    assert not thread.is_alive()


@pytest.mark.parametrize("call", ["send", "publish"])
def test_what_json_cannot_tell_or_is_too_large_is_refused(place: Place, call: str) -> None:
    def say(value: Any) -> None:
        job.send(value) if call == "send" else place.app.publish("t", value)

    job = place.tasks.collect.using(delay="1h").enqueue("never")
    tries: list[tuple[Any, type[Exception]]] = [
        (object(), BadArguments),
        (float("nan"), BadArguments),
        ("x" * (1 << 21), PayloadTooLarge),
    ]
    for value, error in tries:
        with pytest.raises(error):
            say(value)
    with pytest.raises(BadOption, match="topic"):
        place.app.publish("", 1)
    job.cancel()
