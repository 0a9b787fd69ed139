"""One AdamW update in float32, as functions on flat tensors that torch.compile can fuse into one pass."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...config.choices import Rounding
from .noise import bits_of
from .rounding import join_float32, round_stochastically, split_float32

__all__ = ["adamw_", "step_coefficients", "update_"]

_MOMENTS_SALT = 0x3C6EF372  # the moments are rounded by other bits than the weights


def step_coefficients(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[float, ...]:
    """What a step (from 1) multiplies with; worked out once, in double precision."""
    beta1, beta2 = betas
    root = math.sqrt(1 - beta2**step)
    return 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, eps * root, -lr * root / (1 - beta1**step)


def adamw_(p: Tensor, g: Tensor, m: Tensor, v: Tensor, coefficients: tuple[float | Tensor, ...]) -> None:
    """Loshchilov & Hutter 2019 (arXiv:1711.05101), algorithm 2, in place.

    p, g, m, v: weights, gradient and the two moments, float32 of one shape; coefficients: from `step_coefficients`.
    """
    keep, new1, beta2, new2, eps, rate = coefficients
    p.mul_(keep)
    m.lerp_(g, new1)
    v.mul_(beta2).add_(g.square().mul_(new2))
    p.add_(m.div(v.sqrt().add_(eps)).mul_(rate))


def update_(
    w: Tensor, rest: Any, g: Tensor, m: Tensor, v: Tensor, coefficients: tuple[float | Tensor, ...],
    first: Tensor | int, second: Tensor | int, index: Any, rounding: Rounding | None,
) -> None:
    """AdamW in place on flat tensors, the whole update in float32 and rounded once.

    w: weights in bfloat16, or in float32 with rounding None; rest: what `rounding` keeps beside them ("kahan": int16,
    "master": float32, else None); g in any float dtype; m, v: float32, or bfloat16, which is rounded stochastically;
    first, second: a stream key, one for all or one an element; index: a tensor, of each element in its parameter; None
    = 0...
    """
    if rounding == "master":
        p = rest
    elif rounding == "kahan":
        p = join_float32(w, rest)
    else:
        p = w.float()
    m32, v32 = m.float(), v.float()
    adamw_(p, g.float(), m32, v32, coefficients)
    low_moments = m.dtype == torch.bfloat16
    if index is None and (low_moments or rounding == "stochastic"):
        index = torch.arange(w.numel(), dtype=torch.int32, device=w.device)
    if low_moments:
        bits = bits_of(index, first, second ^ _MOMENTS_SALT)
        m.copy_(round_stochastically(m32, bits))
        v.copy_(round_stochastically(v32, bits >> 16))
    if rounding == "stochastic":
        w.copy_(round_stochastically(p, bits_of(index, first, second)))
    elif rounding == "kahan":
        nearest, dropped = split_float32(p)
        w.copy_(nearest)
        rest.copy_(dropped)
    elif rounding == "master":
        w.copy_(p)
