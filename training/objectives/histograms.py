"""Which times a run was trained on: for the report, where they can be compared with the sigmas of the sampler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["TimesHistogram", "TimestepHistogram"]

BINS = 20


class TimesHistogram:
    """Counts training times: on each of the run's own sigmas, and in 20 equal parts of (0, 1] those beside them."""

    def __init__(self, grid: Tensor):
        self.grid = grid.float()
        self.on_grid = torch.zeros(len(grid), dtype=torch.int64)
        self.beside = torch.zeros(BINS, dtype=torch.int64)

    def add(self, t: Tensor) -> None:
        """t: [B] in (0, 1]. Counted on its device, so that nothing is waited for."""
        self.grid, self.on_grid, self.beside = (x.to(t.device) for x in (self.grid, self.on_grid, self.beside))
        same = t[:, None] == self.grid
        self.on_grid += same.sum(0)
        bins = ((t * BINS).ceil().long() - 1).clamp(0, BINS - 1)
        self.beside.scatter_add_(0, bins, (~same.any(1)).long())

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {"on_grid": self.on_grid.tolist(), "beside": self.beside.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; of a checkpoint without one, or for another grid, nothing was counted."""
        if len(state.get("on_grid", [])) == len(self.grid) and len(state.get("beside", [])) == BINS:
            self.on_grid, self.beside = (torch.tensor(state[name]) for name in ("on_grid", "beside"))

    def as_json(self) -> dict[str, dict[str, int]]:
        """For the report: count at each sigma, and count of the others up to each upper edge."""
        return {
            "on_sigmas": {f"{t:g}": count for t, count in zip(self.grid.tolist(), self.on_grid.tolist(), strict=True)},
            "beside_them_up_to": {f"{(k + 1) / BINS:g}": count for k, count in enumerate(self.beside.tolist())},
        }


class TimestepHistogram:
    """Counts discrete training timesteps 0..last, each one for itself."""

    WIDTH = 10  # timesteps a line of the report

    def __init__(self, last: int):
        self.counts = torch.zeros(last + 1, dtype=torch.int64)

    def add(self, k: Tensor) -> None:
        """k: [B], int64. Counted on its device, so that nothing is waited for."""
        self.counts = self.counts.to(k.device)
        self.counts.scatter_add_(0, k, torch.ones_like(k))

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint."""
        return {"timesteps": self.counts.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; of a checkpoint for other timesteps nothing was counted."""
        if len(state.get("timesteps", [])) == len(self.counts):
            self.counts = torch.tensor(state["timesteps"])

    def as_json(self) -> dict[str, dict[str, int]]:
        """For the report: "0 to 9", "10 to 19", ..."""
        parts = self.counts.split(self.WIDTH)
        firsts = range(0, len(self.counts), self.WIDTH)
        return {
            "timesteps": {
                f"{first} to {first + len(part) - 1}": int(part.sum())
                for first, part in zip(firsts, parts, strict=True)
            }
        }
