"""What a run trains for: the loss of a batch, the network, the file and the measures. The rest: run/train.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...config.train_config import TrainConfig
from ...data.seeds import seeded_generator
from ...data.shards import RefinerDataset
from ...run.plan import Plan
from ...run.validation import MEASURES
from ..base import empty_conditioning, provenance
from ..evaluate import Evaluation, cells_of_a_batch, evaluate
from ..histograms import TimesHistogram
from ..sdxl_refiner.objective import SDXLRefinerObjective
from . import flow
from .file import RefinerMeta, save_refiner
from .lora import add_adapters, merge, save_lora
from .model import Refiner
from .unet import build_unet

__all__ = ["Objective", "batch_loss", "choose_objective"]


class Histogram(Protocol):
    """Counts the times that a run was trained on; it travels in the checkpoints."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...
    def as_json(self) -> dict[str, dict[str, int]]: ...


class Objective(Protocol):
    """What a run asks of its objective."""

    def network(self) -> nn.Module:
        """On the CPU, with the weights that training begins with; random ones are drawn from torch's generator."""

    def times(self) -> Histogram: ...

    def loss(self, net: nn.Module, batch: dict[str, Any], times: Any = None) -> tuple[Tensor, Tensor]:
        """(what to differentiate, the plain mean loss) of one micro-batch; `times` counts what was drawn."""

    def evaluate(self, net: nn.Module, indices: Sequence[int], *, version: int, **options: Any) -> Evaluation:
        """Measures on the pairs `indices`, in float32; options are those of training/objectives/evaluate.py, version is
        training/run/validation.py's."""

    def merged(self, weights: dict[str, Tensor]) -> nn.Module:
        """Of a LoRA run: the whole network in float32, on the run's device, with these adapters merged in."""

    def save(
        self, path: Path, weights: dict[str, Tensor], *, steps: int | None = None, adapters: Path | None = None
    ) -> None:
        """The finished file, whole or not there. weights: what was trained, by name; steps: of the training that made
        them, None = all of the run; adapters: where those of a LoRA run go as well, alone."""

    def saved(self, path: Path, averaged: nn.Module) -> nn.Module:
        """The network that is in the file; `averaged` is the one that was saved."""


def choose_objective(config: TrainConfig, plan: Plan, data: RefinerDataset) -> Objective:
    kinds = {"residual": ResidualObjective, "sdxl_refiner": SDXLRefinerObjective}
    return kinds[config.objective](config, plan, data)


@dataclass
class ResidualObjective:
    """The residual flow of training/objectives/residual."""

    config: TrainConfig
    plan: Plan
    data: RefinerDataset

    def network(self) -> nn.Module:
        net = build_unet(self.plan.unet)
        if self.plan.start:
            self.plan.start.fill(net)
        if self.plan.adapters:
            add_adapters(net, self.plan.adapters)
        return net

    def times(self) -> TimesHistogram:
        return TimesHistogram(self.plan.grid)

    def loss(
        self, net: nn.Module, batch: dict[str, Any], times: TimesHistogram | None = None
    ) -> tuple[Tensor, Tensor]:
        return batch_loss(self._at_work(net), self.plan, batch, self.config.seed, times)

    def evaluate(self, net: nn.Module, indices: Sequence[int], *, version: int, **options: Any) -> Evaluation:
        plan, config = self.plan, self.config
        steps = len(plan.sigmas) - 1
        if plan.s == 0:
            # one-shot: it was never shown a state between the two ends
            options["step_counts"] = (1,) if options.get("step_counts", (1,)) else ()
        at_work = Refiner(net, plan.s, plan.c_v, plan.autocast if version < MEASURES else None)
        return evaluate(
            at_work, self.data, indices, empty_conditioning(self.plan, self.data),
            sigmas=plan.sigmas[:-1], crop=config.validation.crop, seed=config.seed, device=plan.device,
            cells=cells_of_a_batch(config, self.data), told_whole=version < MEASURES,
            **{"shown_steps": steps, **options},
        )

    def merged(self, weights: dict[str, Tensor]) -> nn.Module:
        plan = self.plan
        with torch.device("meta"):
            net = build_unet(plan.unet)
        net.load_state_dict(merge(plan.start.weights(), weights, plan.adapters), assign=True)
        return nn.Module.to(net, plan.device).eval().requires_grad_(False)

    def save(
        self, path: Path, weights: dict[str, Tensor], *, steps: int | None = None, adapters: Path | None = None
    ) -> None:
        """Adapters are merged into the refiner that they were trained on."""
        plan, meta = self.plan, self._meta(steps)
        if plan.adapters:
            if adapters:
                save_lora(adapters, weights, plan.adapters, plan.start, meta.training)
            weights = merge(plan.start.weights(), weights, plan.adapters)
        save_refiner(path, weights, empty_conditioning(self.plan, self.data), meta)

    def saved(self, path: Path, averaged: nn.Module) -> nn.Module:
        if not self.plan.adapters:
            return averaged
        merged = Refiner.from_file(path)[0].net  # in float32
        return nn.Module.to(merged, self.plan.device)

    def _at_work(self, net: nn.Module) -> Refiner:
        return Refiner(net, self.plan.s, self.plan.c_v, self.plan.autocast)

    def _meta(self, steps: int | None) -> RefinerMeta:
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


def batch_loss(
    refiner: Refiner, plan: Plan, batch: dict[str, Any], seed: int, times: TimesHistogram | None = None
) -> tuple[Tensor, Tensor]:
    """(what to differentiate, the plain mean loss) of one micro-batch; they differ under Min-SNR weighting.

    Its noise and times depend on (seed, absolute micro-step) alone. `times` counts the times drawn.
    """
    z, b = batch["z"], batch["b"]
    generator = seeded_generator(seed, "noise", int(batch["index"]))
    e = torch.randn(z.shape, generator=generator).to(z.device)
    drawn = flow.draw_times(len(z), plan.grid, plan.on_grid, generator)
    if times is not None:
        times.add(drawn)
    t = drawn.to(z.device)
    condition = {name: batch[name] for name in ("context", "pooled") if name in batch}
    if "context" not in condition:
        condition["context"] = torch.zeros(len(z), 1, plan.unet.context_dim, device=z.device)
    if plan.unet.pooled_dim:
        condition.setdefault("pooled", torch.zeros(len(z), plan.unet.pooled_dim, device=z.device))
        condition["time_ids"] = batch["time_ids"]
    output = refiner.output(flow.state(z, b, e, t, plan.s), b, t, condition)
    losses = flow.loss_per_sample(output, flow.velocity(z, b, e, plan.s), plan.c_v)
    plain = losses.mean()
    if plan.min_snr_gamma is None:
        return plain, plain.detach()
    weight = flow.min_snr_weight(t, plan.s, plan.residual_rms, plan.min_snr_gamma)
    return (weight * losses).mean(), plain.detach()
