"""The size at which a picture is trained on, and cutting it to that size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import BadInput
from .seeds import seeded_generator

BUDGET_768P = 768 * 768
BUDGET_1024P = 1024 * 1024
FEWEST = 8
"""Pictures that share a size, at least, where that can be: as many as a usual batch holds."""
KEPT = 0.5  # of a picture's area, at least, where it is cut to a size that others have


def assign_bucket(
    width: int,
    height: int,
    *,
    max_pixels: int = BUDGET_768P,
    multiple: int = 8,
    min_side: int | None = None,
    name: str = "",
) -> tuple[int, int]:
    """(width, height) in pixels to train a picture at.

    Both are multiples of `multiple` (the VAE's factor times what the UNet needs), the area is within `max_pixels`, the
    aspect ratio is as near to the picture's as such sizes come, and neither side is longer than the picture's: nothing
    is ever scaled up, so a small picture keeps its own size but for the remainder.

    Args:
        min_side: shortest side allowed, `multiple` by default.
        name: the picture, for the error.

    Raises:
        BadInput: the picture is too small for one multiple, or the budget is.
    """
    shortest = math.ceil(max(min_side or 0, multiple) / multiple) * multiple
    if shortest * shortest > max_pixels:
        raise BadInput(f"max_pixels {max_pixels} is too small for sides of {shortest}.")
    if min(width, height) < shortest:
        raise BadInput(
            f"The picture {name or 'given'} is {width}x{height} pixels: each side must have at least {shortest}."
        )
    scale = min(1.0, math.sqrt(max_pixels / (width * height)))
    candidates = set()
    for w in _around(width * scale, multiple, shortest):
        candidates |= {(w, h) for h in _around(w * height / width, multiple, shortest)}
        candidates.add((w, max_pixels // w // multiple * multiple))
    for h in _around(height * scale, multiple, shortest):
        candidates |= {(w, h) for w in _around(h * width / height, multiple, shortest)}
        candidates.add((max_pixels // h // multiple * multiple, h))
    fitting = [
        (w, h) for w, h in candidates if shortest <= w <= width and shortest <= h <= height and w * h <= max_pixels
    ]

    def unlikeness(size: tuple[int, int]) -> tuple:
        aspect_error = abs(math.log(size[0] * height / (size[1] * width)))
        return round(aspect_error, 9), -size[0] * size[1], size  # of sizes equally like the picture, the largest

    return min(fitting, key=unlikeness)


def assign_buckets(
    sizes: Sequence[tuple[int, int]],
    *,
    max_pixels: int = BUDGET_768P,
    multiple: int = 8,
    fewest: int = FEWEST,
    names: Sequence[str] | None = None,
) -> list[tuple[int, int]]:
    """As `assign_bucket`, for all pictures (width, height) of a dataset at once, so that they share few sizes.

    Sizes that fewer than `fewest` pictures come to are merged (`merge_sizes`): the table of sizes is made from the
    pictures at hand. Against a table of fixed aspects and areas, 30 pictures cut by hand kept 86 % of their area
    instead of 71 %, in 3 sizes instead of 5.
    """
    own = [
        assign_bucket(*size, max_pixels=max_pixels, multiple=multiple, name=name)
        for size, name in zip(sizes, names or [""] * len(sizes), strict=True)
    ]
    as_stills = np.array([(1, height, width) for width, height in own], dtype=np.int64).reshape(-1, 3)
    return [(width, height) for _, height, width in merge_sizes(as_stills, fewest).tolist()]


def merge_sizes(sizes: np.ndarray, enough: int) -> np.ndarray:
    """The sizes at which pairs of these sizes are shown, so that each has at least `enough` pairs where that can be.

    The size of the fewest pairs is merged with the one where the least cells are lost: both are cropped to the smaller
    height and the smaller width. No pair loses more than half of its cells, and clips stay among those of their length.
    A size that finds no other stays by itself.

    sizes: (frames, height, width) per pair. [n, 3] -> [n, 3]
    """
    shapes, of_pair, count = np.unique(sizes, axis=0, return_inverse=True, return_counts=True)
    frames, high, wide = shapes.T.copy()
    largest = high * wide  # cells of the largest pair that is shown so
    joined = np.arange(len(shapes))  # with which other one each is merged, itself for those that remain
    alone = np.zeros(len(shapes), dtype=bool)
    while len(poor := np.flatnonzero((count > 0) & (count < enough) & ~alone)):
        poorest = poor[np.lexsort((wide[poor], high[poor], frames[poor], count[poor]))[0]]
        both_high, both_wide = np.minimum(high, high[poorest]), np.minimum(wide, wide[poorest])
        cells = both_high * both_wide
        fits = (count > 0) & (frames == frames[poorest]) & (cells >= KEPT * np.maximum(largest, largest[poorest]))
        fits[poorest] = False
        if not fits.any():
            alone[poorest] = True
            continue
        lost = count * (high * wide - cells) + count[poorest] * (high[poorest] * wide[poorest] - cells)
        partners = np.flatnonzero(fits)
        partner = partners[np.lexsort((wide[partners], high[partners], lost[partners]))[0]]
        high[partner], wide[partner] = both_high[partner], both_wide[partner]
        same = (count > 0) & (frames == frames[partner]) & (high == high[partner]) & (wide == wide[partner])
        same[poorest] = True
        together = np.flatnonzero(same)
        joined[together] = partner
        count[partner], largest[partner] = count[together].sum(), largest[together].max()
        count[together[together != partner]] = 0
    while (joined != joined[joined]).any():
        joined = joined[joined]
    return np.stack([frames, high, wide], axis=1)[joined][of_pair.reshape(-1)]


def resize_and_crop(picture: Tensor, size: tuple[int, int], position: str | int = "center") -> Tensor:
    """Scale [3, H, W] until it covers `size` = (width, height), then cut what stands over.

    Antialiased bicubic, clamped to [0, 1].

    Args:
        position: "center", or a seed: the same seed cuts pictures of one aspect ratio at the same relative place,
            whatever their resolution (a before/after pair).
    """
    width, height = size
    scale = max(width / picture.shape[2], height / picture.shape[1])
    scaled = max(height, round(picture.shape[1] * scale)), max(width, round(picture.shape[2] * scale))
    picture = resize(picture, scaled)
    if position == "center":
        down, right = 0.5, 0.5
    else:
        generator = seeded_generator(int(position), "cut", 0)
        down, right = torch.rand(2, dtype=torch.float64, generator=generator).tolist()
    top, left = round(down * (scaled[0] - height)), round(right * (scaled[1] - width))
    return picture[:, top : top + height, left : left + width].contiguous()


def resize(picture: Tensor, size: tuple[int, int]) -> Tensor:
    """[3, H, W] in [0, 1] to `size` = (height, width): bicubic, antialiased when it shrinks, clamped to [0, 1]."""
    if tuple(picture.shape[1:]) == tuple(size):
        return picture
    scaled = functional.interpolate(picture[None], size, mode="bicubic", align_corners=False, antialias=True)
    return scaled[0].clamp(0, 1)


def _around(side: float, multiple: int, shortest: int) -> set[int]:
    """The multiples just below and above `side`, none shorter than `shortest`."""
    below = math.floor(side / multiple) * multiple
    return {max(below, shortest), max(below + multiple, shortest)}
