"""What a dataset is made of, as one hash: the same recipe gives the same tensors, so its folder is named by it."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from ....training.data.index import INDEX
from ....training.data.picture_files import CAPTION_SUFFIXES
from ....training.data.pictures import SUFFIXES
from ..paths import dataset_folder

__all__ = ["RECIPE_VERSION", "built_datasets", "count_build", "folder_state", "recipe_hash"]

RECIPE_VERSION = 1  # goes up when the same inputs would give other tensors (another resampling, another split)
_built: Counter[str] = Counter()


def recipe_hash(recipe: dict[str, Any]) -> str:
    """Ten hex digits over everything that the pairs depend on (plain JSON values)."""
    text = json.dumps({"version": RECIPE_VERSION, **recipe}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def folder_state(folder: Path) -> str:
    """Digest of the names, sizes and times of the pictures and captions under a folder.

    The time of the entry's last change (ctime) is among them, since tools that keep the other one (rsync, archives) can
    put an edited picture of the same size in its place.

    Cheap enough to ask at every prompt; it decides whether a node runs again, while the recipe looks at the contents.
    """
    digest = hashlib.sha256()
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in SUFFIXES.union(CAPTION_SUFFIXES):
                path = os.path.join(parent, name)
                try:
                    status = os.stat(path)
                except OSError:
                    continue
                times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
                digest.update(f"{path}\0{status.st_size}\0{times}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def built_datasets(name: str) -> list[str]:
    """The finished datasets of this name, one line each that changes with any file in it; for `fingerprint_inputs`.

    The last line counts how often this process has built one. Without it a dataset that was built and then deleted
    would look to the host like the time before, and it would hand out the path of nothing from its cache.
    """
    lines = []
    name = dataset_folder(name).name
    for index in sorted(dataset_folder(name).parent.glob(f"{glob.escape(name)}-*/{INDEX}")):
        if not re.fullmatch(r"[0-9a-f]{10}", index.parent.name.removeprefix(f"{name}-")):
            continue  # of another name that begins with this one, such as "a-b" beside "a"
        files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(index.parent.iterdir())]
        lines.append(f"{index.parent.name} {files}")
    return [*lines, str(_built[name])]


def count_build(name: str) -> None:
    """Remember that a dataset of this name was built."""
    _built[dataset_folder(name).name] += 1
