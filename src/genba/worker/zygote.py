"""Imports the user's app once, and forks a worker whenever the node asks for one.

`python -m genba.worker.zygote TARGET NODE_TITLE [--reload]`, with a SOCK_SEQPACKET socket to the
node on fd 3.
It has one thread, so that a fork copies no lock in use.  It is no sub-reaper, so that what a dead
worker leaves behind becomes the guard's.

From the node, one ASCII packet each:
    SPAWN slot (+ worker socket, token pipe, shared memory): by fork
    EXEC slot (+ the same): by a new interpreter, which imports the app itself
To the node:
    HELLO (+ memfd: msgpack), IMPORT_FAILED (+ memfd: text), CHANGED file (with --reload),
    STARTED slot pid own_pid (+ pidfd), UNSTARTED slot reason,
    ENDED pid status user_micros system_micros peak_kb
"""

from __future__ import annotations

import array
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import msgspec

from genba import wire
from genba.worker import event_loop
from genba.worker.load_app import App, explain, load
from genba.worker.process import adopt_orphans, give_back_memory, leave, use_huge_pages
from genba.worker.reload import FileWatch, suspects

NODE_FD = 3
IMPORT_FAILED = 3  # exit code

_FLUSH_MS = 5000
_POLL_MS = 500  # between two looks at the files of the app
_LISTENER_AGAIN_SECONDS = 1.0
_LISTENER_READY_SECONDS = 5.0
_HUGE_PAGES_SECONDS = 1.0  # the first worker of a large app waits for it; later forks are quick
_FREE_FD = 10  # above the descriptors that an exec worker finds its own at

Run = Callable[[App, int, socket.socket, int, int], object]

# A terminal or a service manager signals the whole group; the node decides when the zygote ends.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A worker handles these in another way than the zygote.
_RESET_IN_WORKER = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, wire.STOP_SIGNAL)
_BLOCKED_DURING_FORK = {*_IGNORED, *_RESET_IN_WORKER}


def main(argv: list[str], run: Run | None = None) -> NoReturn:
    """Be the zygote of the app `argv[1]`; a test may replace `run`, which is what a worker does."""
    target, node_title = argv[1:3]
    reload = "--reload" in argv[3:]
    os.set_inheritable(NODE_FD, False)
    node = socket.socket(fileno=NODE_FD)
    node.setblocking(False)
    _ignore_signals()
    try:
        app = load(target)
        hello = {**app.hello(), "threads": thread_names(), "loop": _loop(app)}
        greeting = msgspec.msgpack.encode(hello)
        run = run or _real_run()
    except BaseException as error:  # noqa: BLE001 - an app may also leave by sys.exit
        failure = explain(target, error)
        parts = [part.encode(errors="replace") for part in (failure.message, failure.frames)]
        _send_now(node, "IMPORT_FAILED", msgspec.msgpack.encode(parts))
        if not reload:
            leave(IMPORT_FAILED)
        serve(node, None, _run_nothing, watch=FileWatch(suspects(target, error)))
    _ignore_signals()  # the app may have set its own

    title = f"genba-{hello.get('namespace', 'default')}: {node_title}"
    set_title(f"{title}/zygote")
    prepare(app)
    gc.collect()  # now, before the node asks for the first worker
    give_back_memory()
    use_huge_pages(_HUGE_PAGES_SECONDS)
    gc.freeze()  # a collection in a worker must not copy every page of the app
    serve(node, app, run, title, target, FileWatch() if reload else None, greeting)


def thread_names() -> list[str]:
    """Return the names of all threads but the main one, those of C libraries too."""
    python = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread == os.getpid():
            continue
        try:
            with open(f"/proc/self/task/{thread}/comm") as comm:
                names.append(python.get(thread) or comm.read().strip())
        except OSError:
            continue  # it has ended
    return sorted(names)


def serve(
    node: socket.socket,
    app: App,
    run: Run,
    title: str = "genba",
    target: str = "",
    watch: FileWatch | None = None,
    greeting: bytes | None = None,
) -> NoReturn:
    """Start workers on request and report their ends, until the node closes its end of `node`."""
    zygote = _Zygote(node, app, run, title, target, watch)
    zygote.keep_listener()  # before the node does anything that handlers should see
    if greeting is not None:
        _send_now(node, "HELLO", greeting)
    zygote.loop()


