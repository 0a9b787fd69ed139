"""Which shards were read through and found whole, so that the next start need not do it again.

The word is kept in a cache of the user's, `$REF2V_CACHE` or ~/.cache/ref2v, and not in the dataset's folder, which
holds no clock. It counts as long as a file has the size and the times (of its content and of its entry) that it had.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from ..storage.files import write_whole

__all__ = ["CACHE", "is_verified", "remember_verified"]

CACHE = "REF2V_CACHE"
_MARGIN = 2 * 10**9  # ns: a file changed again so soon could have the time that it had, where a disk's clock is coarse


def is_verified(folder: Path, shards: Iterable[tuple[str, str]]) -> set[str]:
    """Those of the shards (name, SHA-256) of a dataset that are known to be whole. One that cannot be asked is not."""
    known = _read(folder)
    return {name for name, sha256 in shards if name in known and known[name] == [sha256, *_state(folder / name)]}


def remember_verified(folder: Path, shards: Iterable[tuple[str, str]]) -> None:
    """Remember that the shards (name, SHA-256) are whole, as they lie there now. Where nothing can be written, the next
    start reads them once more."""
    known, now = _read(folder), time.time_ns()
    for name, sha256 in shards:
        state = _state(folder / name)
        if state and max(state[1:]) < now - _MARGIN:
            known[name] = [sha256, *state]
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(known, indent=0))


def _state(path: Path) -> list[int]:
    """Size, time of the content, time of the entry (tools that copy a time cannot copy this one)."""
    try:
        status = path.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read(folder: Path) -> dict[str, list]:
    try:
        known = json.loads(_path(folder).read_bytes())
    except (OSError, ValueError, RuntimeError):
        return {}
    return known if isinstance(known, dict) else {}


def _path(folder: Path) -> Path:
    """RuntimeError where the user has no home."""
    cache = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "ref2v")
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache / "verified" / f"{name}.json"
