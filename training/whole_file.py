"""Small text files that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step of the file system. OSError leaves what was there before."""
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