class _Zygote:
    def __init__(
        self,
        node: socket.socket,
        app: App,
        run: Run,
        title: str,
        target: str,
        watch: FileWatch | None,
    ) -> None:
        self._node = node
        self._app = app
        self._run = run
        self._title = title
        self._target = target
        self._watch = watch
        self._workers: set[int] = set()
        self._handled = bool(getattr(app, "handlers", ()))
        self._listener = 0
        self._listen_after = 0.0
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        self._wake, self._wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        node.setblocking(False)

    def loop(self) -> NoReturn:
        self._reap()  # children of the import may have ended before the signal handler was set
        while True:
            self._poll.register(self._node, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            self.keep_listener()
            alone = self._watch is None and (not self._handled or self._listener)
            self._poll.poll(None if alone else _POLL_MS)
            self._clear_wake()
            self._reap()
            self._obey()
            self._report_changed_file()
            self._flush()

    def keep_listener(self) -> None:
        """Start the listener if the app has event handlers and there is none.

        Returns when the listener is ready, and no event can be missed.
        """
        if not self._handled or self._listener or time.monotonic() < self._listen_after:
            return
        self._listen_after = time.monotonic() + _LISTENER_AGAIN_SECONDS
        out, ready = os.pipe()
        self._listener = self._start_listener(out, ready)
        os.close(ready)
        select.select([out], [], [], _LISTENER_READY_SECONDS)
        os.close(out)

    def _start_listener(self, out: int, ready: int) -> int:
        title, zygote = f"{self._title}/listener", os.getpid()
        if thread_names():
            os.set_inheritable(ready, True)
            argv = [
                sys.executable,
                "-m",
                "genba.worker.event_listener",
                self._target,
                title,
                str(zygote),
                str(ready),
            ]
            return os.posix_spawn(
                sys.executable, argv, os.environ, setsigdef=(*_IGNORED, signal.SIGCHLD)
            )
        pid = os.fork()
        if pid:
            return pid
        try:
            os.close(out)
            self._leave_zygote(0)
            from genba.worker.event_listener import serve

            serve(self._app, title, zygote, ready)
        except BaseException:  # noqa: BLE001 - the last frame of the listener
            traceback.print_exc()
        finally:
            leave(1)

    def _report_changed_file(self) -> None:
        changed = self._watch and self._watch.changed()
        if changed:
            self._report(f"CHANGED {changed}", [])
            self._watch = None

    def _clear_wake(self) -> None:
        try:
            while os.read(self._wake, 4096):
                pass
        except BlockingIOError:
            pass

    def _obey(self) -> None:
        room = socket.CMSG_SPACE(3 * array.array("i").itemsize)
        try:
            packet, ancillary, _, _ = self._node.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionResetError:
            packet, ancillary = b"", []
        if not packet:
            os._exit(0)
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload)
        match packet.split():
            case [b"SPAWN", slot]:
                self._spawn(int(slot), fds.tolist(), self._fork)
            case [b"EXEC", slot]:
                self._spawn(int(slot), fds.tolist(), self._exec)

    def _spawn(self, slot: int, fds: list[int], start: Callable[[int, list[int]], int]) -> None:
        try:
            if len(fds) != 3:
                raise OSError("the zygote has no file descriptor left")
            pid = start(slot, fds)
        except OSError as error:
            self._report(f"UNSTARTED {slot} {error.strerror or error}", [])
            return
        finally:
            for fd in fds:
                os.close(fd)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            self._report(f"UNSTARTED {slot} {error.strerror or error}", [])
            return
        self._workers.add(pid)
        self._report(f"STARTED {slot} {pid} {os.getpid()}", [pidfd])

    def _fork(self, slot: int, fds: list[int]) -> int:
        # A signal for the worker must not meet the zygote's handlers: block it during the fork.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_DURING_FORK)
        try:
            pid = os.fork()
            if pid == 0:
                self._be_worker(slot, fds)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    def _exec(self, slot: int, fds: list[int]) -> int:
        """Start a worker by posix_spawn: beside threads, a forked child may do next to nothing."""
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE_FD) for fd in fds]
        try:
            return os.posix_spawn(
                sys.executable,
                [
                    sys.executable,
                    "-m",
                    "genba.worker.exec_worker",
                    self._target,
                    self._worker_title(slot),
                    str(slot),
                ],
                {**os.environ, "GENBA_WORKER": "1"},
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, NODE_FD + i) for i, fd in enumerate(high)],
                setpgroup=0,
                setsigmask=(),
                setsigdef=(*_IGNORED, signal.SIGCHLD),
            )
        finally:
            for fd in high:
                os.close(fd)

    def _worker_title(self, slot: int) -> str:
        return f"{self._title}/worker[{slot}]"

    def _be_worker(self, slot: int, fds: list[int]) -> NoReturn:
        code = 1
        try:
            self._leave_zygote(slot)
            self._run(self._app, slot, socket.socket(fileno=fds[0]), fds[1], fds[2])
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:  # noqa: BLE001 - the last frame of the worker
            traceback.print_exc()
        finally:
            # In any case: the child must not return into the loop of its parent.
            leave(code)

    def _leave_zygote(self, slot: int) -> None:
        os.setpgid(0, 0)
        adopt_orphans()
        self._node.close()
        for fd in (
            self._wake,
            self._wake_end,
            *(fd for _, rights in self._outbox for fd in rights),
        ):
            os.close(fd)
        signal.set_wakeup_fd(-1)
        for number in _RESET_IN_WORKER:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ["GENBA_WORKER"] = "1"
        set_title(self._worker_title(slot))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._listener:
                self._listener = 0
            if pid in self._workers:
                self._workers.remove(pid)
                user, system = int(usage.ru_utime * 1e6), int(usage.ru_stime * 1e6)
                self._report(f"ENDED {pid} {status} {user} {system} {usage.ru_maxrss}", [])

    def _report(self, text: str, fds: list[int]) -> None:
        self._outbox.append((text.encode(), fds))

    def _flush(self) -> None:
        while self._outbox:
            packet, fds = self._outbox[0]
            try:
                _send(self._node, packet, fds)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
            self._outbox.popleft()
            for fd in fds:
                os.close(fd)


