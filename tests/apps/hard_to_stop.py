"""Jobs that do not want to stop, for the table of `tests/support/stop_table.py`.

Each tells in `path` the pids of all that is its own, the worker's first, as soon as it is as stubborn as it gets.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

from genba import Genba, current_job

app = Genba()

LONG = 1e6


def tell(path: str, *pids: int) -> None:
    words = " ".join(map(str, (current_job().id, os.getpid(), *pids)))
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{words}\n".encode())
    os.close(fd)


@app.task
def sleep(path: str) -> None:
    tell(path)
    time.sleep(LONG)


@app.task
def busy_loop(path: str) -> None:
    os.nice(19)  # many of them run at once, and the nodes of the test need some of the machine
    tell(path)
    while True:
        pass


@app.task
def blocking_c_call(path: str) -> None:
    """In C and with the interpreter's lock; no signal gets it out, and no Python code runs beside it."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    tell(path)
    libc.pthread_mutex_lock(mutex)


@app.task
def sigterm_ignored(path: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(path)
    while True:
        time.sleep(LONG)


@app.task
def setsid_grandchild(path: str) -> None:
    """A grandchild that has lost its parent, has left the session, and is deaf."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.write(into, str(os.getpid()).encode())
            while True:
                time.sleep(LONG)
        os._exit(0)
    os.waitpid(child, 0)
    tell(path, int(os.read(out, 32)))
    time.sleep(LONG)


@app.task
def ten_threads(path: str) -> None:
    """They go on after the main thread has been stopped."""
    threads = [
        threading.Thread(target=time.sleep, args=(LONG,), name=f"thread {n}") for n in range(10)
    ]
    for thread in threads:
        thread.start()
    tell(path)
    for thread in threads:
        thread.join()


ALL = (sleep, busy_loop, blocking_c_call, sigterm_ignored, setsid_grandchild, ten_threads)
