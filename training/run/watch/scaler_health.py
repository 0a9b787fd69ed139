"""What the loss scaler of FP16 does, step by step, and when it has stopped to be any use."""

from __future__ import annotations

from typing import Any

__all__ = ["ScalerHealth"]

HISTORY = 1000  # changes kept; a healthy scale changes every 2,000 steps


class ScalerHealth:
    """Scale history and skipped steps of one run.

    torch's scaler halves its scale at each step whose gradients are not finite, without a floor and without an error.
    At about the 170th in a row the scale is exactly 0. The next good batch then has gradients of 0 * inf = NaN that the
    scaler does not flag, and the optimizer writes them into the weights. So a run has to end long before.

    most_skips: skipped steps in a row at which it ends; floor: scale below which it ends.
    """

    def __init__(self, most_skips: int, floor: float):
        self.most_skips, self.floor = most_skips, floor
        self.in_a_row, self.skipped = 0, 0
        self.history: list[list[float]] = []  # [step, scale from the next step on], where it changed

    def record(self, step: int, taken: bool, scale: float) -> str:
        """Note a step and the scale that the scaler has after it; returns why the run must end, or ""."""
        self.in_a_row = 0 if taken else self.in_a_row + 1
        self.skipped += not taken
        if not self.history or self.history[-1][1] != scale:
            self.history = [*self.history, [step, scale]][-HISTORY:]
        if self.in_a_row >= self.most_skips:
            return f"{self.in_a_row} steps in a row were skipped"
        if scale < self.floor:
            return f"the loss scale fell to {scale:g}, below {self.floor:g}"
        return ""

    def tail(self, count: int = 5) -> str:
        """The last scales in words, for a sentence: "65536, 32768, 16384"."""
        return ", ".join(f"{scale:g}" for _, scale in self.history[-count:])

    def state(self) -> dict[str, Any]:
        """As JSON, for checkpoints and the report."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "history": self.history}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; what an older checkpoint does not have starts anew."""
        self.skipped, self.in_a_row = state.get("skipped", 0), state.get("in_a_row", 0)
        self.history = [list(entry) for entry in state.get("history", [])]
