"""Which pairs a micro-step sees: a pure function of (seed, absolute index), so a run resumes anywhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import BadInput
from .index import Pair
from .seeds import seeded_generator
from .shards import RefinerDataset


def crop_size(pair: Pair, crop: int | None) -> tuple[int, int]:
    """(height, width) in latent cells that a batch sees of `pair`: `crop`, or less where the pair is smaller."""
    return (pair.height, pair.width) if crop is None else (min(pair.height, crop), min(pair.width, crop))


def plan_epoch(
    pairs: Sequence[Pair],
    train_indices: Sequence[int],
    *,
    batch_size: int,
    repeats: int,
    seed: int,
    epoch: int,
    crop: int | None,
) -> list[list[int]]:
    """The batches of one epoch, as lists of positions in `pairs`.

    Pairs of one batch have the same size after the crop; when every pair is at least `crop` on both sides, all may
    mix. Every pair comes `repeats` times, and an incomplete last batch of a size is filled from the beginning of
    that size's order, so no pair is dropped, no batch is short, and every epoch has the same number of batches.
    """
    buckets: dict[tuple[int, int], list[int]] = {}
    for i in train_indices:
        buckets.setdefault(crop_size(pairs[i], crop), []).append(i)
    batches = []
    for (height, width), members in sorted(buckets.items()):
        generator = seeded_generator(seed, f"order {height}x{width}", epoch)
        order = [members[j] for _ in range(repeats) for j in torch.randperm(len(members), generator=generator).tolist()]
        order += islice(cycle(order[:]), -len(order) % batch_size)
        batches += [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    mixed = torch.randperm(len(batches), generator=seeded_generator(seed, "batches", epoch))
    return [batches[j] for j in mixed.tolist()]


class BatchSource(Dataset):
    """Training batches by absolute micro-step, over all epochs: batch k is the same whenever and wherever it is asked.

    Meant for `DataLoader(source, batch_size=None, sampler=range(start, end), num_workers=n)`. Position is the index
    alone, so there is no state to save; index k lies in epoch k // per_epoch.

    Args:
        folder: a finished dataset.
        batch_size: pairs of one micro-step.
        repeats: how often an epoch shows each pair.
        seed: every random choice is a function of it and the index.
        crop: side of a random square in latent cells, the same for z and b; None for whole pairs.
        flip: mirror every second pair at random; only in pixel space.
        caption_dropout: share of pairs (0..1) whose text is replaced by the empty caption.

    Raises:
        BadInput: an argument out of its range, `flip` for latents, caption dropout without an empty caption.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        batch_size: int,
        repeats: int = 1,
        seed: int = 0,
        crop: int | None = None,
        flip: bool = False,
        caption_dropout: float = 0.0,
    ):
        for name, value in (("batch_size", batch_size), ("repeats", repeats), ("crop", 1 if crop is None else crop)):
            if value < 1:
                raise BadInput(f"{name} must be at least 1, not {value}.")
        if not 0.0 <= caption_dropout <= 1.0:
            raise BadInput(f"caption_dropout must lie between 0 and 1, not {caption_dropout}.")
        self.data = RefinerDataset.open(folder)
        pixels = self.data.latent["channels"] == 3 and self.data.latent["downscale"] == 1
        if flip and not pixels:
            raise BadInput(
                "flip works on pixels only, since a mirrored latent is not the latent of the mirrored picture: "
                "turn it off here, and let the dataset be built with flips."
            )
        self.empty = self.data.empty_context()
        if self.data.context is not None and caption_dropout > 0 and not self.empty:
            raise BadInput(f"caption_dropout needs the encoded empty caption, and the dataset {folder} has none.")
        self.batch_size, self.repeats, self.seed = batch_size, repeats, seed
        self.crop, self.flip, self.caption_dropout = crop, flip, caption_dropout
        self._plan: tuple[int, list[list[int]]] = (0, self._plan_of(0))
        self.per_epoch = len(self._plan[1])

    def __len__(self) -> int:
        """Micro-steps of one epoch; indices go on beyond it."""
        return self.per_epoch

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        """Batch `index`: {"z", "b": [B, C, h, w], "context" [B, T, D], "pooled" [B, P], "time_ids" [B, 6], "index"}.

        `context` and `pooled` are absent where the dataset has none. `time_ids` is SDXL's (height, width, 0, 0,
        height, width) in pixels, of what the batch shows.
        """
        if index < 0:
            raise IndexError(f"a micro-step is counted from 0, not {index}")
        epoch, step = divmod(index, self.per_epoch)
        if self._plan[0] != epoch:
            self._plan = (epoch, self._plan_of(epoch))
        members = self._plan[1][step]
        # Three generators, so that turning one option on does not move what the others choose.
        corners = torch.rand(len(members), 2, dtype=torch.float64, generator=self._generator("crop", index)).tolist()
        mirrored = torch.rand(len(members), generator=self._generator("flip", index)) < 0.5
        dropped = torch.rand(len(members), generator=self._generator("caption", index)) < self.caption_dropout
        items = [
            self._item(i, corner, mirror, drop)
            for i, corner, mirror, drop in zip(members, corners, mirrored.tolist(), dropped.tolist(), strict=True)
        ]
        batch: dict[str, Any] = {name: torch.stack([item[name] for item in items]) for name in items[0]}
        height, width = (self.data.latent["downscale"] * side for side in batch["z"].shape[-2:])
        batch["time_ids"] = torch.tensor([[height, width, 0, 0, height, width]] * len(items), dtype=torch.float32)
        batch["index"] = index
        return batch

    def _item(self, i: int, corner: tuple[float, float], mirror: bool, drop: bool) -> dict[str, Tensor]:
        pair = self.data.pairs[i]
        height, width = crop_size(pair, self.crop)
        top, left = int(corner[0] * (pair.height - height + 1)), int(corner[1] * (pair.width - width + 1))
        item = self.data.read(i, (top, left, height, width))
        if self.flip and mirror:
            item["z"], item["b"] = item["z"].flip(-1), item["b"].flip(-1)
        if drop:
            item |= self.empty
        return item

    def _plan_of(self, epoch: int) -> list[list[int]]:
        return plan_epoch(
            self.data.pairs,
            self.data.train,
            batch_size=self.batch_size,
            repeats=self.repeats,
            seed=self.seed,
            epoch=epoch,
            crop=self.crop,
        )

    def _generator(self, kind: str, index: int) -> torch.Generator:
        return seeded_generator(self.seed, kind, index)
