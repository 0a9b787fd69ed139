"""Small files that are whole or not there: written beside, synced, then renamed; and the SHA-256 of any."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PATIENCE, _PAUSE = 5.0, 0.05  # seconds; a virus scanner or an indexer lets go of a file in less


def beside_of(path: Path, mark: str = "") -> Path:
    """Where a file is written before it takes its name; a kill may leave it there."""
    return path.with_name(f"{path.name}{mark}.partial")


@contextlib.contextmanager
def whole_file(path: Path, *, mark: str = "", sync: bool = True) -> Iterator[Path]:
    """Within the block, write the file that it gives; at the end that one is synced and takes the name `path`.

    Whatever is raised leaves what was there before, and only a kill leaves the file beside it. mark: a part of that
    one's name, where several processes may write the same file. sync: False where a file that is lost or cut short by
    a power cut is noticed and made anew.
    """
    beside = beside_of(path, mark)
    try:
        yield beside
        if sync:
            sync_file(beside)
        replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` in one step of the file system. OSError leaves what was there before."""
    with whole_file(path) as beside:
        if isinstance(content, str):
            beside.write_text(content, encoding="utf-8")
        else:
            beside.write_bytes(content)


def replace(source: Path, target: Path) -> None:
    """Give a file or folder its final name, as `os.replace`; OSError where that is not possible.

    On Windows, and on disks shared by it, a file cannot be renamed while a virus scanner, an indexer or a viewer has it
    open, which most often is over in a moment: that is waited for.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError as error:
            held = error.errno == errno.EACCES and os.access(target.parent, os.W_OK)
            if not held or time.monotonic() > until:
                raise
            time.sleep(_PAUSE)


def sync_file(path: Path) -> None:
    """Wait until a file's bytes are on the disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename itself durable, where the system can: Windows and some network disks sync no folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sha256_file(path: str | Path) -> str:
    """SHA-256 (hex) of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
