"""Datasets on disk: latent pairs in safetensors shards, what they are in two small files beside them.

Version 2, which `DatasetWriter` writes:

    index.json              what holds for all: latent space, VAE, base, text, dtype, subsets, statistics, shards
    pairs.safetensors       a column for each thing known of a pair: 100,000 open at once, without a Python object each
    shard-00000.safetensors per pair `<row:06d>.z` and `.b` [F, C, h, w], and where it has one `.mask` [F, 1, h, w]
    text-00000.safetensors  per caption, stored once, `<row:06d>.context` [T, D] and `.pooled` [P]; the empty one too

F is the number of frames, 1 for a still. Latents are in MODEL space (what the host calls `latent_format.process_in`).
Tensors are float32, or in half precision where the writer was asked for it; reading gives float32. There is no clock,
host name or absolute path in any of the files: the same pairs give the same bytes.

Version 1, which is read as ever: all pairs in index.json, float32 `<row:06d>.z` and `.b` [C, h, w] in its shards,
beside them a `.context` and `.pooled` of each pair's own, and `context-empty.safetensors`.

Writing:

    writer = DatasetWriter(
        folder, latent=..., vae=..., base=..., context=..., empty=...,
        dtype="float32",            # of latents, masks and text on the disk: "float32", "float16" or "bfloat16"
        subsets={"faces": 2.0},     # name -> weight: how often an epoch draws its pairs, 1 = once
        resume=None,                # the recipe (plain JSON): what a killed build of the same recipe finished is kept
    )
    writer.resumed                  # pairs that are there already: the first so many of the plan are not to be added
    writer.add(
        z, b,                       # [C, h, w], or [F, C, h, w] for a clip; both of one shape
        source=..., sha256=..., group=..., split=..., caption=..., flip=..., context=..., pooled=..., rgb=...,
        mask=None,                  # [h, w], [1, h, w] or [F, 1, h, w] in 0..1: what a cell's loss counts; None = 1
        subset="",                  # one of `subsets`; "" = weight 1
        base_size=None,             # (height, width) in cells at which b was made, where it was brought to z's grid
    )                               # context and pooled may be left out where the same caption was added before
    writer.finish()

Pairs of any sizes lie in one dataset. The weight of a subset says how often its pairs are drawn and not how much a loss
counts: both give the same mean gradient, but large weights on few pictures make the gradient noisy, and a loss that is
weighted can no longer be compared between pictures.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..errors import BadInput
from ..storage.staged_folder import StagedFolder
from .index import (
    FORMAT,
    INDEX,
    SPLITS,
    VERSION,
    Pair,
    check_latent,
    check_shard,
    content_hash,
    index_text,
    pair_entry,
    read_index,
)
from .statistics import PreviewFit, ResidualMeter

EMPTY_SHARD = "context-empty.safetensors"
SHARD_BYTES = 256 * 2**20
_NO_RESIDUAL = 1e-6  # model space is about +-1: this little is float32's rounding, as of flat pictures resized


def estimate_bytes(sizes: Sequence[tuple[int, int]], channels: int, context: dict | None = None) -> int:
    """Bytes of tensors that pairs of these (height, width) latent cells will take on disk, headers left out."""
    text = context["tokens"] * context["dim"] + context.get("pooled", 0) if context else 0
    return sum(4 * (2 * channels * height * width + text) for height, width in sizes)


class DatasetWriter:
    """Writes a dataset into a hidden sibling of `folder`, which takes its name only in `finish()`.

    As a context manager it finishes when the block ends well, and removes everything when it does not (errors,
    Ctrl-C and the host's interrupt alike).

    Args:
        folder: where the dataset will be; must not exist.
        latent: {"name", "channels", "scale", "shift", "downscale"}; model space = (raw - shift) * scale.
        vae: {"fingerprint", "dtype"}, or None in pixel space.
        base: {"kind": ..., ...}: where the base latents came from.
        context: {"tokens", "dim", "pooled", "fingerprint"}, or None without text.
        empty: the encoded empty caption, {"context": [T, D], "pooled": [P]}; needed for caption dropout.
        shard_bytes: a shard is written out when its tensors reach this size (and so much memory is held).

    Raises:
        BadInput: the folder exists, a description does not fit, or the disk is full.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        latent: dict,
        vae: dict | None,
        base: dict,
        context: dict | None = None,
        empty: dict[str, Tensor] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ):
        check_latent(latent)
        if empty is not None and context is None:
            raise BadInput("The dataset has an empty caption but no context: give both or neither.")
        self._index = {"format": FORMAT, "version": VERSION, "latent": latent, "vae": vae, "base": base}
        self._index |= {"context": context, "empty": {"shard": EMPTY_SHARD} if empty else None}
        try:
            index_text(self._index)
        except (TypeError, ValueError) as error:
            raise BadInput(f"The description of the dataset must be plain JSON: {error}.") from error
        self._context = context
        self._channels = latent["channels"]
        self._shard_bytes = shard_bytes
        self._pairs: list[Pair] = []
        self._shards: list[dict] = []
        self._split_of_group: dict[str, str] = {}
        self._splits = {split: {"pairs": 0, "bytes": 0} for split in SPLITS}
        self._residual = ResidualMeter()
        # In pixel space the latent is the picture already.
        self._preview = None if self._channels == 3 and latent["downscale"] == 1 else PreviewFit(self._channels)
        self._full_shards = 0
        self._rows: dict[str, Tensor] = {}
        self._rows_count = self._rows_bytes = 0
        self._done: Path | None = None
        empty_tensors = self._check_text(empty, "the empty caption") if empty else {}
        self._stage = StagedFolder(Path(folder))
        if empty_tensors:
            try:
                self._write_shard(EMPTY_SHARD, empty_tensors)
            except BaseException:
                self._stage.discard()
                raise

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.finish()
        elif self._done is None:
            self._stage.discard()

    def add(
        self,
        z: Tensor,
        b: Tensor,
        *,
        source: str,
        sha256: str,
        group: str,
        split: str,
        caption: str = "",
        flip: bool = False,
        context: Tensor | None = None,
        pooled: Tensor | None = None,
        rgb: Tensor | None = None,
    ) -> None:
        """Add one pair.

        Args:
            z, b: target and base latent [C, h, w] in model space, any float dtype and device.
            source: the picture's name, relative to its folder; with `sha256` of that file.
            group: siblings share it, and must share `split` ("train" or "held_out") too.
            context, pooled: [T, D] and [P]; needed exactly when the dataset has them.
            rgb: the target picture [3, h, w] in [-1, 1], area-averaged to latent size; feeds the preview fit.

        Raises:
            BadInput: a shape or number that does not fit, named by `source`; or the disk is full.
        """
        z, b = self._check_pair(z, b, source)
        if split not in SPLITS:
            raise BadInput(f"{source}: the split must be one of {', '.join(SPLITS)}, not {split!r}.")
        if self._split_of_group.setdefault(group, split) != split:
            raise BadInput(f"{source}: its group {group!r} is in the other split already, and siblings must not part.")
        tensors = {"z": z, "b": b}
        if self._context is not None:
            tensors |= self._check_text({"context": context, "pooled": pooled}, source)
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._rows and self._rows_bytes + size > self._shard_bytes:
            self._flush()
        row, shard = self._rows_count, f"shard-{self._full_shards:05d}.safetensors"
        self._rows |= {f"{row:06d}.{name}": tensor for name, tensor in tensors.items()}
        self._rows_bytes += size
        self._rows_count += 1
        self._pairs.append(Pair(shard, row, z.shape[1], z.shape[2], split, source, sha256, group, flip, caption))
        self._splits[split]["pairs"] += 1
        self._splits[split]["bytes"] += size
        if split == "train":
            self._residual.add(z, b)
            if self._preview is not None and rgb is not None:
                self._preview.add(z, _finite(rgb, (3, *z.shape[1:]), f"{source}: the preview picture"))

    def attach(self, name: str, data: bytes) -> None:
        """Put a further file (a contact sheet) beside the shards. The content hash does not cover it."""
        self._stage.write(name, data)

    def finish(self) -> Path:
        """Write what is left, and give the folder its name. Returns the folder; a second call does nothing more.

        Raises:
            BadInput: there is no training pair, every base equals its target, or the disk is full. Nothing is left.
        """
        if self._done is not None:
            return self._done
        try:
            self._done = self._finish()
        except BaseException:
            self._stage.discard()
            raise
        return self._done

    def _finish(self) -> Path:
        if not self._splits["train"]["pairs"]:
            raise BadInput(f"The dataset {self._stage.final} would have no training pair: give it more pictures.")
        rms = self._residual.rms()
        if rms < _NO_RESIDUAL:
            raise BadInput(
                f"Every base of the dataset {self._stage.final} equals its target, so there is nothing to learn: "
                "give it another base."
            )
        self._flush()
        self._index |= {
            "residual_rms": rms,
            "preview": self._preview.solve() if self._preview is not None else None,
            "shards": self._shards,
            "splits": self._splits,
            "pairs": [pair_entry(pair) for pair in self._pairs],
        }
        self._index["content_hash"] = content_hash(self._index)
        self._stage.write(INDEX, index_text(self._index).encode())
        return self._stage.commit()

    def _flush(self) -> None:
        if self._rows:
            self._write_shard(self._pairs[-1].shard, self._rows)
            self._full_shards += 1
            self._rows = {}
            self._rows_count = self._rows_bytes = 0

    def _write_shard(self, name: str, tensors: dict[str, Tensor]) -> None:
        # Serialised in memory and written here: a full disk then is an OSError with its number, the bytes are synced
        # before the index speaks of them, and they need not be read back for their hash.
        data = safetensors.torch.save(tensors)
        self._stage.write(name, data)
        self._shards.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})

    def _check_pair(self, z: Tensor, b: Tensor, source: str) -> tuple[Tensor, Tensor]:
        if z.ndim != 3 or z.shape[0] != self._channels or min(z.shape) < 1:
            raise BadInput(
                f"{source}: the target latent must be [{self._channels}, height, width], not {list(z.shape)}."
            )
        if b.shape != z.shape:
            raise BadInput(f"{source}: the base latent is {list(b.shape)} and its target {list(z.shape)}.")
        shape = tuple(z.shape)
        return _finite(z, shape, f"{source}: the target latent"), _finite(b, shape, f"{source}: the base latent")

    def _check_text(self, text: dict[str, Tensor | None], source: str) -> dict[str, Tensor]:
        shapes = {"context": (self._context["tokens"], self._context["dim"])}
        if self._context.get("pooled"):
            shapes["pooled"] = (self._context["pooled"],)
        for name, shape in shapes.items():
            if text.get(name) is None:
                raise BadInput(f"{source}: the dataset has text, so {name} {list(shape)} is needed.")
        return {name: _finite(text[name], shape, f"{source}: {name}") for name, shape in shapes.items()}


