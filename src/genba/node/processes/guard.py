"""Ends everything below a node when the node dies, misses its beat, or says so.

Run by file path with `python -I -S`, so that it starts in milliseconds and stays small: it must
import nothing outside the standard library.  One thread, no user code, nothing that blocks.

From the node, one ASCII packet each:
    START (+ fd)      start the zygote with this socket as its fd 3
    BEAT micros       end everything at this moment of CLOCK_BOOTTIME; 0: no limit
    KNOW pid parent   a worker, forked by the zygote `parent`; do not kill it
    FORGET pid        it has ended
    SETTLED           every worker of the dead zygote is known now
    SWEEP token       kill all that the zygote and its workers left behind
    END               kill everything and exit
To the node:
    ZYGOTE pid (+ pidfd), ZYGOTE_DIED pid status,
    REAPED pid status user_micros system_micros peak_kb,
    GONE pid (a worker whose status is lost), SWEPT token killed unkillable
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

NODE_FD = 3
MISSED_BEAT = 75  # exit code

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_RESCAN_MS = 20  # deaths wake the guard; this is for processes adopted between two looks
_LONGEST_NAP_MS = 500  # poll() does not count suspended time, the beat does
# They must include wire.STOP_SIGNAL, which the guard cannot import; a test compares the two.
_IGNORED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGPIPE,
)
_HAS_CHILDREN_FILE = os.path.exists("/proc/thread-self/children")


def children(pid: int) -> list[int]:
    """Give the direct children of `pid`, zombies too; none when it is gone."""
    if not _HAS_CHILDREN_FILE:
        return children_by_scan(pid)
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as listing:
                found.extend(map(int, listing.read().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def children_by_scan(pid: int) -> list[int]:
    """Do as `children` on kernels without CONFIG_PROC_CHILDREN, by a look at every process."""
    return [
        other
        for other in map(int, filter(str.isdigit, os.listdir("/proc")))
        if parent_of(other) == pid
    ]


def parent_of(pid: int) -> int | None:
    """Give the parent of `pid`, also of a zombie; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name may contain spaces and parentheses.
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def kill_trees(roots: Iterable[int]) -> tuple[set[int], set[int]]:
    """Send SIGKILL to these processes and all below; gives (killed, not permitted).

    One pass; what is forked meanwhile is found by the next one.  The roots must be children of the
    caller, whose pids cannot be reused before it reaps them.
    """
    killed: set[int] = set()
    refused: set[int] = set()
    tree = list(roots)
    family = {os.getpid(), *tree}
    direct = set(tree)
    for pid in tree:
        for child in children(pid):  # before the kill: afterwards they have another parent
            if child not in family:
                family.add(child)
                tree.append(child)
        try:
            if pid in direct:
                os.kill(pid, signal.SIGKILL)
            elif not _kill_member(pid, family):
                continue
            killed.add(pid)
        except ProcessLookupError:
            continue
        except PermissionError:
            refused.add(pid)
    return killed, refused


def _kill_member(pid: int, family: set[int]) -> bool:
    # Another process reaps this one, so its pid may have been reused; a pidfd opened before
    # the look at its parent is safe.
    pidfd = os.pidfd_open(pid)
    try:
        if parent_of(pid) not in family:
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    finally:
        os.close(pidfd)


