"""The power is cut: what was promised, and what was said to be done, is on the disk.

SQLite writes through a file system of ours that keeps what was written apart from what was synced.  Of PostgreSQL all
processes are killed; that its own log is on the disk is PostgreSQL's part, and ours that no session turns it off.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import pytest
from tests.storage.builders import CLAIM, TASK, joined, one, success
from tests.support import eventually, sqlite_url
from tests.support.postgres_server import Server, a_server

from genba.errors import StoreError, StoreUnreachable
from genba.storage.engines.sqlite import database
from genba.storage.store import Store, open_store

SECTOR = 512


class Disk(apsw.VFS):
    """What would be there after a power cut: all that was synced, and whatever part of the rest."""

    def __init__(self) -> None:
        super().__init__("genba-power", "unix")
        self.synced: dict[str, bytearray] = {}
        self.pending: dict[str, list[tuple[int, bytes]]] = {}
        self.written: Callable[[], None] = lambda: None

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802  SQLite's names
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        return Recorded(self, path, name, flags) if path else apsw.VFSFile("unix", name, flags)

    def xDelete(self, name: str, sync: bool) -> None:  # noqa: N802
        super().xDelete(name, sync)
        self.synced.pop(name, None)
        self.pending.pop(name, None)

    def sync(self, path: str) -> None:
        if path in self.pending:  # else it is none of ours: what was left after a cut
            for offset, data in self.pending[path]:
                write(self.synced[path], offset, data)
            self.pending[path].clear()
            self.written()

    def cut(self, chance: random.Random, folder: Path) -> None:
        """The files as the next start of the machine finds them."""
        folder.mkdir()
        for path, synced in self.synced.items():
            file = bytearray(synced)
            for offset, data in self.pending[path]:
                if chance.random() < 0.5:
                    write(file, offset, data[: chance.choice((SECTOR, len(data)))])
            (folder / Path(path).name).write_bytes(file)


class Recorded(apsw.VFSFile):
    def __init__(self, disk: Disk, path: str, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        self._disk, self._path = disk, path
        disk.synced.setdefault(path, bytearray())
        disk.pending.setdefault(path, [])

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        super().xWrite(data, offset)
        self._disk.pending[self._path].append((offset, bytes(data)))
        self._disk.written()

    def xTruncate(self, size: int) -> None:  # noqa: N802
        super().xTruncate(size)
        del self._disk.synced[self._path][size:]

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.sync(self._path)


def write(file: bytearray, offset: int, data: bytes) -> None:
    file.extend(bytes(max(0, offset - len(file))))
    file[offset : offset + len(data)] = data


@pytest.fixture
def disk(monkeypatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(database, "sync_file", disk.sync)
    before = apsw.vfs_names()[0]
    apsw.set_default_vfs("genba-power")
    yield disk
    apsw.set_default_vfs(before)
    disk.unregister()


class Promises(NamedTuple):
    """What others have heard: of jobs that are there, and of jobs that are done."""

    promised: list[int]
    ended: list[int]

    def copy(self) -> Promises:
        return Promises(list(self.promised), list(self.ended))

    def check(self, after: Store) -> None:
        states = after.states(self.promised)
        assert set(self.promised) == states.keys(), "promised, and gone"
        assert {states[id] for id in self.ended} <= {"succeeded"}, "said to be done, and undone"
        assert after.verify().faults == []


def work(store: Store, promises: Promises, jobs: int) -> None:
    for _ in range(jobs):
        promises.promised.append(one(store))
        mine = store.claim(1, CLAIM, {"default": 1}, [TASK])
        promises.ended.extend(store.finish(1, [success(job) for job in mine]))


def test_after_a_power_cut_a_sqlite_file_has_all_that_was_promised(disk, tmp_path):
    chance, promises = random.Random(1), Promises([], [])
    cuts: list[tuple[Path, Promises]] = []
    checked = 0

    def perhaps() -> None:
        if chance.random() < 0.002:
            cuts.append((tmp_path / f"cut-{checked + len(cuts)}", promises.copy()))
            disk.cut(chance, cuts[-1][0])

    with closing(open_store(sqlite_url(tmp_path))) as store:
        joined(store)
        disk.written = perhaps
        for _ in range(12):
            work(store, promises, 50)
            apsw.set_default_vfs("unix")
            for folder, then in cuts:
                with closing(open_store(sqlite_url(folder))) as after:
                    then.check(after)
                shutil.rmtree(folder)
            checked += len(cuts)
            cuts.clear()
            apsw.set_default_vfs("genba-power")

    assert checked > 20
    print(f"{checked} power cuts while {len(promises.promised)} jobs came and ended: nothing lost")


def test_a_reader_that_finds_a_job_finds_it_on_the_disk_too(monkeypatch, tmp_path):
    with closing(open_store(sqlite_url(tmp_path))) as store:
        first = one(store, identity="the same")
        synced: list[str] = []
        monkeypatch.setattr(database, "sync_file", synced.append)

        assert one(store, identity="the same") == first

    assert synced == [f"{tmp_path}/genba.db-wal"]  # its writer may still be waiting for the disk


def test_a_link_to_a_file_elsewhere_leads_to_what_must_be_synced(monkeypatch, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "genba.db").symlink_to(tmp_path / "there" / "genba.db")
    with closing(open_store(f"sqlite:///{tmp_path}/there/genba.db")) as store:
        one(store)
    synced: list[Path] = []
    monkeypatch.setattr(
        os, "fdatasync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}")))
    )

    with closing(open_store(f"sqlite:///{tmp_path}/here/genba.db")) as store:
        one(store)

    assert set(synced) == {tmp_path / "there" / "genba.db-wal"}


def test_a_disk_that_does_not_keep_it_is_said(monkeypatch, tmp_path):
    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with closing(open_store(sqlite_url(tmp_path))) as store:
        one(store)
        monkeypatch.setattr(os, "fdatasync", fail)

        with pytest.raises(
            StoreUnreachable, match=r"genba\.db: Input/output error while syncing the last commit"
        ):
            one(store)
        monkeypatch.undo()
        one(store)  # no lock is left in the way


@pytest.fixture
def server() -> Iterator[Server]:
    with a_server() as server:
        yield server


def test_when_all_of_postgresql_is_killed_it_has_all_that_was_promised(server):
    promises = Promises([], [])
    with closing(open_store(server.url)) as store:
        joined(store)
        with store._db.statement() as tx:
            assert tx.select("SHOW synchronous_commit") == [
                ("on",)
            ]  # as the server has it: no session of ours turns it off
        working = threading.Thread(target=_until_it_fails, args=(store, promises), name="work")
        working.start()
        eventually(lambda: len(promises.ended) > 100, within=60)
        command = server.kill()
        working.join(60)
        server.start(command)
        promises.check(store)
    print(f"all of PostgreSQL was killed after {len(promises.promised)} jobs: nothing lost")


def _until_it_fails(store: Store, promises: Promises) -> None:
    with suppress(StoreError):
        while True:
            work(store, promises, 1)
