"""Looking at held-out pairs in mid-training, in float32 whatever the run computes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..objectives.evaluate import FLOAT32
from .report import report as reports

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..config.train_config import TrainConfig
    from ..data.shards import RefinerDataset
    from ..objectives.base import Objective
    from .optim.ema import EMA
    from .plan import Plan
    from .report.journal import Journal

__all__ = ["Validation"]


@dataclass
class Validation:
    """Measures the networks of one run. exact: the float32 weight that the optimizer has of a parameter."""

    config: TrainConfig
    plan: Plan
    data: RefinerDataset
    objective: Objective
    net: nn.Module
    ema: EMA
    exact: Callable[[nn.Parameter], Tensor]
    parameters: dict[str, nn.Parameter]
    version: int = FLOAT32  # a run goes on as it began, so that its best is the best of like figures

    def begun_with(self, version: int) -> str:
        """Go on measuring as a run that began with `version`; returns a sentence where that makes a difference."""
        unet, adapters = self.plan.objective.unet, self.plan.objective.adapters
        if version == FLOAT32 or not (self.plan.compute.autocast or adapters or unet.pooled_dim):
            return ""
        self.version = version
        return (
            "This run was begun by an earlier version: its held-out pairs go on being measured in the run's own "
            "precision, so that they can be compared with those before; a new run measures them in float32."
        )

    def look(self, step: int, journal: Journal, should_stop: Callable[[], bool]) -> Image | None:
        """Measure a few held-out pairs, with the averaged weights and with those as they are, into the journal; returns
        the strip of pictures, None where it was broken off."""
        config, plan = self.config, self.plan
        pairs = self.data.held_out[: config.validation.pictures]
        with self._averaged() as (averaged, dtype):
            measured = self.objective.evaluate(
                averaged, pairs, step_counts=(len(plan.objective.sigmas) - 1,), sharpening=False,
                should_stop=should_stop, version=self.version, dtype=dtype,
            )
        if should_stop():  # broken off: half of the pairs are no measure
            return None
        with self._unaveraged() as (unaveraged, dtype):
            loss = self.objective.evaluate(
                unaveraged, pairs, step_counts=(), sharpening=False, should_stop=should_stop, version=self.version,
                dtype=dtype,
            ).loss
        if should_stop():
            return None
        row = measured.rows[next(name for name in measured.rows if name.endswith(("step", "steps")))]
        values = {f"validation/{name}": value for name, value in row.items()}
        path = config.run / "validation" / f"step-{step:08d}.png"
        path.parent.mkdir(exist_ok=True)
        picture = reports.save_grid(measured.pictures, path)
        # last: what is in the journal is not measured again
        journal.write(step, **{"validation/loss": measured.loss, "validation/loss_unaveraged": loss}, **values)
        return picture

    # ---- the networks, and the dtype of their weights ----------------------------------------------------------------

    @contextmanager
    def _averaged(self) -> Iterator[tuple[nn.Module, torch.dtype]]:
        if self._frozen_are_rounded() and self.version == FLOAT32:
            yield self.objective.merged(self.ema.state_dict()), torch.float32
        else:
            dtype = self.plan.compute.weights if self._frozen_are_rounded() else torch.float32
            with self.ema.swapped(self.net) as net:
                yield net, dtype

    @contextmanager
    def _unaveraged(self) -> Iterator[tuple[nn.Module, torch.dtype]]:
        weights = self.plan.compute.weights
        if weights == torch.float32 or self.version < FLOAT32:
            yield self.net, weights
        elif self._frozen_are_rounded():
            exact = {name: self.exact(parameter) for name, parameter in self.parameters.items()}
            yield self.objective.merged(exact), torch.float32
        else:
            # in the average's place: another set of weights in float32 could be more than the device holds
            averages = {name: tensor.to("cpu", copy=True) for name, tensor in self.ema.state_dict().items()}
            try:
                self.ema.load_state_dict(_Lazily(lambda name: self.exact(self.parameters[name])))
                with self.ema.swapped(self.net) as net:
                    yield net, torch.float32
            finally:
                self.ema.load_state_dict(averages)

    def _frozen_are_rounded(self) -> bool:
        """Whether the network under the adapters is in bfloat16."""
        return self.plan.objective.adapters is not None and self.plan.compute.weights != torch.float32


class _Lazily(dict):
    """Gives what is asked for as it is asked for, one tensor at a time."""

    def __init__(self, make: Callable[[str], Tensor]):
        self.make = make

    def __missing__(self, name: str) -> Tensor:
        return self.make(name)
