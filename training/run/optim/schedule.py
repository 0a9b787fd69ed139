"""Learning rate over optimizer steps: pure functions of the step, so that there is no state to keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config.choices import Extension
from ...config.choices import Schedule as Kind

if TYPE_CHECKING:
    from ...config.sections import OptimizerConfig

__all__ = ["Schedule", "schedule_of", "warmup_schedule"]


def warmup_schedule(step: int, warmup: int, horizon: int, kind: Kind = "cosine", floor: float = 0.0) -> float:
    """Factor on the peak rate for optimizer step `step` (0-based): linear up over `warmup` steps, then down to `floor`.

    cosine    floor + (1 - floor) (1 + cos(pi x)) / 2, x from 0 at the end of the warm-up to 1 at the horizon: SGDR
              without restarts (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, with eta_min = floor)
    linear    1 - (1 - floor) x
    constant  1, whatever the horizon

    Past the horizon it stays `floor`.
    """
    if step >= horizon and kind != "constant":
        return floor
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if kind == "constant":
        return 1.0
    after, length = step - warmup, max(horizon - warmup, 1)
    # in this order, to the last bit the rate of runs that were begun before there was a floor
    falling = 0.5 * (1.0 + math.cos(math.pi * after / length)) if kind == "cosine" else 1.0 - after / length
    return floor + (1.0 - floor) * falling


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run, which may have been finished at other lengths before it was made this long.

    horizon: steps until the rate is at its floor.
    earlier: lengths in steps at which the run was finished before, rising; up to each of them the rate was that of a
        run of that length. Empty where the rate does not depend on the length.
    extension: after the last of `earlier`: "constant", the rate of the last step before; "stretch", that of a run of
        the whole length.
    """

    peak: float
    warmup: int
    horizon: int
    kind: Kind = "cosine"
    floor: float = 0.0
    earlier: tuple[int, ...] = ()
    extension: Extension = "refuse"

    def factor(self, step: int) -> float:
        """Share of the peak rate of the step that follows `step` finished ones."""
        if self.earlier and self.extension == "constant":
            horizon = self.earlier[0]
            return self._over(min(step, horizon - 1), horizon)
        return self._over(step, next((length for length in self.earlier if step < length), self.horizon))

    def rate(self, step: int) -> float:
        """The learning rate of the step that follows `step` finished ones."""
        return self.peak * self.factor(step)

    def _over(self, step: int, horizon: int) -> float:
        return warmup_schedule(step, self.warmup, horizon, self.kind, self.floor)

    def sentences(self, total: int) -> list[str]:
        """What a person should know of the rate of a run of `total` steps, beside what is usual."""
        said = []
        if self.kind != "cosine" or self.floor:
            falls = "stays at its peak" if self.kind == "constant" else f"falls to {self.floor:.1%} of its peak"
            said.append(f"learning rate: {self.kind}, {falls}")
        if self.earlier:
            last = self.earlier[-1]
            then = f"goes on at its last rate, {self.rate(last):.3g}"
            if self.extension == "stretch":
                then = f"takes the place on the schedule over all {total:,} steps, so it jumps to {self.rate(last):.3g}"
            said.append(f"a run that was finished after {last:,} steps is made longer: the learning rate {then}")
        if self.kind != "constant" and self.horizon < total:
            # AdamW's steps and its decay are both multiples of the rate
            still = f"{self.peak * self.floor:.3g}" if self.floor else "0, and nothing is learnt any more"
            said.append(f"from step {self.horizon:,} (optimizer.horizon_steps) on the learning rate is {still}")
        return said


def schedule_of(options: OptimizerConfig, total: int) -> Schedule:
    """The learning rate of a run of `total` steps."""
    return Schedule(
        peak=options.learning_rate, warmup=options.warmup_steps, horizon=options.horizon_steps or total,
        kind=options.schedule, floor=options.floor, earlier=options.extended_from, extension=options.extension,
    )