class Guard:
    """The loop; `run` gives the exit code once nothing is left below."""

    def __init__(self, node: socket.socket, node_pid: int, command: list[str]) -> None:
        self._node = node
        self._command = command
        self._zygote = 0
        self._known: dict[int, int] = {}  # worker -> the zygote that forked it
        self._settled = True
        self._deadline: int | None = None
        self._sweeping = False
        self._sweeps: list[bytes] = []
        self._killed: set[int] = set()
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self._exit: int | None = None

        self._wake, wake_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(node, select.POLLIN)
        # EOF alone is not enough: a fork of the node may hold its end of the socket open.
        self._node_pid = node_pid
        self._node_pidfd = -1
        try:
            self._node_pidfd = os.pidfd_open(node_pid)
            self._poll.register(self._node_pidfd, select.POLLIN)
        except ProcessLookupError:
            self._exit = 0

    def run(self) -> int:
        try:
            while self._exit is None:
                awake = dict(self._poll.poll(self._nap()))
                self._clear_wake()
                self._reap()
                self._read_commands()
                if self._node_pidfd in awake or os.getppid() != self._node_pid:
                    self._exit = 0
                if self._deadline is not None and _boot_micros() >= self._deadline:
                    self._exit = MISSED_BEAT
                if self._sweeping and self._settled:
                    self._sweep()
                self._flush()
            return self._exit
        finally:
            self._end_all()

    def _nap(self) -> int | None:
        if self._sweeping and self._settled:
            return _RESCAN_MS
        if self._deadline is not None:
            return max(0, min(_LONGEST_NAP_MS, (self._deadline - _boot_micros()) // 1000 + 1))
        return None

    def _clear_wake(self) -> None:
        try:
            while os.read(self._wake, 4096):
                pass
        except BlockingIOError:
            pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._zygote:
                self._zygote_died(status)
            elif self._known.pop(pid, None) is not None or not self._settled:
                user, system = int(usage.ru_utime * 1e6), int(usage.ru_stime * 1e6)
                self._report(f"REAPED {pid} {status} {user} {system} {usage.ru_maxrss}")

    def _zygote_died(self, status: int) -> None:
        dead, self._zygote = self._zygote, 0
        # Its workers, of which the node has not reported all yet, are children of the guard now.
        # A sweep has to wait until all are known.
        self._settled = False
        self._report(f"ZYGOTE_DIED {dead} {status}")
        for pid in [worker for worker, parent in self._known.items() if parent == dead]:
            self._expect(pid)

    def _expect(self, pid: int) -> None:
        # The dead zygote may have reaped this worker without a report; then the guard cannot.
        if parent_of(pid) != os.getpid():
            self._known.pop(pid, None)
            self._report(f"GONE {pid}")

    def _read_commands(self) -> None:
        while self._exit is None:
            try:
                packet, ancillary, _, _ = self._node.recvmsg(
                    4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet, ancillary = b"", []
            if not packet:
                self._exit = 0
                return
            fds = [struct.unpack("i", payload[:4])[0] for _, _, payload in ancillary]
            self._command_is(packet.split(), fds)

    def _command_is(self, words: list[bytes], fds: list[int]) -> None:
        match words:
            case [b"START"]:
                self._start(fds)
            case [b"BEAT", micros]:
                self._deadline = int(micros) or None
            case [b"KNOW", pid, parent]:
                self._known[int(pid)] = int(parent)
                if int(parent) != self._zygote:
                    self._expect(int(pid))
            case [b"FORGET", pid]:
                self._known.pop(int(pid), None)
            case [b"SETTLED"]:
                self._settled = True
                self._sweeping = True
            case [b"SWEEP", token]:
                self._sweeps.append(token)
                self._sweeping = True
            case [b"END"]:
                self._exit = 0

    def _start(self, fds: list[int]) -> None:
        try:
            pid = os.posix_spawn(
                self._command[0],
                self._command,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, fds[0], NODE_FD)],
                setpgroup=0,
                setsigmask=(),
                setsigdef=[*_IGNORED, signal.SIGCHLD],
            )
        except (OSError, IndexError) as error:
            with suppress(OSError):
                os.write(2, f"genba guard: cannot start {self._command[0]}: {error}\n".encode())
            self._settled = False
            self._report(f"ZYGOTE_DIED 0 {127 << 8}")
        else:
            self._zygote = pid
            self._report(f"ZYGOTE {pid}", os.pidfd_open(pid))
        finally:
            for fd in fds:
                os.close(fd)

    def _sweep(self) -> None:
        strays = [
            pid for pid in children(os.getpid()) if pid != self._zygote and pid not in self._known
        ]
        killed, refused = kill_trees(strays)
        self._killed |= killed
        if not refused.issuperset(strays):
            return
        for token in self._sweeps:
            self._report(f"SWEPT {token.decode()} {len(self._killed)} {len(refused)}")
        self._sweeps.clear()
        self._killed.clear()
        self._sweeping = False

    def _end_all(self) -> None:
        while True:
            try:
                while os.wait4(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            below = children(os.getpid())
            _, refused = kill_trees(below)
            if refused.issuperset(below):
                return
            select.select([self._wake], [], [], _RESCAN_MS / 1000)
            self._clear_wake()

    def _report(self, text: str, fd: int | None = None) -> None:
        self._outbox.append((text.encode(), fd))

    def _flush(self) -> None:
        while self._outbox:
            packet, fd = self._outbox[0]
            rights = (
                [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
            )
            try:
                self._node.sendmsg([packet], rights)
            except BlockingIOError:
                break
            except (BrokenPipeError, ConnectionResetError):
                self._exit = 0
            self._outbox.popleft()
            if fd is not None:
                os.close(fd)
        self._poll.modify(self._node, select.POLLIN | (select.POLLOUT if self._outbox else 0))


def _boot_micros() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


def _main(argv: list[str]) -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(NODE_FD + 1, 1 << 16)
    # The two calls are also in linux.py; the guard cannot import it.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) or prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    prctl(_PR_SET_NAME, b"genba-guard", 0, 0, 0)
    os.set_inheritable(NODE_FD, False)
    node = socket.socket(fileno=NODE_FD)
    node.setblocking(False)
    # Not a return: the socket must not be closed before the exit code is set, or the node takes the
    # guard for stuck.
    os._exit(Guard(node, int(argv[1]), argv[2:]).run())


if __name__ == "__main__":
    _main(sys.argv)
