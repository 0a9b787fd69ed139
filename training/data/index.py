"""`index.json`: what a dataset says about itself, and how it is checked before anything is read from it."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..errors import BadInput
from ..storage.files import sha256_file
from .pairs import Pair, PairTable, pair_of
from .tensor_files import DTYPES

FORMAT = "ref2v-dataset"
VERSION = 2
VERSIONS = (1, 2)
INDEX = "index.json"
TABLE = "pairs.safetensors"


def index_text(index: dict) -> str:
    """The index as it is written: sorted, indented, ASCII (a file name need not be valid Unicode), no NaN."""
    return json.dumps(index, sort_keys=True, indent=1, allow_nan=False) + "\n"


def content_hash(index: dict) -> str:
    """SHA-256 (hex) over the index without its own hash. The index holds every shard's SHA-256, so it covers the
    tensors too; files beside the shards (a contact sheet) are not covered."""
    content = {key: value for key, value in index.items() if key != "content_hash"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_index(folder: str | Path, *, verify: bool = False) -> tuple[dict, PairTable]:
    """Read and check `index.json`, the table of pairs, and the shards that it names.

    The index's own hash, the table's and the presence and size of every shard are always checked; with `verify` every
    shard is also read through and its SHA-256 compared.

    Raises:
        BadInput: the folder is missing or no dataset, was changed, is of another version, or lacks (part of) a shard.
    """
    folder = Path(folder)
    try:
        if not folder.is_dir():
            raise BadInput(f"There is no dataset folder {folder}.")
    except OSError as error:
        raise BadInput(f"The dataset folder {folder} cannot be read: {error.strerror or error}.") from error
    index = _parse(folder)
    if index.get("version") not in VERSIONS:
        raise BadInput(
            f"The dataset {folder} has version {index.get('version')!r} of its format, and this program reads the "
            f"versions {', '.join(map(str, VERSIONS))}: build it again, or update the program."
        )
    if index.get("content_hash") != content_hash(index):
        raise BadInput(f"{INDEX} of the dataset {folder} was changed after the dataset was built: build it again.")
    try:
        for shard in index["shards"]:
            whole = verify or (index["version"] > 1 and shard["name"] == TABLE)
            check_shard(folder, shard["name"], shard["bytes"], shard["sha256"] if whole else None)
        if index["version"] == 1:
            pairs = [pair_of(entry) for entry in index["pairs"]]
            _check_listed(folder, index, pairs)
            return index, PairTable.of(pairs)
        if index["dtype"] not in DTYPES:
            raise BadInput(f"{INDEX} of the dataset {folder} names a dtype that this program does not know.")
        return index, _read_table(folder, index)
    except (KeyError, TypeError) as error:
        raise BadInput(f"{INDEX} of the dataset {folder} lacks a field that it must have: {error}.") from error


def _read_table(folder: Path, index: dict) -> PairTable:
    names = [shard["name"] for shard in index["shards"]]
    if TABLE not in names:
        raise BadInput(f"{INDEX} of the dataset {folder} does not list {TABLE}.")
    try:
        return PairTable.of_tensors(load_file(folder / TABLE), names, index["subsets"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise BadInput(f"The file {TABLE} of the dataset {folder} cannot be read: {error}.") from error


def _check_listed(folder: Path, index: dict, pairs: list[Pair]) -> None:
    known = {shard["name"] for shard in index["shards"]}
    for pair in pairs:
        if pair.shard not in known:
            raise BadInput(f"{INDEX} of the dataset {folder} names a shard that it does not list: {pair.shard!r}.")


def check_shard(folder: Path, name: str, size: int, sha256: str | None) -> None:
    """BadInput unless a shard is there, with its size and, where `sha256` is given, its content."""
    # An index from elsewhere must not lead the reader out of its own folder.
    if not isinstance(name, str) or not name or Path(name).name != name or "\\" in name:
        raise BadInput(f"{INDEX} of the dataset {folder} names a shard that is not a plain file name: {name!r}.")
    path = folder / name
    try:
        if not path.is_file():
            raise BadInput(f"The dataset {folder} lacks its file {name}.")
        found = path.stat().st_size
        if found != size:
            raise BadInput(
                f"The file {name} of the dataset {folder} must have {size} bytes and has {found}: build it again."
            )
        content = None if sha256 is None else sha256_file(path)
    except OSError as error:
        raise BadInput(
            f"The file {name} of the dataset {folder} cannot be read: {error.strerror or error}."
        ) from error
    if content != sha256:
        raise BadInput(
            f"The file {name} of the dataset {folder} is damaged, its SHA-256 is not the one in {INDEX}: delete the "
            "folder, and build it again."
        )


def check_latent(latent: dict) -> None:
    """BadInput unless this says how a latent space is scaled: name, channels, scale, shift, pixels per cell."""
    for key in ("name", "channels", "scale", "shift", "downscale"):
        if key not in latent:
            raise BadInput(f"The latent description lacks {key!r}.")
    for key in ("channels", "downscale"):
        if not isinstance(latent[key], int) or latent[key] < 1:
            raise BadInput(f"The latent's {key} must be a whole number from 1, not {latent[key]!r}.")
    for key in ("scale", "shift"):
        values = latent[key] if isinstance(latent[key], (list, tuple)) else [latent[key]] * latent["channels"]
        numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)
        if not numbers or len(values) != latent["channels"] or (key == "scale" and 0 in values):
            raise BadInput(
                f"The latent's {key} must be one finite number or {latent['channels']} of them"
                f"{' and not 0' if key == 'scale' else ''}, not {latent[key]!r}."
            )


def _parse(folder: Path) -> dict:
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        raise BadInput(f"The folder {folder} is not a dataset: it holds no {INDEX}.") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{INDEX} of the dataset {folder} cannot be read: {error}.") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise BadInput(f"The folder {folder} is not a dataset: its {INDEX} does not say format {FORMAT!r}.")
    return index
