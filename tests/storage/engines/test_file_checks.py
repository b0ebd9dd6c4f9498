"""Where a store may be, and what it says when it may not or cannot."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import apsw
import pytest
from tests.storage.builders import a_job, enqueued, one, rows, state, together, transaction
from tests.support import eventually

from genba.errors import BadOption, StoreError, StoreUnreachable
from genba.storage.engines.sqlite import database, drivers, file_checks
from genba.storage.engines.sqlite.write_queue import WriteQueue
from genba.storage.store import open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "genba.db"


def refused(url: str) -> str:
    """What the first call on `url` says."""
    with closing(open_store(url)) as store, pytest.raises(StoreError) as caught:
        store.enqueue([a_job()])
    return str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "mysql://host/db",
        "genba.db",
        "",
        "sqlite://genba.db",
        "sqlite:///a.db?driver=other",
        "sqlite:///a.db?mode=ro",
        "sqlite:///a.db?network=deny",
    ],
)
def test_a_url_that_is_none_is_refused_at_once(url):
    with pytest.raises(BadOption, match="sqlite"):
        open_store(url)


def test_nothing_is_opened_before_the_first_call(path):
    open_store(f"sqlite:///{path}").close()
    open_store("postgresql://nobody@127.0.0.1:1/none").close()

    assert not path.exists()


def test_a_relative_path_is_beside_the_caller(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with closing(open_store("sqlite:///genba.db")) as store:
        monkeypatch.chdir("/")
        one(store)

    assert path.exists()


def test_a_database_in_memory_works_for_all_threads_of_the_process():
    with closing(open_store("sqlite:///:memory:")) as store:
        store.install()
        ids = {made[0].id for made in together(8, lambda _: store.enqueue([a_job()]))}
        assert set(store.states(sorted(ids)).values()) == {"waiting"}
        assert len(ids) == 8


def test_only_the_owner_may_read_the_file(path):
    old = os.umask(0)
    try:
        with closing(open_store(f"sqlite:///{path}")) as store:
            one(store)
            store.node_wakeups.register(1)
            modes = {
                file.name: stat.S_IMODE(file.stat().st_mode)
                for file in path.parent.rglob("*")
                if file.is_file()
            }
            store.node_wakeups.unregister()
    finally:
        os.umask(old)

    assert modes["genba.db"] == 0o600
    assert set(modes.values()) == {0o600}, modes


def test_a_missing_folder_is_named(path):
    assert f"there is no folder {path.parent / 'none'}" in refused(
        f"sqlite:///{path.parent / 'none' / 'genba.db'}"
    )
    assert not (path.parent / "none").exists()


def test_a_folder_is_no_file(path):
    path.mkdir()
    assert "not a file" in refused(f"sqlite:///{path}")


def test_a_file_that_is_no_database_is_left_as_it_is(path):
    path.write_text("dear diary, " * 100)
    assert "not a database" in refused(f"sqlite:///{path}")
    assert path.read_text().startswith("dear diary")


@pytest.mark.parametrize("there", [False, True], ids=["no file", "file"])
def test_a_folder_that_may_not_be_written_is_named(there):
    with TemporaryDirectory() as folder:  # not below pytest's, which no other user may enter
        url = f"sqlite:///{folder}/genba.db"
        if there:
            with closing(open_store(url)) as store:
                one(store)
        os.chmod(folder, 0o555)
        assert "this user may not write there" in as_nobody(url)
        os.chmod(folder, 0o700)


def as_nobody(url: str) -> str:
    """Return the error that a user without root's rights gets."""
    store = open_store(url)
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            store.states([1])
        except StoreUnreachable as error:
            os.write(into, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(into)
    with open(out) as answer:
        return answer.read()


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"])
def test_a_network_file_system_is_refused(path, monkeypatch, kind):
    mounts = path.parent / "mounts"
    local = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
    mounts.write_text(f"{local}2 1 0:5 / {path.parent} rw shared:1 - {kind} server:/export rw\n")
    monkeypatch.setattr(file_checks, "MOUNTS", mounts)

    assert f"on a {kind} file system" in refused(f"sqlite:///{path}")
    assert not path.exists()
    with closing(open_store(f"sqlite:///{path}?network=allow")) as store:
        assert state(store, one(store)) == "waiting"


def test_a_local_file_system_below_a_network_one_is_fine(path, monkeypatch):
    mounts = path.parent / "mounts"
    mounts.write_text(
        f"1 0 0:5 / / rw - nfs4 server:/ rw\n2 1 8:1 / {path.parent} rw - ext4 /dev/sda1 rw\n"
    )
    monkeypatch.setattr(file_checks, "MOUNTS", mounts)

    with closing(open_store(f"sqlite:///{path}")) as store:
        assert state(store, one(store)) == "waiting"


# one SQLite library per file and process


def test_a_file_that_sqlite3_has_open_needs_that_driver(path):
    with closing(sqlite3.connect(path)) as mine:
        mine.execute("CREATE TABLE mine (x)")
        assert "open in this process through sqlite3" in refused(f"sqlite:///{path}")
        with closing(open_store(f"sqlite:///{path}?driver=sqlite3")) as store:
            assert state(store, one(store)) == "waiting"


def test_a_file_that_apsw_has_open_cannot_be_opened_with_sqlite3(path):
    with closing(open_store(f"sqlite:///{path}")) as store:
        one(store)
        assert "open in this process through apsw" in refused(f"sqlite:///{path}?driver=sqlite3")
    with closing(open_store(f"sqlite:///{path}?driver=sqlite3")) as store:  # closed, it is free
        one(store)


def test_a_file_that_the_caller_has_open_with_apsw_is_fine(path):
    with closing(apsw.Connection(str(path))) as mine:
        mine.execute("CREATE TABLE mine (x)")
        with closing(open_store(f"sqlite:///{path}")) as store:
            assert state(store, one(store)) == "waiting"


def test_a_connection_of_the_other_library_is_refused_and_the_driver_named(path):
    with (
        closing(open_store(f"sqlite:///{path}")) as store,
        closing(sqlite3.connect(":memory:")) as conn,
        pytest.raises(StoreError, match=r"driver=sqlite3"),
    ):
        store.enqueue([a_job()], conn=conn)


# many at once


def test_a_writer_that_holds_the_file_too_long_is_an_error_in_words(path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.2)
    url = f"sqlite:///{path}"
    with closing(open_store(url)) as store:
        store.install()
        with transaction(url) as conn:
            with pytest.raises(StoreUnreachable, match="locked"):
                store.enqueue([a_job()])
            conn.execute("ROLLBACK")
        assert state(store, one(store)) == "waiting"


def test_the_next_writer_waits_for_a_process_that_has_the_turn(path):
    url = f"sqlite:///{path}"
    holds = f"""
import fcntl, os, sys, time
fd = os.open({f"{path}-turn"!r}, os.O_RDWR)
fcntl.lockf(fd, fcntl.LOCK_EX)
print("mine", flush=True)
sys.stdin.read()
"""
    with closing(open_store(url)) as store:
        store.install()
        with subprocess.Popen(
            [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout
            other.stdout.readline()

            def act(i: int) -> list[int]:
                if i:
                    return enqueued(store, 1)
                other.kill()  # a dead holder's turn goes on at once
                return []

            began = time.monotonic()
            made = together(4, act)
            assert time.monotonic() - began < 9  # a living holder is waited for 10 s
        assert sum(map(len, made)) == 3


@contextmanager
def another_has_the_turn(path):
    """A process, which has it until it is killed."""
    hold = "import fcntl, os, sys; fcntl.lockf(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX); print(flush=True)"
    command = [sys.executable, "-c", f"{hold}; sys.stdin.read()", f"{path}-turn"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        yield other
        other.kill()


def another_waits(path) -> bool:
    """In the kernel's queue."""
    inode = f":{os.stat(f'{path}-turn').st_ino}"
    return any(
        "->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()
    )


def _kill_when(other, happened) -> None:
    eventually(happened)
    other.kill()


def waiting_thread() -> int | None:
    return next(
        (thread.native_id for thread in threading.enumerate() if thread.name == "genba-turn"), None
    )


def test_one_thread_waits_for_all_turns_that_come_soon_and_ends_after_the_last(path, monkeypatch):
    eventually(lambda: waiting_thread() is None)  # that of a test before
    turns, seen = WriteQueue.of(path), set()
    for rest in (60.0, 60.0, 0.01):
        monkeypatch.setattr("genba.storage.engines.sqlite.write_queue.IDLE_SECONDS", rest)
        with another_has_the_turn(path) as other, ThreadPoolExecutor(1) as pool:
            pool.submit(_kill_when, other, lambda: another_waits(path))
            turns.acquire(10)
            seen.add(waiting_thread())
            turns.release()

    assert len(seen) == 1
    eventually(lambda: waiting_thread() is None)


def test_a_writer_that_waits_too_long_gets_the_pid_of_the_holder_and_no_turn_later(path):
    turns = WriteQueue.of(path)
    with another_has_the_turn(path) as other, pytest.raises(StoreUnreachable, match=str(other.pid)):
        turns.acquire(0.1)

    turns.acquire(10)
    turns.release()


def test_a_writer_stopped_while_it_waits_for_the_turn_does_not_keep_it_when_it_comes(path):
    """The worker of a cancelled job lives on; while it had the turn, no other process could write."""

    class Stop(BaseException):
        pass

    def stop(*_: object) -> None:
        raise Stop

    turns = WriteQueue.of(path)
    with another_has_the_turn(path) as other:
        before = signal.signal(signal.SIGALRM, stop)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Stop):
                turns.acquire(10)
        finally:
            signal.signal(signal.SIGALRM, before)
        other.kill()

    turns.acquire(10)
    turns.release()


def test_a_child_process_uses_connections_of_its_own(store):
    id = one(store)
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            made = one(store)
            assert state(store, id) == "waiting"
            store.write_marker()
            os.write(into, str(made).encode())
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    made = int(os.read(out, 100))
    os.close(out)
    os.close(into)

    mine = one(store)
    assert len({id, made, mine}) == 3
    assert set(store.states([id, made, mine]).values()) == {"waiting"}


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_poll_sees_whether_anything_was_written(store, url):
    one(store)
    before = store.write_marker()

    assert store.write_marker() == before
    store.job(1)
    assert store.write_marker() == before
    one(store)
    after = store.write_marker()
    assert after != before
    with closing(open_store(url)) as other:
        one(other)
    assert store.write_marker() not in (before, after)


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_a_dead_nodes_bell_costs_nothing(store, tmp_path):
    """Its socket stays where it was; each ring fails, and must leave nothing open."""
    folder = tmp_path / "genba.db-nodes"
    folder.mkdir()
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as bell:
        bell.bind(str(folder / "1.sock"))
    one(store)
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(20):
        one(store)

    assert len(os.listdir("/proc/self/fd")) == before


# PostgreSQL that is not there


def test_a_server_that_does_not_answer_is_named_without_the_password():
    url = "postgresql://me:s3cret@127.0.0.1:1/shop"
    with closing(open_store(url)) as store, pytest.raises(StoreUnreachable) as caught:
        store.enqueue([a_job()])

    assert "cannot reach postgresql://me:***@127.0.0.1:1/shop" in str(caught.value)
    assert "s3cret" not in f"{caught.value!r} {caught.value.__cause__!r}"


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_a_database_that_does_not_exist_is_named(url, engine):
    missing = url.replace("/genba_test_", "/no_such_")
    assert "does not exist" in refused(missing)


@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_what_is_in_use_when_the_store_is_closed_is_closed_after_its_use(store, url):
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with store._db.statement():
        store.close()
        assert rows(url, others) == [(1,)]
    eventually(lambda: rows(url, others) == [(0,)])


@pytest.mark.parametrize(
    ("version", "times"), [("3.40.1", 1), ("3.51.2", 1), ("3.51.3", 0), ("3.50.7", 0)]
)
def test_of_a_sqlite_that_may_corrupt_the_file_is_warned_once(
    path, caplog, monkeypatch, version, times
):
    """FAULTS row 27: that of Python, where a process has asked for it; apsw brings a sound one."""
    drivers.warn_of_wal_reset_bug.cache_clear()
    monkeypatch.setattr(sqlite3, "sqlite_version", version)

    for _ in "ab":
        with closing(open_store(f"sqlite:///{path}?driver=sqlite3")) as store:
            one(store)

    reported = [
        record.getMessage()
        for record in caplog.records
        if "may corrupt a file" in record.getMessage()
    ]
    assert len(reported) == times
    assert all(f"SQLite {version} " in text and "apsw" in text for text in reported)


def test_the_sqlite_that_is_used_without_asking_is_sound(path, caplog):
    drivers.warn_of_wal_reset_bug.cache_clear()
    with closing(open_store(f"sqlite:///{path}")) as store:
        one(store)

    assert not drivers.has_wal_reset_bug(tuple(map(int, apsw.sqlite_lib_version().split("."))))
    assert caplog.records == []


def test_the_search_for_the_writer_reads_all_locks_of_the_machine_only_if_we_are_held_up(
    path, monkeypatch
):
    """While they are read no process can take one, for some 15 ms."""
    read: list[Path] = []
    monkeypatch.setattr(database, "lock_holder", lambda path, *of: read.append(path))
    with closing(open_store(f"sqlite:///{path}")) as store:
        for _ in range(3):
            one(store)
            assert store.writer() is None
        with store._db.transaction():
            assert store.writer() is None  # it may be over in a moment
            assert read == []
            store.writer()
            assert read
        read.clear()
        take = f"WriteQueue.of(Path({str(path)!r})).acquire(9)"
        imports = (
            "import sys\nfrom pathlib import Path\n"
            "from genba.storage.engines.sqlite.write_queue import WriteQueue"
        )
        code = f"{imports}\n{take}\nprint(1, flush=True)\nsys.stdin.read()"
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline()
            found = store.writer()
            assert found is not None
            assert (found.pid, found.stopped) == (other.pid, False)
            assert read == []
            assert other.stdin is not None
            other.stdin.close()
