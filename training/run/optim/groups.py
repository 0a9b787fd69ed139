"""Which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["decay_groups"]


def decay_groups(
    parameters: dict[str, nn.Parameter], weight_decay: float, *, everything: bool = False
) -> list[dict[str, Any]]:
    """Decay pulls matrices and kernels towards zero; norms and biases have no reason to go there, unless asked."""
    kernels = [p for p in parameters.values() if p.ndim > 1 or everything]
    others = [p for p in parameters.values() if not (p.ndim > 1 or everything)]
    return [{"params": kernels, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
