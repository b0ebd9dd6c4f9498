"""Where a SQLite database is, and what must be true of that place before SQLite may touch it."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genba.errors import StoreError, StoreUnreachable

NETWORK_FILE_SYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "lustre",
    "gpfs",
    "ceph",
    "glusterfs",
    "afs",
    "fuse.",
)
MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class SqliteLocation:
    """Where the database is."""

    path: Path | None  # None: in memory
    driver: str = "apsw"
    allow_network: bool = False


def check_location(location: SqliteLocation, path: Path) -> None:
    """Check that SQLite may open `path`; create the file if it does not exist."""
    _check_access(path)
    kind = file_system(path.parent)
    if not location.allow_network and any(
        kind == network or kind.startswith(network) for network in NETWORK_FILE_SYSTEMS
    ):
        raise StoreError(
            f"{path} is on a {kind} file system, where SQLite's locks cannot be trusted. Use a "
            "local disk or PostgreSQL; if you know better, add ?network=allow to the URL"
        )
    if not path.exists():
        _create(path)
        return
    library = _library_with_open_file(path)
    if library not in (None, location.driver):
        raise StoreError(
            f"{path} is open in this process through {library}, and two SQLite libraries drop each "
            f"other's locks. Add ?driver={library} to the URL, so that genba uses the same one"
        )


def _check_access(path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise StoreUnreachable(f"cannot open {path}: there is no folder {folder}")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise StoreUnreachable(f"cannot open {path}: it is not a file")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.R_OK | os.W_OK)):
        raise StoreUnreachable(
            f"cannot open {path}: this user may not write there (SQLite needs the folder too)"
        )


def _create(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        # Another process was quicker. Opening and closing the file now would drop our own locks.
        return
    except OSError as error:
        raise StoreUnreachable(f"cannot create {path}: {error.strerror}") from error


def _library_with_open_file(path: Path) -> str | None:
    """Find the library that has the file open in this process.

    apsw can list its connections, so any other open descriptor is sqlite3's.
    """
    real = os.path.realpath(path)
    try:
        is_open = any(_link(f"/proc/self/fd/{fd}") == real for fd in os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        is_open = False
    if not is_open:
        return None
    apsw = sys.modules.get("apsw")
    if apsw and any(_has_opened(conn, real) for conn in apsw.connections()):
        return "apsw"
    return "sqlite3"


def _has_opened(conn: Any, real: str) -> bool:
    import apsw

    try:
        return bool(os.path.realpath(conn.filename) == real)
    except apsw.ThreadingViolationError:
        return True  # busy in another thread, so it cannot tell: it may be this file


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def file_system(folder: Path) -> str:
    """Name the kind of file system that holds `folder`, as the kernel does; "" if unknown."""
    real = os.path.realpath(folder)
    longest, kind = "", ""
    try:
        mounts = MOUNTS.read_text()
    except OSError:
        return ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest):
            longest, kind = point, right.split()[0]
    return kind
