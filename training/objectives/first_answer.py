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

    state: Tensor | None = None
    time: Tensor | None = None
    answer: Tensor | None = None

    def of(self, x: Tensor, t: Tensor, ask: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """ask(x, t), or what it answered first where both are the very same."""
        if self.answer is not None and torch.equal(self.time, t) and torch.equal(self.state, x):
            return self.answer
        answer = ask(x, t)
        if self.answer is None:
            self.state, self.time, self.answer = x, t, answer
        return answer
