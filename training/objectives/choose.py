"""From `objective` in a configuration to its numbers, and to the object that a run asks of it."""

from __future__ import annotations

from ..config.train_config import TrainConfig
from ..data.shards import RefinerDataset
from .base import Compute, Objective, ObjectivePlan
from .residual.objective import ResidualFlow
from .residual.plan import plan_residual
from .sdxl_refiner.objective import SDXLRefinerObjective
from .sdxl_refiner.plan import plan_sdxl_refiner

__all__ = ["choose_objective", "plan_objective"]

_KINDS = {
    "residual": (plan_residual, ResidualFlow),
    "sdxl_refiner": (plan_sdxl_refiner, SDXLRefinerObjective),
}


def plan_objective(config: TrainConfig, data: RefinerDataset, choices: list[str]) -> ObjectivePlan:
    """The objective's own numbers, each choice with its reason appended to `choices`; BadInput where the dataset does
    not fit."""
    plan, _ = _KINDS[config.objective]
    return plan(config, data, choices)


def choose_objective(
    config: TrainConfig, plan: ObjectivePlan, data: RefinerDataset, compute: Compute
) -> Objective:
    """plan: from `plan_objective` of the same configuration and dataset."""
    _, objective = _KINDS[config.objective]
    return objective(config, plan, data, compute)
