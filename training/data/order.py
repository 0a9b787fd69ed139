"""Which pairs make a batch and in which order batches come: a function of the seed and the epoch alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
import torch

from .buckets import merge_sizes
from .index import Pair
from .pairs import PairTable
from .seeds import seeded_generator
from .shards import RefinerDataset

__all__ = ["BatchOrder", "crop_size", "plan_epoch", "shown_sizes"]

_SWAPS = 256  # batches that are looked at for a pair that could take a duplicate's place


class BatchOrder:
    """The batches of every epoch of one run.

    Of a dataset of version 1 they are those of `plan_epoch`, as ever. Of version 2:

    - A size that fewer pairs have than a batch holds shares one with its neighbours (`merge_sizes`).
    - A pair comes `repeats` x the weight of its subset times; where that is no whole number, now and then once more.
    - The times of one pair are spread over the epoch, and a batch holds a pair twice only where no other can take the
      place.
    - The micro-batches of one optimizer step have one size; those that are left over in each size make steps of sizes
      that are as alike as there are. So no rank of many waits long for another, and how many ranks there are changes
      nothing. An epoch of several sizes is a whole number of steps; one of a single size need not be.

    alike: the last point; None = in version 2. Version 1 with `alike` is ordered as version 2 is.

    Attributes:
        shown: (frames, height, width) in latent cells that a batch shows of each pair, held-out ones too. [pairs, 3]
        per_epoch: batches of an epoch; every one has as many.
    """

    def __init__(
        self,
        data: RefinerDataset,
        *,
        batch_size: int,
        repeats: int,
        seed: int,
        crop: int | None,
        accumulation: int = 1,
        alike: bool | None = None,
    ):
        self._data, self._options = data, {"batch_size": batch_size, "repeats": repeats, "seed": seed}
        self._crop, self._accumulation = crop, accumulation
        self._as_version_1 = data.version == 1 and not alike
        self.shown = shown_sizes(data.pairs.sizes(), crop)
        if not self._as_version_1:
            train = np.asarray(data.train, dtype=np.int64)
            self.shown[train] = merge_sizes(self.shown[train], batch_size)
        self.per_epoch = len(self.epoch(0))

    def epoch(self, epoch: int) -> np.ndarray:
        """The batches of one epoch, as places in the dataset's pairs. int64 [batches, batch_size]"""
        if self._as_version_1:
            return np.array(
                plan_epoch(self._data.pairs, self._data.train, epoch=epoch, crop=self._crop, **self._options),
                dtype=np.int64,
            )
        train = np.asarray(self._data.train, dtype=np.int64)
        weights = self._data.pairs.weights(train)
        return _plan_alike(train, self.shown[train], weights, epoch, self._accumulation, **self._options)


def crop_size(pair: Pair, crop: int | None) -> tuple[int, int]:
    """(height, width) in latent cells that a batch sees of `pair`: `crop`, or less where the pair is smaller."""
    return (pair.height, pair.width) if crop is None else (min(pair.height, crop), min(pair.width, crop))


