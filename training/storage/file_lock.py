"""A file that says that somebody is at work here, for as long as they live."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import time
from pathlib import Path
from typing import IO
from weakref import WeakSet

try:
    import fcntl
except ImportError:  # Windows: there an open file cannot be deleted, which serves as the lock
    fcntl = None  # type: ignore[assignment]

__all__ = ["HAS_LOCKS", "LOCK", "hold_lock", "lock", "release_lock", "try_lock"]

# Not the package filelock: its locks belong to a path, and a folder that is built takes its final name while the lock
# in it is held; and its releases before 4 truncate the file of whoever holds the lock, so that nobody could read there
# whether the holder still lives, which is how the fork of a killed process is told from a process at work.
LOCK = ".lock"
HAS_LOCKS = fcntl is not None
_LOG = logging.getLogger("ref2v")
_PATIENCE, _PAUSE = 10.0, 0.02  # seconds that the fork of a dead process has to close what it inherited
_locked: WeakSet[IO[bytes]] = WeakSet()


def hold_lock(path: Path) -> IO[bytes] | None:
    """The file at `path`, locked until `release_lock` or its process ends; None where another process holds it."""
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


def release_lock(file: IO[bytes]) -> None:
    """Unlock and close. Closing alone leaves the lock to a fork that has not yet closed what it inherited."""
    if HAS_LOCKS and not file.closed:
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def try_lock(file: IO[bytes]) -> None:
    """Lock an open file or raise BlockingIOError; on a disk without locks, go on without one and say so in the log."""
    if not HAS_LOCKS:
        return
    try:
        lock(file)
    except BlockingIOError:
        raise
    except OSError as error:
        _LOG.warning(
            "The disk of %s cannot lock files (%s): see to it that no other process works in that folder at the same "
            "time.",
            Path(file.name).parent.name,
            error.strerror or error,
        )


def lock(file: IO[bytes]) -> None:
    """Lock an open file. Raises BlockingIOError where another process holds it, OSError on a disk without locks.

    Loader processes are forks, and have the lock of their parent until they close it. If the parent is killed in that
    moment, the lock is held by nobody who works here: that is waited out.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until or _holder_is_at_work(file):
                raise
            time.sleep(_PAUSE)
    _locked.add(file)
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        # not by the file's buffer, which would try again when it is closed, and fail there
        os.ftruncate(file.fileno(), 0)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        os.write(file.fileno(), f"{os.getpid()} {platform.node()}".encode("utf-8", "replace"))


def _holder_is_at_work(file: IO[bytes]) -> bool:
    """Whether the process that wrote its number into the lock's file lives. Where that cannot be told, it does."""
    try:
        number, _, machine = Path(file.name).read_text(encoding="utf-8").partition(" ")
        process = int(number)
    except (OSError, ValueError):
        return True
    if machine != platform.node():  # another machine or container, on a disk that both use
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's, or no number of a process
    try:
        # "pid (name) state ...": a zombie holds nothing, it only has not been waited for
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (OSError, IndexError):
        return True


def _close_inherited() -> None:
    # A fork inherits the lock with the open file. Loader processes outlive a parent that was killed by seconds, in
    # which the run could not be taken up again.
    for file in list(_locked):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
