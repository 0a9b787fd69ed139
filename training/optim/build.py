"""From a configuration and named parameters to their optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .bf16_adamw import BF16AdamW
from .groups import decay_groups

if TYPE_CHECKING:
    from ..config import OptimizerConfig

__all__ = ["build_optimizer"]


def build_optimizer(
    options: OptimizerConfig, parameters: dict[str, nn.Parameter], seed: int
) -> torch.optim.Optimizer:
    """AdamW; for bfloat16 parameters the one that equals it in float32."""
    groups = decay_groups(parameters, options.weight_decay, everything=options.decay_all)
    if all(parameter.dtype == torch.float32 for parameter in parameters.values()):
        return torch.optim.AdamW(groups, betas=options.betas, fused=True)  # one kernel instead of ten
    names = {parameter: name for name, parameter in parameters.items()}
    return BF16AdamW(
        groups, names, lr=options.learning_rate, betas=options.betas,
        rounding=options.rounding, moments=options.moments, seed=seed, compiled=options.compiled,
    )
