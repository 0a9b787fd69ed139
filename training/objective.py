"""What a run minimises, for one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .data.seeds import seeded_generator
from .plan import Plan
from .refiner import flow
from .refiner.model import Refiner
from .times import TimesHistogram

__all__ = ["batch_loss"]


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
