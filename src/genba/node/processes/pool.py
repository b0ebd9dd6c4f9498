"""The worker processes, seen from their parent: guard, zygote, workers.

Nothing here blocks for longer than a stuck peer may take (`PEER_SECONDS`), and nothing is decided:
`ready` gives what happened as events.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from genba.node.processes import guard
from genba.node.processes.linux import adopt_orphans, boot_micros, ended, kill_children
from genba.node.processes.packets import Peer, contents_of, post, receive, send_signal, socketpair
from genba.node.timing import KILL_SECONDS

_LOST_STARTS = 0  # the token of the pool's own sweep; those of the brain are greater


@dataclass(frozen=True, slots=True)
class AppImported:
    """The zygote has imported the app.

    `contents` is what `app.hello()` gave, and `threads`, the names of its threads.
    """

    contents: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImportFailed:
    """The app cannot be imported; the zygote ends with status exit 3."""

    message: str
    frames: str  # the lines of the user's code that led there


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """A worker runs.  The pool owns `pidfd`, and closes it with WorkerEnded or GuardDied."""

    slot: int
    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The worker did not start: the zygote could not fork, or died before it could report.

    If it died, a worker may have started and even worked; that one is dead by now.
    """

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """A worker is dead and reaped; processes it started may live until the next sweep.

    `status` is a wait status, or None when its reaper was killed before it could report.
    """

    slot: int
    pid: int
    status: int | None
    cpu_micros: int
    peak_kb: int


@dataclass(frozen=True, slots=True)
class ZygoteDied:
    """The zygote is dead; its workers go on.  `restarting`: a new one is starting already."""

    status: int
    restarting: bool


@dataclass(frozen=True, slots=True)
class GuardDied:
    """The guard is dead, and so is everything below it: the workers of `slots` too.

    `left` processes could not be killed (another user's, or stuck in the kernel).
    """

    status: int
    slots: tuple[int, ...]
    left: int


@dataclass(frozen=True, slots=True)
class LeftoversSwept:
    """Nothing is left that dead workers had started, but `unkillable` processes of other users."""

    token: int
    killed: int
    unkillable: int


@dataclass(frozen=True, slots=True)
class AppChanged:
    """A file of the app has changed since its import; once for each zygote, if the pool reloads."""

    path: str


PoolEvent = (
    AppImported
    | ImportFailed
    | WorkerStarted
    | SpawnFailed
    | WorkerEnded
    | ZygoteDied
    | GuardDied
    | LeftoversSwept
    | AppChanged
)


@dataclass(frozen=True, slots=True)
class _Worker:
    slot: int
    pid: int
    pidfd: int


