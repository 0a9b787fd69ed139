"""Which pictures are held out: whole groups of siblings, so that none is trained on and tested on at once."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import BadInput
from .pictures import to_uint8

HASH_BITS = 64
# Two pictures whose 64-bit hashes differ in at most so many bits count as one (a crop, a recolouring, a next frame).
NEAR = 8
# A stem that more pictures share is a numbered series (IMG_0001 ... IMG_0500), and says nothing about likeness.
MOST_SIBLINGS = 8


def perceptual_hash(picture: Tensor) -> str:
    """The 64-bit pHash of [3, H, W] in [0, 1], as 16 hex digits.

    The picture at 32 x 32 pixels in grey; of its cosine transform the 8 x 8 lowest frequencies, row by row: a 1 for
    each above their median. The same bits as ImageHash's `phash`.
    """
    from scipy.fft import dct

    small = Image.fromarray(to_uint8(picture)).convert("L").resize((32, 32), Image.Resampling.LANCZOS)
    low = dct(dct(np.asarray(small, dtype=np.float64), axis=0), axis=1)[:8, :8]
    bits = (low > np.median(low)).flatten()
    return f"{int(''.join('01'[bit] for bit in bits.tolist()), 2):016x}"


def group_of(name: str) -> str:
    """A picture's name without its suffix and a trailing -N or _N: "a/fox-2.webp" -> "a/fox"."""
    return re.sub(r"(?<=[^/])[-_]\d+$", "", _stem(name))


def split(
    names: Sequence[str], hashes: Sequence[str] | None, held_out: int | float, seed: int
) -> dict[str, tuple[str, str]]:
    """Put every picture on one side: {name: (group, "train" | "held_out")}.

    Pictures are joined into groups by name (`group_of`, unless the number only counts a series) and by perceptual hash
    (64 bits, at most 8 different; joined pictures join their groups). Groups go over in an order drawn from `seed` and
    their names, those that fit first, until enough pictures are held out; one group always stays for training, even if
    fewer pictures are then held out than asked. The answer does not depend on the order of `names`.

    Args:
        hashes: from `perceptual_hash`, in the order of `names`; None to go by names alone.
        held_out: an int is the number of pictures wanted at least, a float below 1 their share.

    Raises:
        BadInput: `held_out` out of its range, or all pictures are of one group.
    """
    wanted = _wanted(held_out, len(names))
    members: dict[str, list[str]] = {}
    for name, group in zip(names, _join(names, hashes), strict=True):
        members.setdefault(group, []).append(name)
    if wanted and len(members) == 1:
        raise BadInput(
            f"All {len(names)} pictures look or are named alike, so none can be held out: add pictures of "
            "something else, or hold out 0."
        )
    queue = sorted(members, key=lambda group: hashlib.sha256(f"{seed}/{group}".encode()).digest())
    held: set[str] = set()
    count = 0
    for group in queue:
        if count + len(members[group]) <= wanted and len(held) < len(members) - 1:
            held.add(group)
            count += len(members[group])
    # What still lacks can only be filled by going over the number; the smallest groups go over it least.
    for group in sorted((group for group in queue if group not in held), key=lambda group: len(members[group])):
        if count >= wanted or len(held) == len(members) - 1:
            break
        held.add(group)
        count += len(members[group])
    return {
        name: (group, "held_out" if group in held else "train") for group, inside in members.items() for name in inside
    }


def _wanted(held_out: int | float, pictures: int) -> int:
    if isinstance(held_out, float) and not held_out.is_integer():
        if not 0 < held_out < 1:
            raise BadInput(f"held_out must be a number of pictures or a share below 1, not {held_out}.")
        return math.ceil(held_out * pictures)
    if not 0 <= held_out < max(pictures, 1):
        raise BadInput(f"held_out must be at least 0 and below the {pictures} pictures there are, not {held_out}.")
    return int(held_out)


def _join(names: Sequence[str], hashes: Sequence[str] | None) -> list[str]:
    """The group of each picture: union-find over equal keys and near hashes, named by its first key."""
    keys = _keys(names)
    parent = {key: key for key in keys}

    def root(key: str) -> str:
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for i, j in _near(hashes) if hashes else ():
        first, second = sorted((root(keys[i]), root(keys[j])))
        parent[second] = first  # the smaller name stays the root, so a group's name depends on no order
    return [root(key) for key in keys]


def _keys(names: Sequence[str]) -> list[str]:
    siblings = Counter(group_of(name) for name in names)
    if len(siblings) == 1:  # the names tell nothing apart; the hashes may
        return [_stem(name) for name in names]
    return [group_of(name) if siblings[group_of(name)] <= MOST_SIBLINGS else _stem(name) for name in names]


def _near(hashes: Sequence[str]) -> list[tuple[int, int]]:
    """All pairs i < j of hashes that differ in at most NEAR bits, in blocks: 10,000 pictures are 50 million pairs."""
    signs = torch.tensor([[1.0 if int(h, 16) >> bit & 1 else -1.0 for bit in range(HASH_BITS)] for h in hashes])
    found = []
    for start in range(0, len(signs), 1024):
        different = (HASH_BITS - signs[start : start + 1024] @ signs.T) / 2
        found += [(start + i, j) for i, j in (different <= NEAR).nonzero().tolist() if start + i < j]
    return found


def _stem(name: str) -> str:
    return PurePosixPath(name).with_suffix("").as_posix()
