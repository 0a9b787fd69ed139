"""Exponential moving average of the weights: what is validated, exported and sampled with."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...objectives.trainables import fill, trainables


def ema_decay(updates: int, decay: float) -> float:
    """min(d, (1 + n) / (10 + n)): early averages forget their random start (TensorFlow's num_updates rule)."""
    return min(decay, (1 + updates) / (10 + updates))


class EMA:
    """A copy of a network whose trained parameters, in float32, follow the original's; `net` is ready to be called.

    What is frozen is not copied: it never moves, so both networks have the same tensors.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        shared = {id(parameter): parameter for parameter in net.parameters() if not parameter.requires_grad}
        self.net = copy.deepcopy(net, shared).eval()
        self._live, self._averaged = list(trainables(net).values()), trainables(self.net)
        for parameter in self._averaged.values():
            parameter.data = parameter.data.float()
        self.net.requires_grad_(False)

    @torch.no_grad()
    def update(self, updates: int, exact: Callable[[nn.Parameter], Tensor] | None = None) -> None:
        """average <- d average + (1 - d) live, with d for the number of updates made before this one.

        exact: the float32 weight of a parameter that is not float32 itself (build.py); None = what it holds.
        """
        d = ema_decay(updates, self.decay)
        averaged = list(self._averaged.values())
        if any(live.dtype != torch.float32 for live in self._live):
            # one by one: float32 copies of all weights at once would be the peak of a whole step
            for average, live in zip(averaged, self._live, strict=True):
                average.lerp_(exact(live) if exact else live.detach().float(), 1.0 - d)
        else:
            torch._foreach_lerp_(averaged, [p.detach() for p in self._live], 1.0 - d)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages alone, by name."""
        return dict(self._averaged)

    def load_state_dict(self, weights: dict[str, Tensor]) -> None:
        fill(self._averaged, weights)
