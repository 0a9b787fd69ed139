"""SDXL's refiner at work outside ComfyUI: the network with its constants, for training, validation and tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, autocast, nn

from ..first_answer import FirstAnswer
from ..residual import flow
from . import diffusion
from .unet import call


@dataclass
class SDXLRefiner:
    """net predicts the noise; everything here works in model space. Sampling takes the same calls as a Refiner."""

    net: nn.Module
    aesthetic_score: float
    autocast: torch.dtype | None = None
    dtype: torch.dtype = torch.float32  # of the network's weights
    first: FirstAnswer | None = None

    def output(self, x: Tensor, k: Tensor, condition: dict[str, Tensor]) -> Tensor:
        """The noise that the network sees in the state x, [B, C, H, W], at the timesteps k [B].

        condition: context [B, T, D], pooled [B, 1280] and time_ids [B, 4 or more] (unet.call).
        """

        def ask(x: Tensor, k: Tensor) -> Tensor:
            sigma = diffusion.SIGMAS.to(x.device)[k]
            with autocast(x.device.type, self.autocast) if self.autocast else nullcontext():
                return call(
                    self.net, diffusion.network_input(x, sigma).to(self.dtype), k, condition["context"].to(self.dtype),
                    condition["pooled"], condition["time_ids"], self.aesthetic_score,
                )

        return self.first.of(x, k, ask) if self.first else ask(x, k)

    def remembering(self) -> SDXLRefiner:
        """For one batch: the network is not asked twice where its walks begin."""
        return replace(self, first=FirstAnswer())

    @torch.no_grad()
    def refine(self, b: Tensor, e: Tensor, condition: dict[str, Tensor], times: Tensor) -> Tensor:
        """The base, noised to sigma = times[0] (the hand-over), after Euler steps down `times`; b, e: [B, C, H, W]."""

        def noise_of(x: Tensor, sigma: Tensor) -> Tensor:
            return self.output(x, diffusion.timestep_of(sigma), condition).float()

        return flow.sample(noise_of, b, e, 1.0, times)

    @torch.no_grad()
    def loss_at(
        self, z: Tensor, b: Tensor, e: Tensor, condition: dict[str, Tensor], times: Sequence[float]
    ) -> list[float]:
        """Mean loss at each sigma of `times`. The base plays no part in it."""
        losses = []
        for time in times:
            sigma = torch.full((z.shape[0],), time, device=z.device)
            x = diffusion.state(z, e, sigma)
            output = self.output(x, diffusion.timestep_of(sigma), condition)
            losses.append(float(flow.loss_per_sample(output, e, 1.0).mean()))
        return losses
