"""Exponential moving average of the weights: what is validated, exported and sampled with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...objectives.trainables import trainables


def ema_decay(updates: int, decay: float) -> float:
    """min(d, (1 + n) / (10 + n)): early averages forget their random start (TensorFlow's num_updates rule)."""
    return min(decay, (1 + updates) / (10 + updates))


class EMA:
    """The averages of a network's trained parameters, by name: tensors in float32 at least, that follow them.

    What is frozen has none: it never moves.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        self._live = trainables(net)
        self._averages = {
            name: live.detach().to(torch.promote_types(live.dtype, torch.float32), copy=True)
            for name, live in self._live.items()
        }

    @torch.no_grad()
    def update(self, updates: int, exact: Callable[[nn.Parameter], Tensor] | None = None) -> None:
        """average <- d average + (1 - d) live, with d for the number of updates made before this one.

        exact: the float32 weight of a parameter that is not float32 itself (build.py); None = what it holds.
        """
        d = ema_decay(updates, self.decay)
        averages, lives = list(self._averages.values()), list(self._live.values())
        if any(live.dtype != average.dtype for average, live in zip(averages, lives, strict=True)):
            # one by one: float32 copies of all weights at once would be the peak of a whole step
            for average, live in zip(averages, lives, strict=True):
                average.lerp_(exact(live) if exact else live.detach().to(average.dtype), 1.0 - d)
        else:
            torch._foreach_lerp_(averages, [live.detach() for live in lives], 1.0 - d)

    @contextmanager
    def swapped(self, net: nn.Module) -> Iterator[nn.Module]:
        """Within the block `net`, which may be wrapped, has the averages in the place of its trained weights, and is in
        evaluation mode. No tensor is copied; the weights are not to be changed meanwhile."""
        parameters, training = trainables(net), net.training
        weights = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self._averages[name]
            yield net.eval()
        finally:
            for name, parameter in parameters.items():
                parameter.data = weights[name]
            net.train(training)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by name; the tensors themselves."""
        return dict(self._averages)

    @torch.no_grad()
    def load_state_dict(self, weights: dict[str, Tensor]) -> None:
        for name, average in self._averages.items():
            average.copy_(weights[name])
