"""A file that says that somebody is at work here, for as long as they live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO
from weakref import WeakSet

try:
    import fcntl
except ImportError:  # Windows: there an open file cannot be deleted, which serves as the lock
    fcntl = None

__all__ = ["HAS_LOCKS", "LOCK", "hold_lock", "lock", "try_lock"]

LOCK = ".lock"
HAS_LOCKS = fcntl is not None
_locked: WeakSet[IO[bytes]] = WeakSet()


def hold_lock(path: Path) -> IO[bytes] | None:
    """The file at `path`, locked until it is closed or its process ends; None where another process holds it."""
    try:
        if not HAS_LOCKS:
            path.unlink(missing_ok=True)  # fails while another process has it open
        file = open(path, "ab")  # noqa: SIM115 (stays open as long as it is held)
    except PermissionError:
        if not HAS_LOCKS and path.exists():
            return None
        raise
    try:
        try_lock(file)
    except BlockingIOError:
        file.close()
        return None
    return file


def try_lock(file: IO[bytes]) -> None:
    """Lock an open file or raise BlockingIOError; on a disk or a system without locks, go on without one."""
    if not HAS_LOCKS:
        return
    try:
        lock(file)
    except BlockingIOError:
        raise
    except OSError:
        pass


def lock(file: IO[bytes]) -> None:
    """Lock an open file. Raises BlockingIOError where another process holds it, OSError on a disk without locks."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _locked.add(file)


def _close_inherited() -> None:
    # A fork inherits the lock with the open file. Loader processes outlive a parent that was killed by seconds, in
    # which the run could not be taken up again.
    for file in list(_locked):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
