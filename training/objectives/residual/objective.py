"""The objective of residual flow (flow.py): the network, the loss of a batch, the measures and the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...data.seeds import seeded_generator
from ..base import Compute, empty_conditioning, provenance
from ..evaluate import FLOAT32, Evaluation, cells_of_a_batch, evaluate
from ..histograms import TimesHistogram
from . import flow
from .file import RefinerMeta, save_refiner
from .lora import add_adapters, merge, save_lora
from .model import Refiner
from .unet import build_unet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ...config.train_config import TrainConfig
    from ...data.shards import RefinerDataset
    from .plan import ResidualPlan

__all__ = ["ResidualDraw", "ResidualFlow", "batch_loss"]


@dataclass
class ResidualFlow:
    """|| net([x_t, b], 1000 t, text) - v / c_v ||^2: what separates the base's output from the target."""

    config: TrainConfig
    plan: ResidualPlan
    data: RefinerDataset
    compute: Compute

    def network(self) -> nn.Module:
        net = build_unet(self.plan.unet)
        if self.plan.adapters:
            add_adapters(net, self.plan.adapters)
        return net

    def first_weights(self) -> dict[str, Tensor]:
        net = build_unet(self.plan.unet)
        if self.plan.start:
            self.plan.start.fill(net)
        if self.plan.adapters:
            add_adapters(net, self.plan.adapters)
        return net.state_dict()

    def histogram(self) -> TimesHistogram:
        return TimesHistogram(self.plan.grid)

    def draw(self) -> ResidualDraw:
        return ResidualDraw(self.plan.grid, self.plan.on_grid)

    def loss(
        self, net: nn.Module, batch: dict[str, Any], histogram: TimesHistogram | None = None
    ) -> tuple[Tensor, Tensor]:
        return batch_loss(self._at_work(net), self.plan, batch, self.config.seed, histogram)

    def evaluate(
        self, net: nn.Module, indices: Sequence[int], *, version: int, dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Evaluation:
        plan, config = self.plan, self.config
        steps = len(plan.sigmas) - 1
        if plan.s == 0:
            # one-shot: it was never shown a state between the two ends
            options["step_counts"] = (1,) if options.get("step_counts", (1,)) else ()
        autocast = self.compute.autocast if version < FLOAT32 else None
        at_work = Refiner(net, plan.s, plan.c_v, autocast, dtype)
        return evaluate(
            at_work, self.data, indices, empty_conditioning(self.plan.unet, self.data),
            sigmas=plan.sigmas[:-1], crop=config.validation.crop, seed=config.seed, device=self.compute.device,
            cells=cells_of_a_batch(config, self.data), told_whole=version < FLOAT32,
            **{"shown_steps": steps, **options},
        )

    def merged(self, weights: dict[str, Tensor]) -> nn.Module:
        plan = self.plan
        with torch.device("meta"):
            net = build_unet(plan.unet)
        assert plan.start and plan.adapters  # only a run of adapters is asked
        net.load_state_dict(merge(plan.start.weights(), weights, plan.adapters), assign=True)
        return nn.Module.to(net, self.compute.device).eval().requires_grad_(False)

    def save(self, path: Path, weights: dict[str, Tensor], *, steps: int, adapters: Path | None = None) -> None:
        """Adapters are merged into the refiner that they were trained on."""
        plan, meta = self.plan, self._meta(steps)
        if plan.adapters and plan.start:
            if adapters:
                save_lora(adapters, weights, plan.adapters, plan.start, meta.training)
            weights = merge(plan.start.weights(), weights, plan.adapters)
        save_refiner(path, weights, empty_conditioning(self.plan.unet, self.data), meta)

    def saved(self, path: Path, averaged: nn.Module) -> nn.Module:
        if not self.plan.adapters:
            return averaged
        merged = Refiner.from_file(path)[0].net  # in float32
        return nn.Module.to(merged, self.compute.device)

    def _at_work(self, net: nn.Module) -> Refiner:
        return Refiner(net, self.plan.s, self.plan.c_v, self.compute.autocast, self.compute.weights)

    def _meta(self, steps: int) -> RefinerMeta:
        config, plan, data = self.config, self.plan, self.data
        return RefinerMeta(
            unet=plan.unet,
            latent=data.latent,
            preview=data.info.get("preview"),
            noise_scale=plan.s,
            residual_rms=data.residual_rms,
            c_v=plan.c_v,
            sigmas=plan.sigmas,
            context=data.context,
            training={
                **provenance(config, plan, data, steps),
                "base": data.info["base"],
                "base_ratio": plan.size.ratio,
                **({"start": plan.start.provenance()} if plan.start else {}),
                **({"trainable_parameters": plan.adapters.parameters} if plan.adapters else {}),
            },
        )


@dataclass(frozen=True)
class ResidualDraw:
    """Noise e, as z, and times t [B] of a batch; picklable, for it is called where batches are read."""

    grid: Tensor  # the sigmas of the sampler
    on_grid: float  # share of the times on them

    def __call__(self, batch: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
        z = batch["z"]
        e = torch.randn(z.shape, generator=generator)
        return {"e": e, "t": flow.draw_times(len(z), self.grid, self.on_grid, generator)}


def batch_loss(
    refiner: Refiner, plan: ResidualPlan, batch: dict[str, Any], seed: int, histogram: TimesHistogram | None = None
) -> tuple[Tensor, Tensor]:
    """(what to differentiate, the plain mean loss) of one micro-batch; they differ under Min-SNR weighting and
    Huber's loss.

    Its noise and times depend on (seed, absolute micro-step) alone: they are in the batch, or drawn here for one that
    was read without them. `histogram` counts the times drawn.
    """
    z, b = batch["z"], batch["b"]
    drawn = batch
    if "e" not in batch:
        drawn = ResidualDraw(plan.grid, plan.on_grid)(batch, seeded_generator(seed, "noise", int(batch["index"])))
    e, t = drawn["e"].to(z.device), drawn["t"].to(z.device)
    if histogram is not None:
        histogram.add(t)
    condition: dict[str, Tensor] = {name: batch[name] for name in ("context", "pooled") if name in batch}
    if "context" not in condition:
        condition["context"] = torch.zeros(len(z), 1, plan.unet.context_dim, device=z.device)
    if plan.unet.pooled_dim:
        condition.setdefault("pooled", torch.zeros(len(z), plan.unet.pooled_dim, device=z.device))
        condition["time_ids"] = batch["time_ids"]
    output = refiner.output(flow.state(z, b, e, t, plan.s), b, t, condition)
    v = flow.velocity(z, b, e, plan.s)
    mask = batch.get("mask")
    losses = flow.loss_per_sample(output, v, plan.c_v, mask)
    plain = losses.mean().detach()
    if plan.huber_delta is not None:
        losses = flow.huber_per_sample(output, v, plan.c_v, plan.huber_delta, mask)
    if plan.min_snr_gamma is not None:
        losses = flow.min_snr_weight(t, plan.s, plan.residual_rms, plan.min_snr_gamma) * losses
    return losses.mean(), plain
