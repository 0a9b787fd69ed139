"""Where a run stands, beside its tensors: all that changes from step to step. state.json keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from ..objectives.evaluate import FLOAT32

__all__ = ["EXACT", "ROUNDED", "State"]

EXACT, ROUNDED = "exact weights", "rounded weights"
"""Of what a pure_bf16 run makes its averaged weights; checkpoints that do not say it are of the latter kind."""


@dataclass
class State:
    """A run goes on as it began: `average_of` and `measured_as` are those of the version that began it."""

    step: int = 0  # optimizer steps that are done
    seconds: float = 0.0  # of training, over all sessions
    average_of: str = EXACT  # which weights are averaged
    measured_as: int = FLOAT32  # how held-out pairs are measured
    began_at: int = 0  # the step at which this session began
    seconds_before: float = 0.0  # of training, before this session

    @property
    def steps_here(self) -> int:
        return self.step - self.began_at

    def remaining(self, total: int) -> float:
        """Seconds that the steps up to `total` will take, at the pace so far."""
        return self.seconds / self.step * (total - self.step)
