"""A refiner at work outside ComfyUI: the network with its constants, for validation, tests and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, autocast, nn

from ..first_answer import FirstAnswer
from . import flow
from .file import RefinerMeta, load_refiner
from .unet import build_unet, call_unet


@dataclass
class Refiner:
    """net predicts v / c_v; everything here works in model space."""

    net: nn.Module
    s: float
    c_v: float
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32  # of the network's weights
    first: FirstAnswer | None = None

    @classmethod
    def from_file(cls, path: Path) -> tuple[Refiner, dict[str, Tensor], RefinerMeta]:
        """(refiner on the CPU in FP32, its empty conditioning, its metadata)."""
        weights, empty, meta = load_refiner(path)
        with torch.device("meta"):
            net = build_unet(meta.unet)
        net.load_state_dict(weights, assign=True)
        return cls(net.eval(), meta.noise_scale, meta.c_v), empty, meta

    def output(self, x: Tensor, b: Tensor, t: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """The network's raw answer v / c_v; condition: context [B, T, D] and, with pooled text, pooled and time_ids."""

        def ask(x: Tensor, t: Tensor) -> Tensor:
            given = {**condition, "context": condition["context"].to(self.dtype)}
            with autocast(x.device.type, self.autocast) if self.autocast else nullcontext():
                return call_unet(self.net, x.to(self.dtype), b.to(self.dtype), t, **given)

        return self.first.of(x, t, ask) if self.first else ask(x, t)

    def remembering(self) -> Refiner:
        """For one batch: the network is not asked twice where its walks begin."""
        return replace(self, first=FirstAnswer())

    @torch.no_grad()
    def refine(self, b: Tensor, e: Tensor, condition: dict[str, Tensor], times: Tensor) -> Tensor:
        """The refined latent after walking `times`; b, e: [B, C, H, W]."""

        def v_of(x: Tensor, t: Tensor) -> Tensor:
            return self.c_v * self.output(x, b, t, condition).float()

        return flow.sample(v_of, b, e, self.s, times)

    @torch.no_grad()
    def loss_at(
        self, z: Tensor, b: Tensor, e: Tensor, condition: dict[str, Tensor], times: Sequence[float]
    ) -> list[float]:
        """Mean loss at each of `times`: shows a schedule whose later steps teach nothing."""
        v, losses = flow.velocity(z, b, e, self.s), []
        for time in times:
            t = torch.full((z.shape[0],), time, device=z.device)
            output = self.output(flow.state(z, b, e, t, self.s), b, t, condition)
            losses.append(float(flow.loss_per_sample(output, v, self.c_v).mean()))
        return losses
