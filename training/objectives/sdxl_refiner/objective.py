"""The objective of fine-tuning SDXL's refiner: the loss of a batch, the file, the measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...data.seeds import seeded_generator
from ..base import Compute, empty_conditioning, provenance
from ..evaluate import FLOAT32, Evaluation, cells_of_a_batch, evaluate
from ..histograms import TimestepHistogram
from ..residual import flow
from . import diffusion
from .file import SDXLRefinerMeta, read_weights, save
from .model import SDXLRefiner
from .unet import build

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ...config.train_config import TrainConfig
    from ...data.shards import RefinerDataset
    from .plan import SDXLRefinerPlan

__all__ = ["SDXLRefinerObjective"]


@dataclass(frozen=True)
class TimestepDraw:
    """Noise e, as z, and timesteps k [B] in 0..last of a batch; picklable, for it is called where batches are read."""

    last: int

    def __call__(self, batch: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        z = batch["z"]
        e = torch.randn(z.shape, generator=generator)
        return {"e": e, "k": diffusion.draw_timesteps(len(z), self.last, generator)}


@dataclass
class SDXLRefinerObjective:
    """|| net(c_in (z + sigma e), k, text) - e ||^2 over timesteps k = 0..last. The bases serve for validation alone."""

    config: TrainConfig
    plan: SDXLRefinerPlan
    data: RefinerDataset
    compute: Compute

    def network(self) -> nn.Module:
        return build(self.plan.unet)

    def first_weights(self) -> dict[str, Tensor]:
        """Those of refiner.start_from where one is given."""
        start, shape = self.config.refiner.start_from, self.plan.unet
        if start is None:
            return build(shape).state_dict()
        with torch.device("meta"):
            net = build(shape)
        shapes = {name: tensor.shape for name, tensor in net.state_dict().items()}
        return read_weights(start, shapes, shape.layers_per_block)

    def histogram(self) -> TimestepHistogram:
        return TimestepHistogram(self.config.sdxl_refiner.last_timestep)

    def draw(self) -> TimestepDraw:
        return TimestepDraw(self.config.sdxl_refiner.last_timestep)

    def loss(
        self, net: nn.Module, batch: dict[str, Any], histogram: TimestepHistogram | None = None
    ) -> tuple[Tensor, Tensor]:
        """As the protocol has it; both are the plain mean. Depends on (seed, absolute micro-step) alone."""
        z, drawn = batch["z"], batch
        if "e" not in batch:  # it was read without
            drawn = self.draw()(batch, seeded_generator(self.config.seed, "noise", int(batch["index"])))
        e, k = drawn["e"].to(z.device), drawn["k"].to(z.device)
        if histogram is not None:
            histogram.add(k)
        x = diffusion.state(z, e, diffusion.SIGMAS.to(z.device)[k])
        output = self._at_work(net).output(x, k, batch)
        plain = flow.loss_per_sample(output, e, 1.0, batch.get("mask")).mean()
        return plain, plain.detach()

    def evaluate(
        self, net: nn.Module, indices: Sequence[int], *, version: int, dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Evaluation:
        """Base against refined against target: the base noised to the hand-over's sigma, then Euler steps down to 0."""
        config, plan = self.config, self.plan
        last = config.sdxl_refiner.last_timestep
        empty = empty_conditioning(plan.unet, self.data)
        before = version < FLOAT32
        autocast = self.compute.autocast if before else None
        at_work = SDXLRefiner(net, config.sdxl_refiner.aesthetic_score, autocast, dtype)
        return evaluate(
            at_work, self.data, indices, empty, sigmas=plan.sigmas[:-1], crop=config.validation.crop,
            seed=config.seed, device=self.compute.device, cells=cells_of_a_batch(config, self.data), told_whole=before,
            times_of=lambda steps: diffusion.sigmas(steps, last), **{"shown_steps": len(plan.sigmas) - 1, **options},
        )

    def save(self, path: Path, weights: dict[str, Tensor], *, steps: int, adapters: Path | None = None) -> None:
        """The file for the host's own loaders; weights under diffusers' names."""
        config, plan = self.config, self.plan
        training = provenance(config, plan, self.data, steps)
        meta = SDXLRefinerMeta(unet=plan.unet, training=training, **config.sdxl_refiner.model_dump())
        save(path, weights, meta)

    def saved(self, path: Path, averaged: nn.Module) -> nn.Module:
        return averaged

    def merged(self, weights: dict[str, Tensor]) -> nn.Module:
        raise NotImplementedError("this objective has no LoRA")

    def _at_work(self, net: nn.Module) -> SDXLRefiner:
        score = self.config.sdxl_refiner.aesthetic_score
        return SDXLRefiner(net, score, self.compute.autocast, self.compute.weights)
