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
    """Where the database is: a path, or None for one in memory."""

    path: Path | None
    driver: str = "apsw"
    allow_network: bool = False


def check_location(place: SqliteLocation, path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise StoreUnreachable(f"cannot open {path}: there is no folder {folder}")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise StoreUnreachable(f"cannot open {path}: it is not a file")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.R_OK | os.W_OK)):
        raise StoreUnreachable(
            f"cannot open {path}: this user may not write there (SQLite needs the folder too)"
        )
    kind = file_system(folder)
    if not place.allow_network and any(
        kind == bad or kind.startswith(bad) for bad in NETWORK_FILE_SYSTEMS
    ):
        raise StoreError(
            f"{path} is on a {kind} file system, where SQLite's locks cannot be trusted. Use a local disk or "
            "PostgreSQL; if you know better, add ?network=allow to the URL"
        )
    if not path.exists():
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return  # another process was quicker; to open and close it now would drop the locks of ours
        except OSError as error:
            raise StoreUnreachable(f"cannot create {path}: {error.strerror}") from error
        return
    owner = _library(path)
    if owner not in (None, place.driver):
        raise StoreError(
            f"{path} is open in this process through {owner}, and two SQLite libraries drop each other's locks. "
            f"Add ?driver={owner} to the URL, so that genba uses the same one"
        )


def _library(path: Path) -> str | None:
    """Which library has the file open in this process: apsw can name its connections, so the rest is sqlite3's."""
    real = os.path.realpath(path)
    try:
        here = any(_link(f"/proc/self/fd/{fd}") == real for fd in os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        here = False
    if not here:
        return None
    apsw = sys.modules.get("apsw")
    return "apsw" if apsw and any(_opens(conn, real) for conn in apsw.connections()) else "sqlite3"


def _opens(conn: Any, real: str) -> bool:
    import apsw

    try:
        return bool(os.path.realpath(conn.filename) == real)
    except (
        apsw.ThreadingViolationError
    ):  # at work in another thread, it cannot be asked: it may well be the one
        return True


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def file_system(folder: Path) -> str:
    """The kind of file system that holds `folder`, as the kernel names it ("" where it cannot be known)."""
    real = os.path.realpath(folder)
    best, kind = "", ""
    try:
        mounts = MOUNTS.read_text()
    except OSError:
        return ""
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind
