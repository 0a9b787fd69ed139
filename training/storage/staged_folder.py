"""A folder that is built under a hidden name and takes its own name only when it is whole."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

from ..errors import BadInput
from .file_lock import HAS_LOCKS, LOCK, lock, release_lock, try_lock
from .files import replace, sync_folder

DISK_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
PROGRESS = ".progress-"  # how files begin that say what is whole in a hidden folder: it may be gone on with
_KEPT_FOR = 7 * 24 * 3600  # seconds that such a folder waits for that


class StagedFolder:
    """`<parent>/.<name>.partial` until `commit()`, `<parent>/<name>` after it, nothing after `discard()`.

    What a killed process left behind is cleared away, under this name or another; a folder that a living one is still
    writing is refused. With `resume` what was left under this name stays, for the caller to go on with; under another
    name it stays for a week where a PROGRESS file says that it could be.

    Raises:
        BadInput: the final folder exists, cannot be made, or is being written by another run.
    """

    def __init__(self, final: str | os.PathLike, *, resume: bool = False):
        self.final = Path(final)
        self.path = self.final.with_name(f".{self.final.name}.partial")
        self._lock = None
        self._refuse_existing()
        try:
            self.final.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"Cannot make the folder {self.final.parent}: {error.strerror or error}.") from error
        try:
            self._clear_abandoned(resume)
            _clear_abandoned_siblings(self.final.parent)
            self.path.mkdir(exist_ok=resume)
            self._lock = open(self.path / LOCK, "wb")  # noqa: SIM115 (stays open while the folder is hidden)
            try_lock(self._lock)
        except (FileExistsError, BlockingIOError):
            raise self._busy() from None
        except OSError as error:
            raise self._sentence(error, "its first file", 0) from error

    def write(self, name: str, data: bytes) -> None:
        """Write one file and wait until it is on the disk. Raises BadInput (disk full, no permission)."""
        try:
            with open(self.path / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._sentence(error, name, len(data)) from error

    def commit(self) -> Path:
        """Give the folder its final name, in one step of the file system."""
        self._refuse_existing()
        try:
            sync_folder(self.path)
            if not HAS_LOCKS:  # Windows renames no folder that has an open file
                self._release(self.path)
            replace(self.path, self.final)
            sync_folder(self.final.parent)
        except OSError as error:
            raise self._sentence(error, "the finished folder", 0) from error
        # On POSIX the lock outlives the rename: without it, another run could take the whole folder for abandoned.
        self._release(self.final)
        return self.final

    def discard(self) -> None:
        """Remove everything that was written. Safe to call twice."""
        self._release(self.path)
        shutil.rmtree(self.path, ignore_errors=True)

    def leave(self) -> None:
        """Leave what was written, under its hidden name, for a later one with `resume`."""
        self._release(self.path)

    def remove_but(self, names: set[str]) -> None:
        """Remove every file but these."""
        for path in self.path.iterdir():
            if path.name not in names and path.name != LOCK:
                path.unlink()

    def _clear_abandoned(self, resume: bool) -> None:
        if not self.path.exists():
            return
        held = self.path / LOCK
        try:
            with open(held, "r+b") as file:
                try_lock(file)
            held.unlink()
        except FileNotFoundError:
            pass
        except (BlockingIOError, PermissionError):
            raise self._busy() from None
        if not resume:
            shutil.rmtree(self.path)

    def _release(self, folder: Path) -> None:
        if self._lock is not None:
            release_lock(self._lock)
            self._lock = None
            (folder / LOCK).unlink(missing_ok=True)

    def _refuse_existing(self) -> None:
        if self.final.exists():
            raise BadInput(f"The folder {self.final} exists already: choose another name, or remove it first.")

    def _busy(self) -> BadInput:
        return BadInput(
            f"The folder {self.final} is being written by another run: wait for it, or choose another name."
        )

    def _sentence(self, error: OSError, name: str, needed: int) -> BadInput:
        if error.errno in DISK_FULL:
            free = shutil.disk_usage(self.final.parent).free
            return BadInput(
                f"The disk that holds {self.final} is full: {name} needs {needed} bytes, and {free} bytes are free."
            )
        return BadInput(f"Cannot write {name} of the folder {self.final}: {error.strerror or error}.")


def aside_name(folder: Path) -> Path:
    """`<name>.previous-N` beside a folder, N the first free number: where it goes to make room for a new one."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.previous-{number}")).exists():
        number += 1
    return aside


def _clear_abandoned_siblings(parent: Path) -> None:
    """Remove what killed processes left under other names. Where it cannot be told whether one lives, it stays."""
    for folder in parent.glob(".*.partial"):
        try:
            if any(time.time() - path.stat().st_mtime < _KEPT_FOR for path in folder.glob(f"{PROGRESS}*")):
                continue
            if not HAS_LOCKS:
                (folder / LOCK).unlink()
            else:
                with open(folder / LOCK, "r+b") as file:
                    lock(file)
        except OSError:  # held, no folder of ours, or a disk without locks
            continue
        shutil.rmtree(folder, ignore_errors=True)