def shown_sizes(sizes: np.ndarray, crop: int | None) -> np.ndarray:
    """As `crop_size`, for (frames, height, width) of many pairs. [n, 3] -> [n, 3], a copy"""
    return np.minimum(sizes, np.array([2**31, crop or 2**31, crop or 2**31]))


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
    """The batches of one epoch of a dataset of version 1, as lists of positions in `pairs`.

    Pairs of one batch have the same size after the crop; when every pair is at least `crop` on both sides, all may
    mix. Every pair comes `repeats` times, and an incomplete last batch of a size is filled from the beginning of
    that size's order, so no pair is dropped, no batch is short, and every epoch has the same number of batches.
    """
    train = np.asarray(train_indices, dtype=np.int64)
    batches = []
    for (_, height, width), members in _by_size(shown_sizes(PairTable.of(pairs).sizes(train), crop), train):
        generator = seeded_generator(seed, f"order {height}x{width}", epoch)
        orders = [members[torch.randperm(len(members), generator=generator).numpy()] for _ in range(repeats)]
        order = np.concatenate(orders).tolist()
        order += islice(cycle(order[:]), -len(order) % batch_size)
        batches += [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    mixed = torch.randperm(len(batches), generator=seeded_generator(seed, "batches", epoch))
    return [batches[j] for j in mixed.tolist()]


def _plan_alike(
    train: np.ndarray,
    shown: np.ndarray,
    weights: np.ndarray,
    epoch: int,
    accumulation: int,
    *,
    batch_size: int,
    repeats: int,
    seed: int,
) -> np.ndarray:
    """The batches of one epoch of version 2. train, shown [n, 3], weights: the training pairs. [batches, batch_size]"""
    buckets = _by_size(shown, np.arange(len(train)))
    draws = [float(weights[members].sum()) * repeats for _, members in buckets]
    counts = [max(1, math.ceil(drawn / batch_size - 1e-9)) for drawn in draws]
    if len(buckets) == 1:
        accumulation = 1  # any batches in a row have like sizes
    # What lacks to a whole number of steps comes from the size that has the most pairs: there it weighs least.
    counts[int(np.argmax(draws))] += -sum(counts) % accumulation
    steps, left_over = [], []
    for (shape, members), count in zip(buckets, counts, strict=True):
        generator = seeded_generator(seed, f"order {'x'.join(map(str, shape))}", epoch)
        order = _spread_draws(members, weights[members] * repeats, generator)
        filled = order[np.arange(count * batch_size) % len(order)]
        batches = train[_without_twins(filled.reshape(count, batch_size))]
        whole = count - count % accumulation
        steps.append(batches[:whole].reshape(-1, accumulation, batch_size))
        left_over += [(int(np.prod(shape)), shape, batch) for batch in batches[whole:]]
    left_over.sort(key=lambda entry: entry[:2])
    mixed = np.array([batch for _, _, batch in left_over], dtype=np.int64).reshape(-1, accumulation, batch_size)
    together = np.concatenate([*steps, mixed])
    order = torch.randperm(len(together), generator=seeded_generator(seed, "batches", epoch)).numpy()
    return together[order].reshape(-1, batch_size)


def _spread_draws(members: np.ndarray, weights: np.ndarray, generator: torch.Generator) -> np.ndarray:
    """Draws of the members, at least one in all: each as often as its weight says, rounded up or down by chance, and
    its times spread evenly."""
    mixed = torch.randperm(len(members), generator=generator).numpy()
    # Systematic sampling: along a random order, one draw each time that the sum of weights passes a whole number
    offset = torch.rand(1, dtype=torch.float64, generator=generator).item() * (1 - 1e-6)  # no sum rounds up to the next
    passed = np.floor(np.cumsum(weights[mixed]) + offset).astype(np.int64)
    passed[-1] = max(passed[-1], 1)
    drawn, times = int(passed[-1]), np.diff(passed, prepend=0)
    rows = np.repeat(np.arange(len(members)), times)
    nth = np.arange(drawn) - np.repeat(passed - times, times)
    place = (nth + torch.rand(drawn, dtype=torch.float64, generator=generator).numpy()) / times[rows]
    return members[mixed][rows[np.argsort(place, kind="stable")]]


def _without_twins(batches: np.ndarray) -> np.ndarray:
    """The batches, a pair that is twice in one changed for one of another batch where both then hold it once."""
    ordered = np.sort(batches, axis=1)
    for k in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(1)).tolist():
        for i in range(1, batches.shape[1]):
            twin = batches[k, i]
            if twin not in batches[k, :i]:
                continue
            for other in (np.arange(k + 1, k + min(len(batches), _SWAPS)) % len(batches)).tolist():
                fitting = np.flatnonzero(~np.isin(batches[other], batches[k]))
                if len(fitting) and twin not in batches[other]:
                    batches[k, i], batches[other, fitting[0]] = batches[other, fitting[0]], twin
                    break
    return batches


def _by_size(shown: np.ndarray, members: np.ndarray) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """(size, those of `members` that have it, in their order), the smallest size first. shown: [n, 3]"""
    shapes, of_member, counts = np.unique(shown, axis=0, return_inverse=True, return_counts=True)
    parts = np.split(members[np.argsort(of_member.reshape(-1), kind="stable")], np.cumsum(counts)[:-1])
    return [(tuple(shape), part) for shape, part in zip(shapes.tolist(), parts, strict=True)]
