"""What a run asks of any objective: its numbers (ObjectivePlan), its work (Objective), and what all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from ..config.network import UNetConfig
    from ..config.train_config import TrainConfig
    from ..data.batches import Draw
    from ..data.shards import RefinerDataset
    from .evaluate import Evaluation
    from .residual.lora import Adapters
    from .size import Size

__all__ = ["Compute", "Histogram", "Objective", "ObjectivePlan", "empty_conditioning", "provenance"]


@dataclass(frozen=True)
class Compute:
    """Where a run computes, and in which dtypes."""

    device: torch.device
    autocast: torch.dtype | None
    weights: torch.dtype  # of the network in training; the averaged one is float32


@dataclass(frozen=True, kw_only=True)
class ObjectivePlan:
    """The numbers that every objective has; each adds its own in its plan.py."""

    unet: UNetConfig
    size: Size
    sigmas: list[float]  # the run's own sampling times, the final 0 included
    adapters: Adapters | None = None  # what of the network is trained, where not all is

    @property
    def loss_of_nothing(self) -> float:
        """The loss of a network that predicts nothing."""
        return 1.0

    def report(self) -> dict[str, Any]:
        """The numbers that stand in report.json: noise_scale, c_v, sigmas."""
        raise NotImplementedError


class Histogram(Protocol):
    """Counts the times that a run was trained on; it travels in the checkpoints."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...
    def as_json(self) -> dict[str, dict[str, int]]: ...


class Objective(Protocol):
    """What a run trains for: the network, the loss of a batch, the measures and the file. All else is shared."""

    def network(self) -> nn.Module:
        """What is trained, with its adapters; its weights are not yet those of the run, and it may be built under
        torch.device("meta")."""

    def first_weights(self) -> dict[str, Tensor]:
        """All tensors of the network as training begins, float32 on the CPU; random ones are drawn from torch's
        generator."""

    def histogram(self) -> Histogram: ...

    def draw(self) -> Draw:
        """What a batch source draws for each batch: noise and times, on the CPU. `loss` takes them from the batch."""

    def loss(self, net: nn.Module, batch: dict[str, Any], histogram: Any = None) -> tuple[Tensor, Tensor]:
        """(what to differentiate, the plain mean loss) of one micro-batch; `histogram` counts the times drawn."""

    def evaluate(
        self, net: nn.Module, indices: Sequence[int], *, version: int, dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Evaluation:
        """Measures on the pairs `indices`; dtype: of the weights. Options and version: objectives/evaluate.py."""

    def merged(self, weights: dict[str, Tensor]) -> nn.Module:
        """Of a LoRA run: the whole network in float32, on the run's device, with these adapters merged in."""

    def save(self, path: Path, weights: dict[str, Tensor], *, steps: int, adapters: Path | None = None) -> None:
        """The finished file, whole or not there. weights: what was trained, by name; steps: of the training that made
        them; adapters: where those of a LoRA run go as well, alone."""

    def saved(self, path: Path, averaged: nn.Module) -> nn.Module:
        """The network that is in the file; `averaged` is the one that was saved."""


def empty_conditioning(unet: UNetConfig, data: RefinerDataset) -> dict[str, Tensor]:
    """What the KSampler gets where there is no text: the encoded empty caption, or one token of zeros."""
    empty = data.empty_context() or {"context": torch.zeros(1, unet.context_dim)}
    if unet.pooled_dim:
        empty.setdefault("pooled", torch.zeros(unet.pooled_dim))
    return empty


def provenance(config: TrainConfig, plan: ObjectivePlan, data: RefinerDataset, steps: int) -> dict[str, Any]:
    """For the metadata of a trained file. steps: of the training that made it."""
    return {
        "dataset": data.content_hash,
        "pairs": len(data.train),
        "steps": steps,
        "config": config.identity(),
        "parameters": plan.size.parameters,
    }
