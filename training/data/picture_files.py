"""What lies under a folder of pictures: the pictures by name, their captions, and what is left over."""

from __future__ import annotations

import os
import stat
import unicodedata
from functools import partial
from pathlib import Path

from ..errors import BadInput
from .pictures import SUFFIXES

CAPTION_SUFFIXES = (".txt", ".caption")  # of two beside one picture the first counts
_SYSTEM_FILES = {"thumbs.db", "ehthumbs.db", "desktop.ini"}
_MOST_CAPTION_BYTES = 1 << 20
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # the marks that it begins with


class PictureFiles:
    """The pictures under `folder` by name, each with the file and the caption that belong to it.

    A name is the path below the folder with forward slashes, in an order that no locale changes. It can be written into
    any file or log: see `plain_text`; `path` gives the file that is meant. Hidden files and folders are left out (macOS
    puts a `._name.png` beside each picture on foreign disks).

    `orphan_captions`: captions that belong to no picture. `left_out`: everything else that is not used, kind -> names.

    Raises BadInput when the folder is missing or holds no picture.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.left_out: dict[str, list[str]] = {}
        if not self.folder.is_dir():
            raise BadInput(f"There is no picture folder {plain_text(self.folder.name)}.")
        self._paths: dict[str, str] = {}
        captions: dict[str, list[str]] = {}
        for path in self._walk():
            name = plain_text(path)
            suffix = _suffix(name)
            if name in self._paths:
                self._leave_out("names that read like another's", name)
                continue
            if suffix in SUFFIXES:
                self._paths[name] = path
            elif suffix in CAPTION_SUFFIXES:
                self._paths[name] = path
                captions.setdefault(match_key(name), []).append(name)
            elif os.path.basename(path).lower() not in _SYSTEM_FILES:
                self._leave_out(suffix or "files without an ending", name)
        self.names = sorted(name for name in self._paths if _suffix(name) in SUFFIXES)
        if not self.names:
            kinds = ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))
            found = f"; it holds {left_out_text(self.left_out)}" if self.left_out else ""
            raise BadInput(f"The folder {plain_text(self.folder.name)} holds no picture ({kinds}){found}.")
        self._captions: dict[str, str] = {}
        for name in self.names:
            beside = captions.get(match_key(name))
            if beside:
                self._captions[name] = min(beside, key=partial(_caption_order, picture=name))
        used, keys = set(self._captions.values()), {match_key(name) for name in self.names}
        self.orphan_captions = []
        for key, beside in captions.items():
            for caption in beside:
                if key not in keys:
                    self.orphan_captions.append(caption)
                elif caption not in used:
                    self._leave_out("captions beside another one", caption)
        self.orphan_captions.sort()

    def path(self, name: str) -> Path:
        """The file of a picture or caption."""
        return self.folder / self._paths[name]

    def caption_name(self, name: str) -> str | None:
        """Name of the caption file of a picture, or None."""
        return self._captions.get(name)

    def _walk(self) -> list[str]:
        """Paths of all files below the folder, sorted. Links to folders are not followed: they may lead in a circle."""
        found = []
        cannot = lambda error: self._leave_out("folders that cannot be opened", self._below(error.filename))  # noqa: E731
        for parent, folders, files in os.walk(self.folder, onerror=cannot):
            here = Path(parent).relative_to(self.folder)
            for name in [name for name in folders if os.path.islink(os.path.join(parent, name))]:
                if not name.startswith("."):
                    self._leave_out("links to folders", plain_text((here / name).as_posix()))
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if name.startswith("."):
                    continue
                path = (here / name).as_posix()
                if _is_file_or_link(os.path.join(parent, name)):
                    found.append(path)
                else:
                    self._leave_out("pipes and devices", plain_text(path))
        return sorted(found)

    def _below(self, path: str) -> str:
        return plain_text(os.path.relpath(path, self.folder))

    def _leave_out(self, kind: str, name: str) -> None:
        self.left_out.setdefault(kind, []).append(name)


def list_pictures(folder: str | Path) -> list[str]:
    """Names of all pictures under `folder`, as `PictureFiles` has them. Raises BadInput when there are none."""
    return PictureFiles(folder).names


def left_out_text(left_out: dict[str, list[str]], most: int = 3) -> str:
    """{".heic": ["a.heic", "b.heic"]} -> ".heic: 2 (a.heic, b.heic)", by kind, with `most` names of each."""
    parts = []
    for kind, names in sorted(left_out.items()):
        shown = ", ".join(sorted(names)[:most]) + (", ..." if len(names) > most else "")
        parts.append(f"{kind}: {len(names)} ({shown})")
    return "; ".join(parts)


def plain_text(path: str) -> str:
    """A path as text that every file, log and page takes: on one line, and valid Unicode.

    Names are bytes on Linux. Those that are no UTF-8 (an archive from a Japanese or Chinese Windows has such) are
    written \\xNN, and so is what would break a line. Every other name is its own text, letter for letter.
    """
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if unicodedata.category(c) not in ("Cc", "Zl", "Zp") else _escaped(c) for c in text)


def match_key(name: str) -> str:
    """What files of one stem share, whatever their endings: macOS writes an accent apart from its letter (NFD), other
    systems as one with it (NFC), and both look alike."""
    return unicodedata.normalize("NFC", os.path.splitext(name)[0])


def read_caption(path: str | Path, name: str | None = None) -> str:
    """The text of a caption file, without outer blanks: UTF-8, or UTF-16 with its byte-order mark.

    name: what the error sentences call the file; its own name by default.

    Raises:
        BadInput: it cannot be read, is no text, or is longer than 1 MiB.
    """
    name = name or Path(path).name
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_CAPTION_BYTES + 1)
    except OSError as error:
        raise BadInput(f"The caption {name} cannot be read: {error.strerror}.") from error
    if len(data) > _MOST_CAPTION_BYTES:
        raise BadInput(f"The caption {name} has more than {_MOST_CAPTION_BYTES} bytes: that is no caption.")
    try:
        text = data.decode("utf-16" if data.startswith(_UTF_16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"The caption {name} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from None
    if "\0" in text:
        raise BadInput(f"The caption {name} is not UTF-8 text (it holds zero bytes): save it as UTF-8.")
    return text.strip()


def _caption_order(caption: str, picture: str) -> tuple:
    """Sorted by: .txt, then .caption; the very stem, then one that looks alike; small letters, then capitals."""
    suffix = os.path.splitext(caption)[1]
    other_stem = os.path.splitext(caption)[0] != os.path.splitext(picture)[0]
    return CAPTION_SUFFIXES.index(suffix.lower()), other_stem, suffix != suffix.lower(), caption


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_file_or_link(path: str) -> bool:
    """Where a link leads is asked by whoever opens it: to ask here would tell what lies outside."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())
