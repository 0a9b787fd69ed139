"""Which pairs a micro-step sees: a pure function of (seed, absolute index), so a run resumes anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import BadInput
from .order import BatchOrder, crop_size, plan_epoch
from .seeds import seeded_generator
from .shards import RefinerDataset

__all__ = ["BatchSource", "Draw", "crop_size", "plan_epoch"]

Draw = Callable[[dict[str, Any], torch.Generator], dict[str, Any]]
"""(batch, generator) -> what an objective draws for it: noise, times. Picklable: it is asked where batches are read."""


class BatchSource(Dataset):
    """Training batches by absolute micro-step, over all epochs: batch k is the same whenever and wherever it is asked.

    Meant for `DataLoader(source, batch_size=None, sampler=range(start, end), num_workers=n)`. Position is the index
    alone, so there is no state to save; index k lies in epoch k // per_epoch.

    Args:
        folder: a finished dataset, or one that is open.
        batch_size: pairs of one micro-step.
        repeats: how often an epoch shows each pair.
        seed: every random choice is a function of it and the index.
        crop: side of a random square in latent cells, the same for z and b; None for whole pairs.
        flip: mirror every second pair at random; only in pixel space.
        caption_dropout: share of pairs (0..1) whose text is replaced by the empty caption.
        accumulation: micro-steps of one optimizer step; in version 2 those of one step have like sizes.
        alike: the same of version 1, whose batches then are others than before; None = as the version has it.
        draw: what it gives for a batch is part of it; its generator depends on the seed and the index alone.
        clips: whether pairs of several frames are taken.

    Raises:
        BadInput: an argument out of its range, `flip` for latents, caption dropout without an empty caption, clips.
    """

    def __init__(
        self,
        folder: str | os.PathLike | RefinerDataset,
        *,
        batch_size: int,
        repeats: int = 1,
        seed: int = 0,
        crop: int | None = None,
        flip: bool = False,
        caption_dropout: float = 0.0,
        accumulation: int = 1,
        alike: bool | None = None,
        draw: Draw | None = None,
        clips: bool = False,
    ):
        least_one = {"batch_size": batch_size, "repeats": repeats, "accumulation": accumulation}
        for name, value in (*least_one.items(), ("crop", 1 if crop is None else crop)):
            if value < 1:
                raise BadInput(f"{name} must be at least 1, not {value}.")
        if not 0.0 <= caption_dropout <= 1.0:
            raise BadInput(f"caption_dropout must lie between 0 and 1, not {caption_dropout}.")
        self.data = folder if isinstance(folder, RefinerDataset) else RefinerDataset.open(folder)
        folder = self.data.folder
        if not clips and self.data.most_frames > 1:
            raise BadInput(
                f"The dataset {folder} holds clips of up to {self.data.most_frames} frames, and this trains on stills."
            )
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
        self.draw = draw
        self._masked = self.data.masked
        self._order = BatchOrder(
            self.data, batch_size=batch_size, repeats=repeats, seed=seed, crop=crop, accumulation=accumulation,
            alike=alike,
        )  # fmt: skip
        self.per_epoch = self._order.per_epoch
        self._plan: tuple[int, np.ndarray] | None = None  # an epoch and its batches

    def __len__(self) -> int:
        """Micro-steps of one epoch; indices go on beyond it."""
        return self.per_epoch

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        """Batch `index`: {"z", "b": [B, C, h, w], "context" [B, T, D], "pooled" [B, P], "time_ids" [B, 6], "index"}.

        z and b of clips are [B, F, C, h, w]. `context` and `pooled` are absent where the dataset has none, and so is
        `mask` [B, 1, h, w] or [B, F, 1, h, w], which is 1 for a pair without one. `time_ids` is SDXL's (height, width,
        0, 0, height, width) in pixels, of what the batch shows.
        """
        if index < 0:
            raise IndexError(f"a micro-step is counted from 0, not {index}")
        epoch, step = divmod(index, self.per_epoch)
        if self._plan is None or self._plan[0] != epoch:
            self._plan = (epoch, self._order.epoch(epoch))
        members = self._plan[1][step].tolist()
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
        return batch if self.draw is None else batch | self.draw(batch, self._generator("noise", index))

    def _item(self, i: int, corner: tuple[float, float], mirror: bool, drop: bool) -> dict[str, Tensor]:
        numbers, (_, height, width) = self.data.pairs.numbers, self._order.shown[i].tolist()
        top = int(corner[0] * (int(numbers["height"][i]) - height + 1))
        left = int(corner[1] * (int(numbers["width"][i]) - width + 1))
        item = self.data.read(i, (top, left, height, width))
        if self._masked and "mask" not in item:
            item["mask"] = torch.ones_like(item["z"][..., :1, :, :])
        if self.flip and mirror:
            item |= {name: item[name].flip(-1) for name in ("z", "b", "mask") if name in item}
        if drop:
            item |= self.empty
        return item

    def _generator(self, kind: str, index: int) -> torch.Generator:
        return seeded_generator(self.seed, kind, index)
