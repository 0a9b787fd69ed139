"""Refiner files that were loaded: one set of weights for all of a file's MODELs, and whether a file was replaced."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

__all__ = ["Stamp", "hold", "known", "linked_changes", "note_linked", "remember", "stamp_of"]

Stamp = tuple[str, int, int]
"""A file as it was read: path, size, time of change in ns."""

_models: weakref.WeakValueDictionary[Stamp, Any] = weakref.WeakValueDictionary()
_extras: dict[Stamp, Any] = {}  # what was read beside a model that lives: small
_held: list[Any] = []  # the model that the prompt at hand is about to ask for again
_linked: dict[str, Stamp] = {}  # files that came through a linked path, as they were loaded
_changes = 0


def stamp_of(path: Path) -> Stamp:
    """OSError where there is no such file."""
    found = path.stat()
    return str(path), found.st_size, found.st_mtime_ns


def known(stamp: Stamp) -> tuple[Any, Any] | None:
    """(MODEL, what was read beside it) where one of that very file still lives. It is held no longer."""
    model = _models.get(stamp)
    _held.clear()
    return None if model is None else (model, _extras[stamp])


def remember(stamp: Stamp, model: Any, extra: Any) -> None:
    """A MODEL without anything of other nodes, for as long as it lives."""
    for gone in _extras.keys() - _models.keys():
        del _extras[gone]
    _models[stamp], _extras[stamp] = model, extra


def hold(stamp: Stamp) -> None:
    """Keep the MODEL of a file alive until `known` is asked.

    The host drops the output of a node whose input changed before it runs the node again; without this a move of a
    slider would read, check and upload the file anew.
    """
    _held[:] = [model for model in (_models.get(stamp),) if model is not None]


def note_linked(stamp: Stamp) -> None:
    """A file was loaded through a linked path, which the host's cache asks for without saying it."""
    _linked[stamp[0]] = stamp


def linked_changes() -> int:
    """How often a file that came through a linked path has changed since it was loaded. It rises once a change."""
    global _changes
    for path, before in _linked.items():
        try:
            now = stamp_of(Path(path))
        except OSError:
            now = (path, -1, -1)
        if now != before:
            _linked[path] = now
            _changes += 1
    return _changes
