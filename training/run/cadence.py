"""How often a run looks at held-out pairs, and when it saves its state.

Both have a default that costs at most 5 % of a run. What a look costs is counted from the configuration and the data
and not measured, so that the same run looks at the same steps, resumed or not. What saving costs is measured: it
changes no byte of what is trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..data.batches import crop_size

if TYPE_CHECKING:
    from ..config.sections import CheckpointConfig
    from ..config.train_config import TrainConfig
    from ..data.shards import RefinerDataset

__all__ = ["CADENCE_VERSION", "CheckpointCadence", "ValidationCadence", "validation_cadence"]

CADENCE_VERSION = 2
"""What validation.every 0 means. 1: once an epoch, at which a run that was begun by an earlier version stays."""

SHARE = 0.05  # of the run, at most
BACKWARD = 2  # forward passes that a backward one costs (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)
# passes in half precision that one of a validation, in float32, is taken to cost: on the safe side, not measured
FLOAT32_COST = 4
MOST_STEPS = 1000  # between two looks where an epoch is longer and they cost little
MOST_MINUTES = 30  # between two checkpoints by default


# ---- validation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValidationCadence:
    """every: steps between two looks; 0 = none. why: one line for people, or ""."""

    every: int
    why: str = ""

    def is_due(self, step: int) -> bool:
        """Whether held-out pairs are looked at after `step` steps."""
        return self.every > 0 and step > 0 and step % self.every == 0


def validation_cadence(
    config: TrainConfig, data: RefinerDataset, *, micro_per_epoch: int, total: int, walk: int
) -> ValidationCadence:
    """When a run of `total` steps looks at its held-out pairs. walk: sampling steps that a look walks."""
    pairs = data.held_out[: config.validation.pictures]
    if not pairs:
        return ValidationCadence(0)
    epoch = max(1, round(micro_per_epoch / config.data.accumulation))
    asked = config.validation.every
    if isinstance(asked, str):
        return ValidationCadence(epoch)
    if asked:
        return ValidationCadence(asked)
    steps = _look(config, data, pairs, walk) / _step(config, data)
    # a look after every n steps takes the share look / (n + look) of all
    affordable = math.ceil(steps * (1 - SHARE) / SHARE)
    every = epoch * math.ceil(affordable / epoch) if epoch <= MOST_STEPS else max(MOST_STEPS, affordable)
    if every == epoch:
        return ValidationCadence(every)
    why = f"a look at {len(pairs)} held-out pairs takes about as long as {steps:,.1f} steps"
    if every > total:
        return ValidationCadence(
            0, f"no validation in mid-training: {why}, more than {SHARE:.0%} of this run; validation.every sets it"
        )
    return ValidationCadence(every, f"validation every {every:,} steps: {why}; validation.every sets it")


def _step(config: TrainConfig, data: RefinerDataset) -> float:
    """Latent cells that go forward through the network in a step, with as many for the way back as it costs."""
    sizes = [crop_size(data.pairs[index], config.data.crop) for index in data.train]
    cells = sum(height * width for height, width in sizes) / max(len(sizes), 1)
    passes = 1 + BACKWARD + (1 if config.gradient_checkpointing else 0)
    return passes * cells * config.data.batch_size * config.data.accumulation


def _look(config: TrainConfig, data: RefinerDataset, pairs: list[int], walk: int) -> float:
    """The same of one look (training/run/validation.py): the averaged weights walk and give the loss at each sigma, the
    others give the loss."""
    sizes = [crop_size(data.pairs[index], config.validation.crop) for index in pairs]
    cells = sum(height * width for height, width in sizes)
    return 3 * walk * cells * (1 if config.precision == "fp32" else FLOAT32_COST)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@dataclass
class CheckpointCadence:
    """Decides after each step whether the state is saved. Times are seconds of one clock.

    last: when it was last saved; at first when the run began.
    """

    options: CheckpointConfig
    last: float
    minutes: float = field(init=False)

    def __post_init__(self) -> None:
        by_default = MOST_MINUTES if self.options.every == 0 else math.inf
        self.minutes = self.options.minutes or by_default

    def is_due(self, step: int, now: float, *, epoch_ended: bool, cost: float, writing: bool) -> bool:
        """cost: seconds that the last one took, 0 where there was none; writing: whether it is not done yet."""
        if now - self.last >= 60 * self.minutes:
            return True
        every = self.options.every
        if isinstance(every, str):
            return epoch_ended
        if every:
            return step % every == 0
        return epoch_ended and not writing and now - self.last >= cost * (1 - SHARE) / SHARE

    def saved(self, now: float) -> None:
        """To be told whenever the state was saved, for whatever reason."""
        self.last = now
