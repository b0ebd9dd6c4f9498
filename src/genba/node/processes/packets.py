"""Packets between a node and its guard or zygote, with the file descriptors that go with them."""

from __future__ import annotations

import array
import os
import select
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from genba.node.timing import PEER_SECONDS

_PACKET_BYTES = 4096


@dataclass(slots=True)
class Peer:
    """The guard or the zygote, with its socket."""

    sock: socket.socket
    pid: int = 0
    pidfd: int = -1
    open: bool = True

    def kill(self) -> None:
        if self.pidfd >= 0:
            send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def socketpair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def post(peer: Peer, text: str, fds: Sequence[int]) -> bool:
    """Send one packet; False if the peer is dead, or did not read for so long that it is killed."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    while True:
        try:
            peer.sock.sendmsg([text.encode()], rights)
            return True
        except BlockingIOError:
            poll = select.poll()
            poll.register(peer.sock, select.POLLOUT)
            if not poll.poll(PEER_SECONDS * 1000):
                peer.kill()
                return False
        except (BrokenPipeError, ConnectionResetError):
            return False


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
    packet, ancillary, flags, _ = sock.recvmsg(_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload)
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(
            "this process has no file descriptor left for a worker; raise its limit (ulimit -n)"
        )
    return packet, fds.tolist()


def contents_of(memfd: int) -> bytes:
    with open(memfd, "rb") as contents:
        contents.seek(0)
        return contents.read()


def send_signal(pidfd: int, number: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True
