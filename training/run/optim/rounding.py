"""From float32 to bfloat16 without losing what is small: rounded at random, or with the dropped part kept.

A bfloat16 is the upper half of a float32, so both are a few integer operations on the bits. Every NaN stays NaN: added
to a NaN's bits, noise would carry 0x7FFFFFFF over into -0.0 and drop 0x7F800001's last bit, which makes infinity of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["join_float32", "round_stochastically", "split_float32"]

_UPPER = -0x10000  # 0xFFFF0000 as a signed number


def round_stochastically(x: Tensor, noise: Tensor) -> Tensor:
    """To one of the two bfloat16 neighbours, to the farther one the rarer the farther it is: right on average.

    x: float32; noise: int32 of which the low 16 bits are uniform, the same shape. Returns bfloat16.
    """
    rounded = (noise & 0xFFFF).add_(x.view(torch.int32)).bitwise_and_(_UPPER).view(torch.float32)
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def split_float32(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (its nearest bfloat16, the rest as int16 in units of the float32's last place). Nothing is lost."""
    bits = x.view(torch.int32)
    nearest = (bits + 0x8000).bitwise_and_(_UPPER)
    nearest = torch.where(x.isnan(), bits & _UPPER | 0x400000, nearest)
    rest = torch.where(x.isnan(), 0, bits - nearest)
    return nearest.view(torch.float32).to(torch.bfloat16), rest.to(torch.int16)


def join_float32(nearest: Tensor, rest: Tensor) -> Tensor:
    """The inverse of `split_float32`: the very float32."""
    return (nearest.float().view(torch.int32) + rest).view(torch.float32)
