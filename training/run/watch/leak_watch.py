"""Memory over the steps of a run: a steady slope ends the run before the machine does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from ...errors import TrainingFailed

__all__ = ["LeakWatch", "memory_of", "slope"]

MiB = 2**20


def memory_of(device: torch.device) -> dict[str, int]:
    """Bytes in use, by name: what torch has allocated and reserved on a GPU, the process's resident memory on a CPU.

    Without the pages of mapped files: a run reads its dataset through them, so they grow until all of it has been seen,
    and the system takes them back where it needs room. Shared memory and files on a tmpfs are counted with those, so a
    leak of them is not seen. Empty where the system does not say.
    """
    if device.type == "cuda":
        return {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    except (OSError, ValueError):
        return {}
    return {"resident": (resident - shared) * os.sysconf("SC_PAGE_SIZE")}


def slope(steps: list[int], values: list[int]) -> float:
    """Least squares: bytes a step."""
    mean_step, mean = sum(steps) / len(steps), sum(values) / len(values)
    above = sum((s - mean_step) * (v - mean) for s, v in zip(steps, values, strict=True))
    return above / sum((s - mean_step) ** 2 for s in steps)


class LeakWatch:
    """Looks at the memory every `every` steps and raises TrainingFailed where it grows all the time.

    Growing all the time means: over the steps looked at, the line through them rises by more than `tolerance` bytes,
    and each quarter of them rises at no less than half of that line's slope. A cache that fills, a validation or a
    fragment rises once and then stays. All steps since `warm_up` are looked at, and their later half too, so that a
    leak that starts late is found as well. No more than `MOST` samples are kept: then every second one goes.
    """

    MOST, FEWEST = 256, 16

    def __init__(
        self,
        measure: Callable[[], dict[str, int]],
        *,
        every: int = 10,
        warm_up: int = 50,
        tolerance: int = 256 * MiB,
    ):
        self.measure, self.every, self.warm_up, self.tolerance = measure, every, warm_up, tolerance
        self.steps: list[int] = []
        self.samples: dict[str, list[int]] = {}
        self._seen = 0

    def look(self, step: int) -> None:
        """After each step; `step` is its absolute number, which the sentence names."""
        self._seen += 1
        if self._seen <= self.warm_up or self._seen % self.every:
            return
        measured = self.measure()
        if not measured:
            return
        self.steps.append(step)
        for name, value in measured.items():
            self.samples.setdefault(name, []).append(value)
        for name in measured:
            for first in (0, len(self.steps) // 2):
                self._judge(name, self.steps[first:], self.samples[name][first:])
        if len(self.steps) >= self.MOST:
            self.steps, self.every = self.steps[::2], self.every * 2
            self.samples = {name: values[::2] for name, values in self.samples.items()}

    def _judge(self, name: str, steps: list[int], values: list[int]) -> None:
        count = len(steps)
        if count < self.FEWEST:
            return
        rise = slope(steps, values)
        growth = rise * (steps[-1] - steps[0])
        if growth <= self.tolerance:
            return
        cuts = [count * k // 4 for k in range(5)]
        quarters = [slope(steps[a:b], values[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        if min(quarters) >= rise / 2:
            raise TrainingFailed(
                f"Step {steps[-1]}: expected steady memory, but {name} memory has grown by {rise / MiB:.3g} MiB a step "
                f"since step {steps[0]}, {growth / MiB:,.0f} MiB in all: something keeps the tensors of past steps. "
                "The checkpoints are kept; health.leak_watch false trains on without this watch."
            )

    def summary(self) -> dict[str, dict[str, float]]:
        """For the report: first and last bytes and the slope of each quantity."""
        return {
            name: {
                "first": values[0],
                "last": values[-1],
                "slope_bytes_per_step": round(slope(self.steps, values), 1) if len(values) > 1 else 0.0,
            }
            for name, values in self.samples.items()
        }
