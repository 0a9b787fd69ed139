"""What every objective says alike: where a file comes from, and what stands in for text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ..config.train_config import TrainConfig
    from ..data.shards import RefinerDataset
    from ..run.plan import Plan

__all__ = ["empty_conditioning", "provenance"]


def empty_conditioning(plan: Plan, data: RefinerDataset) -> dict[str, Tensor]:
    """What the KSampler gets where there is no text: the encoded empty caption, or one token of zeros."""
    empty = data.empty_context() or {"context": torch.zeros(1, plan.unet.context_dim)}
    if plan.unet.pooled_dim:
        empty.setdefault("pooled", torch.zeros(plan.unet.pooled_dim))
    return empty


def provenance(config: TrainConfig, plan: Plan, data: RefinerDataset, steps: int | None) -> dict[str, Any]:
    """For the metadata of a trained file. steps: of the training that made it; None = all of the run."""
    return {
        "dataset": data.content_hash,
        "pairs": len(data.train),
        "steps": plan.total_steps if steps is None else steps,
        "config": config.identity(),
        "parameters": plan.size.parameters,
    }
