"""What a person chooses among refiners and runs: the file that Load Refiner means, a list or the path linked to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....training.errors import BadInput
from ..loaded_files import FileVersion, LoadedFiles, version_of
from ..paths import MODEL_FOLDER, list_refiners, refiner_file, resolve_inside, spellings

__all__ = [
    "GO_ON",
    "LOADED",
    "NO_FILES",
    "START_OVER",
    "choose_refiner",
    "fingerprint_refiner",
    "note_loaded",
    "start_file",
]

LOADED = LoadedFiles()  # the patchers of refiner files, and of each the MODELs by their strength
_linked: dict[str, FileVersion] = {}  # files that came through a linked path, as they were loaded
_changes = 0  # of such files

GO_ON, START_OVER = "reuse or resume", "start over"  # Train Refiner, where a run of that name is there already
NO_FILES = "(no files yet: link a path)"  # an empty list would be drawn as a widget that cannot be clicked


def choose_refiner(name: str, path: str | None) -> Path:
    """The file; BadInput in one sentence when neither names one. `path` wins when it is given."""
    if path is not None:
        file = resolve_inside(path, "the refiner")
        if file.is_dir():
            raise BadInput(f"The refiner must be a file such as refiner.safetensors, but {file} is a folder.")
        return file
    if not isinstance(name, str) or not name.strip() or name == NO_FILES:
        raise BadInput(
            f"No refiner is chosen: link the path of Train Refiner, or put a file into models/{MODEL_FOLDER} and "
            "press R to see it in the list."
        )
    return refiner_file(name)


def start_file(text: str) -> Path:
    """The refiner that a run is to go on from: a name of Load Refiner's list, or a path inside the host's folders."""
    listed = set(list_refiners()).intersection(spellings(text))
    return refiner_file(listed.pop()) if listed else resolve_inside(text, "refiner.start_from")


def fingerprint_refiner(name: str | None, strength: Any, path: str | None) -> str:
    """Changes with the inputs and with the file on disk. Linked inputs are None here.

    So a file behind a linked path is not known here; those that were loaded through one are looked at again.
    """
    try:
        version = version_of(choose_refiner(name or NO_FILES, path))
        LOADED.hold_for(version, strength)
        state: Any = version[1:]
    except (BadInput, OSError) as problem:  # execute will say it
        state = str(problem)
    return repr((name, strength, path, state, _linked_changes() if path is None else 0))


def note_loaded(file: Path, strength: float, model: Any, linked: bool) -> None:
    """What `fingerprint_refiner` goes by: this file was loaded with this strength, as this MODEL.

    `linked`: through a linked path, which the host's cache asks for without saying it.
    """
    version = version_of(file)
    LOADED.note_made(version, strength, model)
    if linked:
        _linked[version[0]] = version


def _linked_changes() -> int:
    """How often a file that came through a linked path has changed since it was loaded. It rises once a change."""
    global _changes
    for path, before in _linked.items():
        try:
            now = version_of(path)
        except OSError:
            now = (path, -1, -1)
        if now != before:
            _linked[path] = now
            _changes += 1
    return _changes
