"""The network's answer at the state where all walks of one pair begin, asked for once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FirstAnswer"]


@dataclass
class FirstAnswer:
    """Walks of 1, 2, 4 and 8 steps begin at one state and time, and a loss is measured there too."""

    first: tuple[Tensor, Tensor, Tensor] | None = None  # state, time, answer

    def of(self, x: Tensor, t: Tensor, ask: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """ask(x, t), or what it answered first where both are the very same."""
        if self.first is not None and torch.equal(self.first[1], t) and torch.equal(self.first[0], x):
            return self.first[2]
        answer = ask(x, t)
        if self.first is None:
            self.first = x, t, answer
        return answer
