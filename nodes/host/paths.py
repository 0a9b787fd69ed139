"""Where the pack may read and where it writes.

A prompt can come from anyone who reaches the host's API, and some nodes take a path as text. So every such path
must lie inside a folder that the host itself works with, or inside a root that the machine's owner wrote into the
pack's own config file; symbolic links are followed before the check.
"""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import folder_paths

from ...training.errors import BadInput
from ...training.run.layout import ADAPTERS, EARLIER_CHECKPOINTS
from ...training.storage.files import replace
from ...training.storage.staged_folder import aside_name

__all__ = [
    "MODEL_FOLDER",
    "allowed_roots",
    "check_name",
    "config_file",
    "configured_roots",
    "dataset_folder",
    "is_inside",
    "list_refiners",
    "model_file",
    "move_aside",
    "refiner_file",
    "refuse_link_outside",
    "register_model_folder",
    "resolve_inside",
    "run_folder",
    "spellings",
]

MODEL_FOLDER = "refiners"  # models/refiners and output/refiners
_DATASETS = "refiner_datasets"
_WINDOWS_DEVICES = {"con", "prn", "aux", "nul"} | {f"{port}{i}" for port in ("com", "lpt") for i in range(1, 10)}
_LONGEST_NAME = 200  # bytes; file systems allow 255, and ".previous-12" and the like come on top
_IS_WINDOWS = os.name == "nt"
_LONGEST_PATH_ON_WINDOWS = 259  # characters, where longer ones have not been allowed for the whole machine
_LONGEST_IN_RUN = ".previous-12/.checkpoints/.step-00000001.partial-removal/optimizer.safetensors"
_LONGEST_IN_DATASET = "-0123456789.previous-12.partial/context-empty.safetensors"


def register_model_folder() -> None:
    """Make the host list `models/refiners`, and `output/refiners` as it does for its own kinds of model."""
    folder_paths.add_model_folder_path(MODEL_FOLDER, os.path.join(folder_paths.models_dir, MODEL_FOLDER))
    folder_paths.add_model_folder_path(MODEL_FOLDER, os.path.join(folder_paths.get_output_directory(), MODEL_FOLDER))
    paths, _ = folder_paths.folder_names_and_paths[MODEL_FOLDER]
    # The host makes the entry with an empty extension set, which means "list every file".
    folder_paths.folder_names_and_paths[MODEL_FOLDER] = (paths, folder_paths.supported_pt_extensions)


def config_file() -> Path:
    """The file in which the owner of this machine names more roots: {"roots": ["/data/pictures"]}.

    It lies in the host's user folder under a name that the host never serves over HTTP.
    """
    return Path(folder_paths.get_system_user_directory("ref2v")) / "config.json"


def configured_roots() -> list[str]:
    """The roots in `config_file`, absolute; BadInput where it is no list of such."""
    file = config_file()
    if not file.is_file():
        return []
    wanted = f'{file} must be JSON like {{"roots": ["/an/absolute/folder"]}}'
    try:
        roots = json.loads(file.read_text(encoding="utf-8-sig")).get("roots", [])
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{wanted}, and it could not be read: {error}.") from error
    if not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
        raise BadInput(f'{wanted}, and its "roots" is not a list of texts.')
    roots = [os.path.expanduser(root) for root in roots]
    for root in roots:
        if not os.path.isabs(root):
            raise BadInput(f"{wanted}, and the root {root!r} is not absolute.")
    return roots


def allowed_roots() -> list[str]:
    """Absolute folders that a path from a graph may lie in: input, output, temp, model folders, configured roots."""
    roots = [folder_paths.get_input_directory(), folder_paths.get_output_directory()]
    roots += [folder_paths.get_temp_directory(), folder_paths.models_dir]
    for kind, (paths, _) in folder_paths.folder_names_and_paths.items():
        if kind != "custom_nodes":  # code, not models
            roots += paths
    roots += configured_roots()
    return [os.path.abspath(root) for root in roots]