class RefinerDataset:
    """A finished dataset. Opening reads the index only; shards are mapped when first read, once per process.

    Attributes:
        folder, info (the whole index), pairs (tuple of Pair), train and held_out (lists of positions in `pairs`),
        residual_rms, content_hash, latent, context.
    """

    def __init__(self, folder: Path, info: dict, pairs: tuple[Pair, ...]):
        self.folder = folder
        self.info = info
        self.pairs = pairs
        self.train = [i for i, pair in enumerate(pairs) if pair.split == "train"]
        self.held_out = [i for i, pair in enumerate(pairs) if pair.split == "held_out"]
        self.residual_rms: float = info["residual_rms"]
        self.content_hash: str = info["content_hash"]
        self.latent: dict = info["latent"]
        self.context: dict | None = info["context"]
        self._handles: dict[str, safetensors.safe_open] = {}
        self._process = os.getpid()

    @classmethod
    def open(cls, folder: str | os.PathLike, *, verify: bool = False) -> RefinerDataset:
        """Open a dataset; `verify` reads every shard through and compares its SHA-256. Raises BadInput."""
        info, pairs = read_index(folder, verify=verify)
        return cls(Path(folder), info, pairs)

    def verify(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Read every shard through and compare its SHA-256; BadInput names the one that is damaged.

        A run asks once, before its first step: about a second for each GB, and a flipped bit would be learnt.
        """
        for shard in self.info["shards"]:
            if should_stop():
                break
            check_shard(self.folder, shard["name"], shard["bytes"], shard["sha256"])

    def read(self, i: int, crop: tuple[int, int, int, int] | None = None) -> dict[str, Tensor]:
        """Pair `i`: {"z", "b": float32 [C, h, w], "context" [T, D] and "pooled" [P] where the dataset has them}.

        Args:
            crop: (top, left, height, width) in latent cells; no more than this is read from the disk.
        """
        pair = self.pairs[i]
        top, left, height, width = crop or (0, 0, pair.height, pair.width)
        tensors = {}
        try:
            shard = self._shard(pair.shard)
            for name in ("z", "b"):
                rows = shard.get_slice(f"{pair.row:06d}.{name}")
                tensors[name] = rows[:, top : top + height, left : left + width]
            for name in self._text_names():
                tensors[name] = shard.get_tensor(f"{pair.row:06d}.{name}")
        except (OSError, safetensors.SafetensorError) as error:
            raise self._damaged(pair.shard, error) from error
        return tensors

    def empty_context(self) -> dict[str, Tensor]:
        """The encoded empty caption: {"context" [T, D], "pooled" [P] where it has one}; {} without one."""
        if not self.info["empty"]:
            return {}
        name = self.info["empty"]["shard"]
        try:
            return {key: self._shard(name).get_tensor(key) for key in self._text_names()}
        except (OSError, safetensors.SafetensorError) as error:
            raise self._damaged(name, error) from error

    def close(self) -> None:
        """Let go of the shards, so that Windows can delete them; reading again opens them again."""
        self._handles = {}

    def _text_names(self) -> tuple[str, ...]:
        if self.context is None:
            return ()
        return ("context", "pooled") if self.context.get("pooled") else ("context",)

    def _shard(self, name: str) -> safetensors.safe_open:
        if self._process != os.getpid():  # a forked loader worker must not share its parent's handles
            self._handles, self._process = {}, os.getpid()
        if name not in self._handles:
            self._handles[name] = safetensors.safe_open(self.folder / name, framework="pt", device="cpu")
        return self._handles[name]

    def _damaged(self, name: str, error: Exception) -> BadInput:
        return BadInput(f"The file {name} of the dataset {self.folder} cannot be read: {error}.")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_handles": {}}


def _finite(tensor: Tensor, shape: tuple[int, ...], what: str) -> Tensor:
    """`tensor` as contiguous float32 on the CPU, or BadInput when its shape differs or it holds NaN or infinity."""
    if tuple(tensor.shape) != shape:
        raise BadInput(f"{what} must be {list(shape)}, not {list(tensor.shape)}.")
    # A copy always: the caller may go on to use the same memory (a flip, the next picture) before the shard is written.
    tensor = tensor.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    if bad:
        raise BadInput(f"{what} has {bad} of {tensor.numel()} values that are NaN or infinite.")
    return tensor
