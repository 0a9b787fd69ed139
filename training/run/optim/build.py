"""From a configuration and named parameters to their optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .bf16_adamw import BF16AdamW
from .groups import decay_groups

if TYPE_CHECKING:
    from ...config.sections import OptimizerConfig

__all__ = ["begin_from", "build_optimizer", "exact_weights"]


def build_optimizer(
    options: OptimizerConfig, parameters: dict[str, nn.Parameter], seed: int
) -> torch.optim.Optimizer:
    """AdamW; for bfloat16 parameters the one that equals it in float32."""
    groups = decay_groups(parameters, options.weight_decay, everything=options.decay_all)
    if all(parameter.dtype in (torch.float32, torch.float64) for parameter in parameters.values()):
        return torch.optim.AdamW(groups, betas=options.betas, eps=options.eps, fused=True)  # one kernel instead of ten
    names = {parameter: name for name, parameter in parameters.items()}
    return BF16AdamW(
        groups, names, lr=options.learning_rate, betas=options.betas, eps=options.eps,
        rounding=options.chosen_rounding, moments=options.moments, seed=seed, compiled=options.compiled,
    )


def begin_from(optimizer: torch.optim.Optimizer, exact: dict[nn.Parameter, Tensor]) -> None:
    """Begin at float32 weights, before the first step; float32 parameters hold them already."""
    if isinstance(optimizer, BF16AdamW):
        optimizer.begin_from(exact)


def exact_weights(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], Tensor]:
    """parameter -> the float32 weight that the optimizer has, which a bfloat16 parameter holds rounded."""
    return optimizer.exact if isinstance(optimizer, BF16AdamW) else lambda parameter: parameter.detach()