def is_inside(path: str, root: str) -> bool:
    """Whether an absolute path is `root` or lies in it, by its text."""
    path, root = os.path.normcase(path), os.path.normcase(root)
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _text_is_inside(path: str, roots: list[str]) -> bool:
    """Whether the path's text alone lies in a root, before anything on the disk is touched.

    To resolve a path is already to touch it: on Windows \\\\server\\share would send the user's credentials there.
    """
    return any(is_inside(path, root) for root in roots + [os.path.realpath(root) for root in roots])


def _links_stay_inside(path: str, roots: list[str]) -> bool:
    real = os.path.realpath(path)
    return any(is_inside(real, os.path.realpath(root)) for root in roots)


def spellings(path: str) -> list[str]:
    """A path as it is, and with this system's separators: a workflow may come from another one."""
    return list(dict.fromkeys([path, path.replace("/" if os.sep == "\\" else "\\", os.sep)]))


def _candidates(path: str) -> list[str]:
    """Absolute readings of a path: itself, or under input/ or output/, or with the folder's name in front."""
    return list(dict.fromkeys(reading for spelling in spellings(path) for reading in _readings(spelling)))


def _readings(path: str) -> list[str]:
    if os.path.isabs(path):
        return [os.path.abspath(path)]
    named = {
        "input": folder_paths.get_input_directory(),
        "output": folder_paths.get_output_directory(),
        "temp": folder_paths.get_temp_directory(),
        "models": folder_paths.models_dir,
    }
    readings = [os.path.join(named["input"], path), os.path.join(named["output"], path)]
    first, _, rest = path.replace("\\", "/").partition("/")
    if first.lower() in named:  # Output/ is output/ on disks that do not tell them apart, and in workflows from there
        readings.append(os.path.join(named[first.lower()], rest))
    return [os.path.abspath(reading) for reading in readings]


def resolve_inside(path: str, kind: str) -> Path:
    """The existing file or folder that a graph's text means, as an absolute path with links followed.

    `path`: absolute, or relative to input/ or output/ (the first of these that exists), or starting with one of the
    words input/, output/, temp/, models/. `kind` says in the error what was looked for, e.g. "the picture folder".

    Raises BadInput when the text is empty, when it leads outside `allowed_roots()` (whether or not something is
    there: the answer must not tell), or when nothing is there.
    """
    what = kind if "_" in kind else f"{kind[:1].upper()}{kind[1:]}"  # a field keeps its own spelling
    text = str(path).strip().strip('"')
    if not text:
        raise BadInput(f"{what} is not given: its path is empty.")
    if "\0" in text:
        raise BadInput(f"{what} cannot have a zero byte in its path.")
    roots = allowed_roots()
    readings = [reading for reading in _candidates(text) if _text_is_inside(reading, roots)]
    inside = [reading for reading in readings if _links_stay_inside(reading, roots)]
    existing = next((reading for reading in inside if os.path.exists(reading)), None)
    if existing is not None:
        return Path(os.path.realpath(existing))
    if len(inside) < len(readings) or not readings:
        raise BadInput(
            f"{what} must lie inside ComfyUI's input, output, temp or model folders, or inside "
            f'a folder listed under "roots" in {config_file()}; {text!r} does not'
            f"{' (a link in it leads out)' if readings else ''}."
        )
    raise BadInput(f"{what} does not exist: looked for {' and '.join(inside)}.")


def refuse_link_outside(file: Path, name: str) -> None:
    """BadInput when a file of a folder that may be read is itself a link to one that may not."""
    if file.is_symlink() and not _links_stay_inside(str(file), allowed_roots()):
        raise BadInput(
            f"The file {name} is a link that leads out of ComfyUI's folders: copy the file, or list its folder under "
            f'"roots" in {config_file()}.'
        )


