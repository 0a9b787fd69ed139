"""Small files that are whole or not there: written beside, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def beside_of(path: Path) -> Path:
    """Where a file is written before it takes its name; a kill may leave it there."""
    return path.with_name(path.name + ".partial")


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` in one step of the file system. OSError leaves what was there before."""
    beside = beside_of(path)
    if isinstance(content, str):
        beside.write_text(content, encoding="utf-8")
    else:
        beside.write_bytes(content)
    sync_file(beside)
    os.replace(beside, path)


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
