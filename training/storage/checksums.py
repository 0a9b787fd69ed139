"""Folders with the SHA-256 of each of their files, written last: what has no valid list of them is not whole.

The list is in the format of sha256sum, so that `sha256sum --check SHA256SUMS` says the same as this module.
"""

from __future__ import annotations

import re
from pathlib import Path

from .files import sha256_file, sync_file, sync_folder

CHECKSUMS = "SHA256SUMS"


def write_checksums(folder: Path) -> None:
    """Bring every file of `folder` to the disk, then the list of their hashes. OSError where that fails."""
    lines = []
    for path in sorted(folder.iterdir()):
        sync_file(path)
        lines.append(f"{sha256_file(path)}  {path.name}\n")
    listed = folder / CHECKSUMS
    listed.write_text("".join(lines), encoding="ascii", newline="\n")
    sync_file(listed)
    sync_folder(folder)


def what_is_broken(folder: Path, names: set[str]) -> str | None:
    """Why `folder` is not whole, in a few words; None where the files `names` are all there, bit for bit as written."""
    try:
        text = (folder / CHECKSUMS).read_bytes().decode("ascii", errors="replace")
    except FileNotFoundError:
        return f"it has no {CHECKSUMS}, so it was never finished"
    except OSError as error:
        return f"{CHECKSUMS} cannot be read ({error.strerror})"
    # Nothing but such lines, so that any byte that changed shows
    if not re.fullmatch(r"([0-9a-f]{64}  [A-Za-z0-9._-]+\n)*", text):
        return f"{CHECKSUMS} is damaged"
    sums = {line[66:]: line[:64] for line in text.split("\n") if line}
    if set(sums) != names:
        return f"{CHECKSUMS} is damaged"
    for name in sorted(names):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if sha256_file(path) != sums[name]:
                return f"{name} is damaged: its SHA-256 is not the one in {CHECKSUMS}"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