def check_name(name: str, what: str) -> str:
    """`name` without surrounding space, if it can be a folder's name on every system; else BadInput.

    Letters, marks and digits of any script, `-`, `_`, `.` and space, in Unicode's composed form (NFC): some systems
    write the same name otherwise. `what` names the field, e.g. "run_name".
    """
    name = unicodedata.normalize("NFC", str(name).strip())
    if not name:
        raise BadInput(f"{what} is empty: give it a name of letters, digits, '-', '_', '.' or spaces.")
    wrong = sorted({c for c in name if not _may_be_in_a_name(c)})
    if wrong:
        shown = " ".join(repr(c) for c in wrong)
        raise BadInput(f"{what} may hold letters, digits, '-', '_', '.' and spaces; {name!r} has {shown}.")
    if name.startswith(".") or name.endswith("."):
        raise BadInput(f"{what} must not start or end with a dot, and {name!r} does.")
    if name.lower() == "checkpoints" or name.lower().split(".")[0].strip() in _WINDOWS_DEVICES:
        raise BadInput(f"{what} cannot be {name!r}: that name is reserved.")
    if len(name.encode("utf-8")) > _LONGEST_NAME:
        raise BadInput(f"{what} is too long: {len(name.encode('utf-8'))} bytes, at most {_LONGEST_NAME}.")
    return name


def _may_be_in_a_name(character: str) -> bool:
    # M: vowel signs and other marks, without which most scripts of India and Thailand cannot be written; the two
    # joiners decide how letters of Arabic and Indian scripts are joined
    return character in "-_. \u200c\u200d" or unicodedata.category(character)[0] in "LMN"


def _room_for(folder: Path, longest: str, what: str) -> Path:
    """`folder`; BadInput with what is too much where Windows cannot open a path as long as that of `longest` in it."""
    over = len(str(folder)) + 1 + len(longest) - _LONGEST_PATH_ON_WINDOWS
    if _IS_WINDOWS and over > 0:
        raise BadInput(
            f"{what} is too long: Windows opens paths of {_LONGEST_PATH_ON_WINDOWS} characters, and files of this "
            f"folder would have {over} more: give it a name that is {over} characters shorter."
        )
    return folder


def run_folder(run_name: str) -> Path:
    """Folder of a training run, output/refiners/<run_name>; it need not exist yet."""
    folder = Path(folder_paths.get_output_directory(), MODEL_FOLDER, check_name(run_name, "run_name"))
    return _room_for(folder, _LONGEST_IN_RUN, "run_name")


def dataset_folder(name: str) -> Path:
    """Folder of a dataset, output/refiner_datasets/<name>; it need not exist yet."""
    folder = Path(folder_paths.get_output_directory(), _DATASETS, check_name(name, "name"))
    return _room_for(folder, _LONGEST_IN_DATASET, "name")


def latent_cache_folder() -> Path:
    """Folder of the encoded pictures that datasets are built from, output/refiner_datasets/.latents."""
    return Path(folder_paths.get_output_directory(), _DATASETS, ".latents")


def move_aside(folder: Path) -> Path | None:
    """Rename `folder` to `<name>.previous-N` beside it, N the first free number; None when there was nothing."""
    if not folder.exists():
        return None
    aside = aside_name(folder)
    try:
        replace(folder, aside)
    except OSError as error:
        raise BadInput(f"The folder {folder} cannot be kept as {aside.name} ({error.strerror}).") from error
    return aside


def list_refiners() -> list[str]:
    """Refiner files as a person picks them: names relative to the model folders, without the states of runs (in hidden
    folders, and of earlier runs in `checkpoints`) and without the adapters of a LoRA run, which lie beside a refiner
    that has them in it."""
    parts = {name: name.replace("\\", "/").split("/") for name in folder_paths.get_filename_list(MODEL_FOLDER)}
    return [name for name, (*above, file) in parts.items() if _is_for_people(above) and file != ADAPTERS]


def _is_for_people(folders: list[str]) -> bool:
    return not any(name == EARLIER_CHECKPOINTS or name.startswith(".") for name in folders)


def model_file(kind: str, name: str) -> str | None:
    """Full path of a file in the host's folders of a kind of model, with either separator in its name; None without."""
    places = (folder_paths.get_full_path(kind, spelling) for spelling in spellings(name))
    return next((path for path in places if path is not None), None)


def refiner_file(name: str) -> Path:
    """Full path of a file from `list_refiners()`; BadInput when it is not there (any more)."""
    path = model_file(MODEL_FOLDER, name)
    if path is None:
        folders = " or ".join(folder_paths.get_folder_paths(MODEL_FOLDER))
        raise BadInput(f"The refiner file {name!r} does not exist in {folders}.")
    return Path(path)
