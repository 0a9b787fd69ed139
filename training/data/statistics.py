"""What a dataset measures about itself while it is written."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class ResidualMeter:
    """RMS(z - b) over every element of every pair it is given, each counting as its mask says; in float64."""

    def __init__(self):
        self._sum = 0.0
        self._count: float = 0

    def add(self, z: Tensor, b: Tensor, mask: Tensor | None = None) -> None:
        """Add one pair, both [..., C, h, w]; mask: [..., 1, h, w] in 0..1."""
        squares = (z.double() - b.double()).square()
        if mask is None:
            self._count += z.numel()
        else:
            squares *= mask.double()
            self._count += mask.double().sum().item() * z.shape[-3]
        self._sum += squares.sum().item()

    def rms(self) -> float:
        """The RMS so far, rounded to 9 digits: the order in which a CPU adds must not change a dataset's hash."""
        return float(f"{math.sqrt(self._sum / self._count):.9g}") if self._count else 0.0

    def state(self) -> list[float]:
        """As JSON, for a build that is gone on with."""
        return [self._sum, self._count]

    def restore(self, state: list[float]) -> None:
        self._sum, self._count = state


class PreviewFit:
    """Least squares from latent cells to RGB in [-1, 1], for looking at latents without their VAE.

    rgb[3] = cell[C] @ weight[C, 3] + bias[3]. Only the normal equations are kept, (C+1) x (C+1) numbers, so a dataset
    of any size costs the same.
    """

    def __init__(self, channels: int):
        self._gram = torch.zeros(channels + 1, channels + 1, dtype=torch.float64)
        self._moment = torch.zeros(channels + 1, 3, dtype=torch.float64)
        self._count = 0

    def add(self, latent: Tensor, rgb: Tensor) -> None:
        """Add one latent [C, h, w] and the picture it stands for, [3, h, w] in [-1, 1]."""
        cells = latent.double().flatten(1)
        cells = torch.cat([cells, torch.ones(1, cells.shape[1], dtype=torch.float64)])
        self._gram += cells @ cells.T
        self._moment += cells @ rgb.double().flatten(1).T
        self._count += cells.shape[1]

    def solve(self) -> dict[str, list] | None:
        """{"weight": [C x 3], "bias": [3]}, rounded to 6 digits, or None when nothing was added."""
        if not self._count:
            return None
        # The pseudo-inverse also answers where cells are constant or too few to fix every coefficient.
        solution = torch.linalg.pinv(self._gram / self._count, hermitian=True) @ (self._moment / self._count)
        rows = [[float(f"{value:.6g}") for value in row] for row in solution.tolist()]
        return {"weight": rows[:-1], "bias": rows[-1]}

    def state(self) -> list:
        """As JSON, for a build that is gone on with."""
        return [self._gram.tolist(), self._moment.tolist(), self._count]

    def restore(self, state: list) -> None:
        gram, moment, self._count = state
        self._gram = torch.tensor(gram, dtype=torch.float64)
        self._moment = torch.tensor(moment, dtype=torch.float64)