class Pool:
    """Guard, zygote and workers of one node.

    Register each of `sockets` for reading and call `ready` when one is readable; they stay the same
    when a process dies and is started again.  `env` is the whole environment of the tree.  The pool
    reaps its own guard, and after the guard's death kills every child of this process that is
    younger than `start`: no other code in this process may call `waitpid(-1)` or start processes.
    """

    def __init__(
        self,
        target: str,
        *,
        env: Mapping[str, str],
        node_title: str,
        python: str = sys.executable,
        zygote: Sequence[str] = ("-m", "genba.worker.zygote"),
        reload: bool = False,
    ) -> None:
        # Without it setproctitle overwrites the environment, with the incarnation in it.
        self._env = {**env, "SPT_NOENV": "1"}
        self._python = python
        self._command = [python, *zygote, target, node_title, *(["--reload"] if reload else [])]
        self.forks = True  # False: workers are new interpreters
        self._epoll = select.epoll()
        self._guard: Peer | None = None
        self._zygote: Peer | None = None
        self._start_again = False
        self._pending: set[int] = set()
        self._lost_starts: set[int] = set()  # slots that a dead zygote had to start
        self._workers: dict[int, _Worker] = {}
        self._slot_of: dict[int, int] = {}
        self._spared: frozenset[int] = frozenset()

    @property
    def sockets(self) -> list[select.epoll]:
        """What to watch for reading: one epoll object for all sockets."""
        return [self._epoll]

    @property
    def guard_pid(self) -> int | None:
        return None if self._guard is None else self._guard.pid

    @property
    def zygote_pid(self) -> int | None:
        """None while there is none, or when it is just starting."""
        return None if self._zygote is None else self._zygote.pid or None

    def start(self) -> None:
        """Start guard and zygote; AppImported or ImportFailed follows.

        Call it again after GuardDied or `end`.
        """
        if self._guard is not None:
            raise RuntimeError("the pool has been started already")
        adopt_orphans()
        self._spared = frozenset(guard.children(os.getpid()))
        self._guard = self._spawn_guard()
        self._epoll.register(self._guard.sock, select.EPOLLIN)
        self._epoll.register(self._guard.pidfd, select.EPOLLIN)
        self._start_zygote()

    def _spawn_guard(self) -> Peer:
        ours, theirs = socketpair()
        try:
            # Not fork: this process may have threads.
            argv = [self._python, "-I", "-S", guard.__file__, str(os.getpid()), *self._command]
            pid = os.posix_spawn(
                self._python,
                argv,
                self._env,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), guard.NODE_FD),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                ],
                setsid=True,
                setsigmask=(),
            )
        except BaseException:  # the socket must not leak, whatever the error; raised again
            ours.close()
            raise
        finally:
            theirs.close()
        return Peer(ours, pid, os.pidfd_open(pid))

    def restart_zygote(self) -> None:
        """Start a new zygote, which imports the app again.

        One that lives is killed first; ZygoteDied follows.
        """
        if self._guard is None:
            return
        if self._zygote is None:
            self._start_zygote()
        else:
            self._start_again = True
            self._zygote.kill()

    def _start_zygote(self) -> None:
        self._start_again = False
        ours, theirs = socketpair()
        self._zygote = Peer(ours)
        self._epoll.register(ours, select.EPOLLIN)
        self._tell_guard("START", [theirs.fileno()])
        theirs.close()

    def spawn(self, slot: int, sock: socket.socket, token_fd: int, shm_fd: int) -> bool:
        """Ask for a worker that gets these three; WorkerStarted or SpawnFailed follows.

        The caller still owns what it passed, and may close it at once.  False if there is no
        zygote.
        """
        if slot in self._pending or slot in self._lost_starts or slot in self._workers:
            raise ValueError(f"slot {slot} has a worker already")
        if self._zygote is None or not self._zygote.open:
            return False
        if not post(
            self._zygote,
            f"{'SPAWN' if self.forks else 'EXEC'} {slot}",
            [sock.fileno(), token_fd, shm_fd],
        ):
            return False
        self._pending.add(slot)
        return True

    def signal(self, slot: int, number: int) -> bool:
        """Send a signal to the worker of `slot`; False if it is gone."""
        worker = self._workers.get(slot)
        return worker is not None and send_signal(worker.pidfd, number)

    def above(self, pid: int) -> int | None:
        """Give the slot of the worker that is this process, or that it descends from."""
        above: int | None = pid
        while above and above not in self._slot_of:
            above = guard.parent_of(above)
        return self._slot_of[above] if above else None

    def sweep(self, token: int) -> None:
        """Kill all that workers reported as ended have left behind; Swept(token) follows."""
        self._tell_guard(f"SWEEP {token}")

    def beat(self, seconds: float) -> None:
        """Let the guard end everything unless the next beat comes within `seconds`; 0: never."""
        self._tell_guard(f"BEAT {boot_micros() + round(seconds * 1e6) if seconds else 0}")

    def end(self, within: float = KILL_SECONDS) -> int:
        """Kill everything, waiting up to `within` seconds; gives how many processes are left."""
        if self._guard is None:
            return 0
        self._tell_guard("END")
        if not ended(self._guard.pidfd, within):
            self._guard.kill()
        return self._end_guard(self._guard).left

    def ready(self, _sock: object = None) -> list[PoolEvent]:
        """Give what has happened since the last call; never waits."""
        events: list[PoolEvent] = []
        self._read_zygote(events)
        self._read_guard(events)
        if self._guard is not None and ended(self._guard.pidfd):
            self._read_guard(events)
            self._read_zygote(events)
            events.append(self._end_guard(self._guard))
        return events

    def _read_zygote(self, events: list[PoolEvent]) -> None:
        zygote = self._zygote
        while zygote is not None and (packet := self._receive(zygote)):
            words, fds = packet
            match words:
                case ["HELLO"]:
                    events.append(
                        AppImported(
                            msgspec.msgpack.decode(contents_of(fds[0]), type=dict[str, Any])
                        )
                    )
                case ["IMPORT_FAILED"]:
                    texts = msgspec.msgpack.decode(contents_of(fds[0]), type=tuple[bytes, bytes])
                    events.append(ImportFailed(*(part.decode(errors="replace") for part in texts)))
                case ["STARTED", slot, pid, parent]:
                    events.append(self._started(int(slot), int(pid), fds[0]))
                    self._tell_guard(f"KNOW {pid} {parent}")
                case ["UNSTARTED", slot, *reason]:
                    self._pending.discard(int(slot))
                    events.append(SpawnFailed(int(slot), " ".join(reason)))
                case ["ENDED", pid, status, user, system, peak]:
                    self._ended(events, int(pid), int(status), int(user) + int(system), int(peak))
                case ["CHANGED", *path]:
                    events.append(AppChanged(" ".join(path)))

    def _read_guard(self, events: list[PoolEvent]) -> None:
        while self._guard is not None and (packet := self._receive(self._guard)):
            words, fds = packet
            # What the zygote said before it died comes first, or a worker would end before it
            # started.
            self._read_zygote(events)
            match words:
                case ["ZYGOTE", pid]:
                    self._zygote_is(int(pid), fds[0])
                case ["ZYGOTE_DIED", _, status]:
                    self._zygote_died(events, int(status))
                case ["REAPED", pid, status, user, system, peak]:
                    self._ended(events, int(pid), int(status), int(user) + int(system), int(peak))
                case ["GONE", pid]:
                    self._ended(events, int(pid), None, 0, 0)
                case ["SWEPT", token, *_] if int(token) == _LOST_STARTS:
                    events.extend(
                        SpawnFailed(slot, "the zygote died") for slot in sorted(self._lost_starts)
                    )
                    self._lost_starts.clear()
                case ["SWEPT", token, killed, unkillable]:
                    events.append(LeftoversSwept(int(token), int(killed), int(unkillable)))

    def _zygote_is(self, pid: int, pidfd: int) -> None:
        if self._zygote is None:
            os.close(pidfd)
            return
        self._zygote.pid, self._zygote.pidfd = pid, pidfd
        if self._start_again or not self._zygote.open:
            self._zygote.kill()

    def _started(self, slot: int, pid: int, pidfd: int) -> WorkerStarted:
        self._pending.discard(slot)
        self._workers[slot] = _Worker(slot, pid, pidfd)
        self._slot_of[pid] = slot
        return WorkerStarted(slot, pid, pidfd)

    def _ended(
        self, events: list[PoolEvent], pid: int, status: int | None, cpu: int, peak: int
    ) -> None:
        slot = self._slot_of.pop(pid, None)
        if slot is None:  # the other reaper has reported it, or it was no worker
            return
        os.close(self._workers.pop(slot).pidfd)
        self._tell_guard(f"FORGET {pid}")
        events.append(WorkerEnded(slot, pid, status, cpu, peak))

    def _zygote_died(self, events: list[PoolEvent], status: int) -> None:
        self._drop_zygote()
        self._tell_guard("SETTLED")
        if self._pending:
            # It may have forked a worker that is at work already, and only a sweep ends that one.
            self._lost_starts |= self._pending
            self._pending.clear()
            self.sweep(_LOST_STARTS)
        events.append(ZygoteDied(status, restarting=self._start_again))
        if self._start_again:
            self._start_zygote()

    def _end_guard(self, peer: Peer) -> GuardDied:
        """Reap a guard that has ended, or must, and end what it has left running."""
        ended(peer.pidfd, KILL_SECONDS)
        pid, status = os.waitpid(peer.pid, os.WNOHANG)
        left = kill_children(self._spared, KILL_SECONDS)
        self._epoll.unregister(peer.pidfd)
        self._shut(peer)
        self._guard = None
        self._drop_zygote()
        self._start_again = False
        slots = tuple(sorted(self._pending | self._lost_starts | self._workers.keys()))
        for worker in self._workers.values():
            os.close(worker.pidfd)
        self._workers.clear()
        self._slot_of.clear()
        self._pending.clear()
        self._lost_starts.clear()
        return GuardDied(status if pid else signal.SIGKILL, slots, left)

    def _drop_zygote(self) -> None:
        if self._zygote is not None:
            self._shut(self._zygote)
            self._zygote = None

    def _shut(self, peer: Peer) -> None:
        self._unwatch(peer)
        peer.close()

    def _unwatch(self, peer: Peer) -> None:
        if peer.open:
            self._epoll.unregister(peer.sock)
            peer.open = False

    def _receive(self, peer: Peer) -> tuple[list[str], list[int]] | None:
        if not peer.open:
            return None
        try:
            packet, fds = receive(peer.sock)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # comes once, before what the dead process had still sent
            return self._receive(peer)
        if not packet:
            # It is dead or about to be; the guard's report, or its pidfd, says so.
            self._unwatch(peer)
            peer.kill()
            return None
        return packet.decode().split(" "), fds

    def _tell_guard(self, text: str, fds: Sequence[int] = ()) -> None:
        if self._guard is not None:
            post(self._guard, text, fds)
