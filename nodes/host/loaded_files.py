"""Models read from files by nodes of ours: one object for all that is made of a file, for as long as that is in use."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from pathlib import Path
from typing import Any

__all__ = ["FileVersion", "LoadedFiles", "version_of"]

FileVersion = tuple[str, int, int]
"""A file as it was read: path, size, time of change in ns."""


def version_of(path: str | Path) -> FileVersion:
    """OSError where there is no such file."""
    stat = Path(path).stat()
    return str(path), stat.st_size, stat.st_mtime_ns


class LoadedFiles:
    """What was read from each version of a file, and what was made of it with which settings; none is kept alive.

    The host drops the output of a node whose input changed before it runs the node again. So when it asks whether that
    output may be used again (`fingerprint_inputs`), what was read of a file that is about to be asked for with other
    settings is held until it is: without this a move of a slider would read and check the file anew.
    """

    def __init__(self) -> None:
        self._read: weakref.WeakValueDictionary[FileVersion, Any] = weakref.WeakValueDictionary()
        self._made: dict[FileVersion, weakref.WeakValueDictionary[Hashable, Any]] = {}
        self._held: Any = None

    def find(self, version: FileVersion) -> Any:
        """What was read of that very file, where it still lives, else None. It is held no longer."""
        read = self._read.get(version)
        self._held = None
        return read

    def add(self, version: FileVersion, read: Any) -> None:
        """`read`: what was read of the file, without anything of other nodes."""
        self._read[version] = read

    def note_made(self, version: FileVersion, settings: Hashable, made: Any) -> None:
        """`made`, which the graph goes on with, was made with `settings` of what was read."""
        for gone in self._made.keys() - self._read.keys():
            del self._made[gone]
        self._made.setdefault(version, weakref.WeakValueDictionary())[settings] = made

    def hold_for(self, version: FileVersion, settings: Hashable) -> None:
        """The file is about to be asked for with `settings`."""
        read = self._read.get(version)
        if read is not None and settings not in self._made.get(version, (settings,)):
            self._held = read
