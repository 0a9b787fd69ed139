"""Sentences for people without the server's own folders in them: input/, output/ and models/ instead.

Whoever reaches the host's API reads what a node says, and where on the disk the host lies is none of their business.
"""

from __future__ import annotations

import contextlib
import os
import re

import folder_paths

from ...training.errors import BadInput
from .paths import configured_roots, is_inside

__all__ = ["first_line", "for_people"]


def _named_folders() -> dict[str, str]:
    """{absolute folder: what a person calls it}."""
    folders = {
        folder_paths.get_input_directory(): "input",
        folder_paths.get_output_directory(): "output",
        folder_paths.get_temp_directory(): "temp",
        folder_paths.get_user_directory(): "user",
        folder_paths.models_dir: "models",
        folder_paths.base_path: "ComfyUI",
    }
    for kind, (paths, _) in folder_paths.folder_names_and_paths.items():
        for path in paths:
            if not any(is_inside(os.path.abspath(path), os.path.abspath(folder)) for folder in folders):
                folders[path] = f"models/{kind}"
    with contextlib.suppress(BadInput):  # a config file that cannot be read has a sentence of its own
        for root in configured_roots():
            folders.setdefault(root, os.path.basename(os.path.normpath(root)))
    return folders


def for_people(text: str) -> str:
    """`text` with every absolute path into one of the host's folders as input/..., output/..., models/... and so on."""
    named: dict[str, str] = {}
    for folder, word in _named_folders().items():
        for path in (os.path.abspath(folder), os.path.realpath(folder)):
            if os.path.dirname(path) != path:  # the root of a disk is in every path
                named.setdefault(path, word)
    for path in sorted(named, key=len, reverse=True):  # models/refiners before models
        for spelling in {path, path.replace("\\", "\\\\"), path.replace("\\", "/")}:  # as it is, by repr, by others
            whole = rf"(?<![\w.\\/-]){re.escape(spelling)}(?![\w-])"
            text = re.sub(whole, lambda _, word=named[path]: word, text)
    return text


def first_line(error: Exception, most: int = 200) -> str:
    """What an exception of somebody else's code says, short enough (in characters) to stand in a sentence of ours."""
    return (str(error).splitlines() or [type(error).__name__])[0][:most]
