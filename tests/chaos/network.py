"""The way to a PostgreSQL: a proxy that can stall, behind a router that can drop everything without a word."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

_libc = ctypes.CDLL(None, use_errno=True)


class Proxy:
    """Passes bytes on, both ways, until `stall`: then it takes them, as a kernel does, and keeps them."""

    def __init__(self, url: str, listening: socket.socket | None = None) -> None:
        parts = urlsplit(url)
        asked = parse_qs(parts.query)
        self._target = f"{asked['host'][0]}/.s.PGSQL.{asked.get('port', ['5432'])[0]}"
        self._listening = listening or socket.create_server(("127.0.0.1", 0))
        host, port = self._listening.getsockname()[:2]
        self.url = f"postgresql://{parts.username or 'postgres'}@{host}:{port}{parts.path}"
        self._stalled = threading.Event()
        self._refusing, self._forgetting = threading.Event(), threading.Event()
        self._forgotten: list[socket.socket] = []
        self._ended = False
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def stall(self) -> None:
        self._stalled.set()

    def flow(self) -> None:
        self._stalled.clear()

    def refuse(self) -> None:
        """As if the server was gone: what is open is closed, and no new connection is accepted."""
        self._refusing.set()

    def admit(self) -> None:
        self._refusing.clear()

    def forget(self) -> None:
        """What is open now passes nothing on any more, and stays open; others may come."""
        self._forgetting.set()

    def _run(self) -> None:
        while not self._ended:
            self._let_go()
            ready, _, _ = select.select([self._listening, *self._pairs], [], [], 0.05)
            for one in ready:
                if one is self._listening:
                    self._accept()
                elif one in self._pairs and not self._stalled.is_set():
                    self._pass_on(one)
            if self._stalled.is_set():
                time.sleep(0.02)

    def _let_go(self) -> None:
        if self._refusing.is_set():
            for end in self._pairs:
                end.close()
            self._pairs = {}
        if self._forgetting.is_set():
            self._forgetting.clear()
            self._forgotten += self._pairs
            self._pairs = {}

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        if self._refusing.is_set():
            client.close()
            return
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self._target)
        except OSError:  # nothing listens
            client.close()
            server.close()
        else:
            self._pairs[client], self._pairs[server] = server, client

    def _pass_on(self, one: socket.socket) -> None:
        other = self._pairs[one]
        try:
            data = one.recv(1 << 16)
            if data:
                other.sendall(data)
                return
        except OSError:
            pass
        for end in (one, other):
            self._pairs.pop(end, None)
            end.close()

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        for end in (self._listening, *self._pairs, *self._forgotten):
            end.close()


def no_network_of_our_own() -> str:
    """Why there is none; empty if we may make one."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip (iproute2)"
    with suppress(subprocess.CalledProcessError):
        name = f"genba-{uuid.uuid4().hex[:8]}"
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
        return ""
    return "network namespaces cannot be made here"


class Network:
    """Two places with a router between them, apart from the machine's own network."""

    SERVER = "10.77.1.1"

    def __init__(self) -> None:
        mark = uuid.uuid4().hex[:8]
        self._places = {place: f"genba-{mark}-{place}" for place in ("node", "router", "server")}
        for name in self._places.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        self._wire("server", 1)
        self._wire("node", 2)
        self.heal()

    def _wire(self, place: str, net: int) -> None:
        here, router = self._places[place], self._places["router"]
        _ip(
            "link",
            "add",
            "way",
            "netns",
            here,
            "type",
            "veth",
            "peer",
            "name",
            place,
            "netns",
            router,
        )
        for where, link, host in ((here, "way", 1), (router, place, 254)):
            _ip("-n", where, "address", "add", f"10.77.{net}.{host}/24", "dev", link)
            _ip("-n", where, "link", "set", link, "up")
        _ip("-n", here, "route", "add", "default", "via", f"10.77.{net}.254")

    def cut(self) -> None:
        """Drop everything silently."""
        self._forward("0")

    def heal(self) -> None:
        self._forward("1")

    def _forward(self, word: str) -> None:
        with self._inside("router"):
            Path("/proc/sys/net/ipv4/ip_forward").write_text(word)

    def at_node(self) -> AbstractContextManager[None]:
        """What is started inside of it lives at the node's end."""
        return self._inside("node")

    def listen(self) -> socket.socket:
        with self._inside("server"):
            return socket.create_server((self.SERVER, 0))

    @contextmanager
    def _inside(self, place: str) -> Iterator[None]:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self._places[place]}", os.O_RDONLY)
        try:
            _enter(there)
            try:
                yield
            finally:
                _enter(home)
        finally:
            os.close(home)
            os.close(there)

    def close(self) -> None:
        for name in self._places.values():
            _ip("netns", "delete", name)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, 0x40000000):  # CLONE_NEWNET, of this thread alone
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> Any:
    return subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)
