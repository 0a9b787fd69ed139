"""What a dataset is made of, as one hash: the same recipe gives the same tensors, so its folder is named by it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ....training.data.index import INDEX
from ....training.data.pictures import SUFFIXES
from ..paths import dataset_folder

__all__ = ["RECIPE_VERSION", "built_datasets", "folder_state", "recipe_hash"]

RECIPE_VERSION = 1  # goes up when the same inputs would give other tensors (another resampling, another split)


def recipe_hash(recipe: dict[str, Any]) -> str:
    """Ten hex digits over everything that the pairs depend on (plain JSON values)."""
    text = json.dumps({"version": RECIPE_VERSION, **recipe}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def folder_state(folder: Path) -> str:
    """Digest of the names, sizes and times of the pictures and captions under a folder.

    Cheap enough to ask at every prompt; it decides whether a node runs again, while the recipe looks at the contents.
    """
    digest = hashlib.sha256()
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in SUFFIXES | {".txt"}:
                path = os.path.join(parent, name)
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def built_datasets(name: str) -> list[str]:
    """The finished datasets of this name, as "folder time" lines; a deleted one must be built again."""
    indexes = dataset_folder(name).parent.glob(f"{name.strip()}-*/{INDEX}")
    return sorted(f"{index.parent.name} {index.stat().st_mtime_ns}" for index in indexes)