def _run_nothing(*_: object) -> None:
    """Do nothing: an app that could not be imported has no workers."""


def prepare(app: App) -> None:
    """Do what each worker would otherwise do for its first job."""
    for task in _tasks(app).values():
        task.arguments.prepare()


def _tasks(app: App) -> dict[str, Any]:
    tasks: dict[str, Any] = getattr(app, "task_table", dict)()
    return tasks


def _loop(app: App) -> str | None:
    """Return the name of the event loop; None, and nothing is imported, without async tasks."""
    return event_loop.name() if any(task.is_async for task in _tasks(app).values()) else None


def _real_run() -> Run:
    importlib.import_module("genba.worker.shared_worker")  # before the first fork, for all workers
    from genba.worker.fork_per_job import chosen_fork
    from genba.worker.warm_up import warm_up
    from genba.worker.worker import main as run

    warm_up()
    return partial(run, fork=chosen_fork())


def _ignore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)


def set_title(title: str) -> None:
    # Otherwise setproctitle overwrites the environment, and the incarnation that sweeps look for.
    os.environ["SPT_NOENV"] = "1"
    from setproctitle import setproctitle

    setproctitle(title)


def _send_now(node: socket.socket, word: str, contents: bytes) -> None:
    """Send contents of any size, as a memfd: a packet has room for some 200 KB only."""
    memfd = os.memfd_create("genba")
    with open(memfd, "wb") as file:
        file.write(contents)
        file.flush()
        poll = select.poll()
        poll.register(node, select.POLLOUT)
        poll.poll(_FLUSH_MS)
        try:
            _send(node, word.encode(), [memfd])
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            os._exit(0)  # the node is gone


def _send(node: socket.socket, packet: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    node.sendmsg([packet], rights)


if __name__ == "__main__":
    main(sys.argv)
