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

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import BadInput
from .index import check_shard, read_index
from .pairs import PairTable
from .tensor_files import DTYPES, TensorFiles
from .verified import is_verified, remember_verified
from .writer import DatasetWriter, estimate_bytes

__all__ = ["DatasetWriter", "RefinerDataset", "estimate_bytes"]


class RefinerDataset:
    """A finished dataset. Opening reads the index and the table of pairs only.

    Attributes:
        folder, info (the whole index), pairs (PairTable), train and held_out (lists of positions in `pairs`),
        residual_rms, content_hash, latent, context, version.
    """

    def __init__(self, folder: Path, info: dict, pairs: PairTable):
        self.folder = folder
        self.info = info
        self.pairs = pairs
        held_out = pairs.numbers["held_out"].astype(bool)
        self.train: list[int] = np.flatnonzero(~held_out).tolist()
        self.held_out: list[int] = np.flatnonzero(held_out).tolist()
        self.version: int = info["version"]
        self.residual_rms: float = info["residual_rms"]
        self.content_hash: str = info["content_hash"]
        self.latent: dict = info["latent"]
        self.context: dict | None = info["context"]
        self._dtype = DTYPES[info.get("dtype", "float32")]
        self._files = TensorFiles(folder)

    @classmethod
    def open(cls, folder: str | os.PathLike, *, verify: bool = False) -> RefinerDataset:
        """Open a dataset; `verify` reads every shard through and compares its SHA-256. Raises BadInput."""
        info, pairs = read_index(Path(folder), verify=verify)
        return cls(Path(folder), info, pairs)

    def verify(self, should_stop: Callable[[], bool] = lambda: False, *, full: bool = False) -> list[str]:
        """Read every shard through and compare its SHA-256; BadInput names the one that is damaged.

        A run asks once, before its first step: about a second for each GB, and a flipped bit would be learnt. Shards
        that were found whole before and have the size and times that they had then are not read again, but with `full`.
        Returns the names of those that were read.
        """
        shards = {shard["name"]: shard for shard in self.info["shards"]}
        known = set() if full else is_verified(self.folder, ((name, shards[name]["sha256"]) for name in shards))
        read = []
        for name, shard in shards.items():
            if should_stop():
                break
            check_shard(self.folder, name, shard["bytes"], None if name in known else shard["sha256"])
            read += [] if name in known else [name]
        if read:
            remember_verified(self.folder, [(name, shards[name]["sha256"]) for name in read])
        return read

    @property
    def most_frames(self) -> int:
        """Frames of the longest clip; 1 where all pairs are stills."""
        return int(self.pairs.numbers["frames"].max(initial=1))

    @property
    def masked(self) -> bool:
        """Whether any pair has a mask."""
        return bool((self.pairs.numbers["mask"] >= 0).any())

    def read(self, i: int, crop: tuple[int, int, int, int] | None = None) -> dict[str, Tensor]:
        """Pair `i`: {"z", "b": float32 [C, h, w], or [F, C, h, w] of a clip; "mask" [1, h, w] or [F, 1, h, w] where it
        has one; "context" [T, D] and "pooled" [P] where the dataset has them}.

        Args:
            crop: (top, left, height, width) in latent cells; other rows of the latents are not read from the disk.
        """
        number = {name: int(column[i]) for name, column in self.pairs.numbers.items()}
        shard, frames = self.pairs.shards[number["shard"]], number["frames"]
        tensors = {}
        for name in ("z", "b", "mask"):
            if name == "mask" and number[name] < 0:
                continue
            shape = (frames, 1 if name == "mask" else self.latent["channels"], number["height"], number["width"])
            offset = number[name] if self.version > 1 else f"{number['row']:06d}.{name}"
            tensor = self._read(shard, offset, shape, crop)
            tensors[name] = tensor[0] if frames == 1 else tensor
        if self.context is not None:
            old = self.version == 1
            tensors |= self._named_text(shard, f"{number['row']:06d}.") if old else self._text(number["caption"])
        return tensors

    def empty_context(self) -> dict[str, Tensor]:
        """The encoded empty caption: {"context" [T, D], "pooled" [P] where it has one}; {} without one."""
        empty = self.info["empty"]
        if empty is None:
            return {}
        return self._text(empty) if self.version > 1 else self._named_text(empty["shard"], "")

    def close(self) -> None:
        """Let go of the shards, so that Windows can delete them; reading again opens them again."""
        self._files.close()

    def _text_shapes(self) -> dict[str, tuple[int, ...]]:
        context: dict[str, Any] = self.context or {}
        shapes: dict[str, tuple[int, ...]] = {"context": (context["tokens"], context["dim"])}
        return shapes | ({"pooled": (context["pooled"],)} if context.get("pooled") else {})

    def _text(self, caption: int) -> dict[str, Tensor]:
        number = {name: int(column[caption]) for name, column in self.pairs.caption_numbers.items()}
        shard = self.pairs.shards[number["text_shard"]]
        return {name: self._read(shard, number[name], shape) for name, shape in self._text_shapes().items()}

    def _named_text(self, shard: str, before: str) -> dict[str, Tensor]:
        """Version 1: each pair's own text in its shard."""
        return {name: self._read(shard, before + name, shape) for name, shape in self._text_shapes().items()}

    def _read(
        self, shard: str, offset: int | str, shape: tuple[int, ...], crop: tuple[int, int, int, int] | None = None
    ) -> Tensor:
        """A tensor, or a part of it, from its place in a shard; version 1 knows its name alone."""
        try:
            if isinstance(offset, str):
                offset = self._files.offset(shard, offset)
            return self._files.read(shard, offset, shape, self._dtype, crop)
        except KeyError as error:
            raise self._damaged(shard, f"it holds no tensor {error}") from error
        except (OSError, ValueError) as error:
            raise self._damaged(shard, error) from error

    def _damaged(self, name: str, why: object) -> BadInput:
        return BadInput(f"The file {name} of the dataset {self.folder} cannot be read: {why}.")
