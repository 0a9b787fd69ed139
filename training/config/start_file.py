"""The file that a run starts from, as far as the run's identity goes: its content, wherever it lies."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ..errors import BadInput
from ..storage.files import sha256_file

__all__ = ["start_file_hash"]


def start_file_hash(path: Path) -> str:
    """SHA-256 (hex) of the file, read once as long as its size and time stay. BadInput where it cannot be read."""
    try:
        found = path.stat()
        return _hash(path.absolute(), found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise BadInput(f"refiner.start_from: expected a file, cannot read {path} ({error.strerror}).") from error


@lru_cache(maxsize=16)
def _hash(path: Path, size: int, changed_ns: int) -> str:
    return sha256_file(path)
