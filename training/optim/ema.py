"""Exponential moving average of the weights: what is validated, exported and sampled with."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def ema_decay(updates: int, decay: float) -> float:
    """min(d, (1 + n) / (10 + n)): early averages forget their random start (TensorFlow's num_updates rule)."""
    return min(decay, (1 + updates) / (10 + updates))


class EMA:
    """A float32 copy of a network whose parameters follow the original's; `net` is ready to be called."""

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        self.net = copy.deepcopy(net).float().eval().requires_grad_(False)
        self._live, self._averaged = list(net.parameters()), list(self.net.parameters())
        self._low = any(parameter.dtype != torch.float32 for parameter in self._live)

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """average <- d average + (1 - d) live, with d for the number of updates made before this one."""
        d = ema_decay(updates, self.decay)
        if self._low:  # one by one: float32 copies of all weights at once would be the peak of a whole step
            for average, live in zip(self._averaged, self._live, strict=True):
                average.lerp_(live.detach().float(), 1.0 - d)
        else:
            torch._foreach_lerp_(self._averaged, [p.detach() for p in self._live], 1.0 - d)

    def state_dict(self) -> dict[str, Tensor]:
        return self.net.state_dict()

    def load_state_dict(self, weights: dict[str, Tensor]) -> None:
        self.net.load_state_dict(weights)
