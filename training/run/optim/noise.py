"""Random bits that belong to an element, not to a moment: a hash of (seed, step, parameter, element, purpose).

No generator is involved, so the bits of an element are the same on every device, in any order and for any way to
split a tensor over processes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Block", "Key", "bits_of", "stream_key"]

Key = tuple[int, int]

# The mixing steps are those of lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018, public domain), with
# the second half of the key folded in between. The constants are written as signed 32-bit numbers.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32
_INT32 = 2**32


@dataclass(frozen=True)
class Block:
    """Where a local piece lies in the whole parameter: the whole's shape and the piece's first element in each
    dimension. A whole parameter needs none."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]


def stream_key(seed: int, step: int, name: str) -> Key:
    """64 bits for one parameter at one step, as two signed 32-bit numbers; `name` is the parameter's full name."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little", signed=True), int.from_bytes(digest[4:], "little", signed=True)


def bits_of(index: Tensor, first: Tensor | int, second: Tensor | int) -> Tensor:
    """32 random bits for each element index. int32 [n], a key's two halves (numbers or int32 [n]) -> int32 [n]

    Indices that are 2^32 apart share their bits.
    """
    x = index + first
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # the masks make torch's arithmetic shift a logical one
    x *= _FIRST
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x ^= second
    x *= _SECOND
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def wrapped(value: int) -> int:
    """A whole number as the signed 32-bit number with the same low bits."""
    return (value + 2**31) % _INT32 - 2**31


def block_index(shape: tuple[int, ...], block: Block, device: torch.device) -> Tensor:
    """Index in the whole parameter of every element of a piece, in the piece's own order. int32 [numel]"""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for size, whole, offset in reversed(list(zip(shape, block.whole, block.offset, strict=True))):
        along = (torch.arange(size, device=device) + offset) * stride
        index = along.reshape(-1, *(1,) * index.ndim) + index
        stride *= whole
    index = index.reshape(-1)
    return ((index + 2**31) % _INT32 - 2**31).to(torch.int32)
