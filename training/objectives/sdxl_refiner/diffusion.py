"""SDXL's diffusion, as far as its refiner has a part in it: pure functions on tensors.

Symbols (Ho et al. 2020, arXiv:2006.11239; Karras et al. 2022, arXiv:2206.00364; Podell et al. 2023, arXiv:2307.01952):

    z            target latent, [B, C, H, W], in model space
    e            noise ~ N(0, I), the same shape
    k            timestep, a whole number, [B]; the refiner knows those from 0 to 199 of 1000
    beta_k       "scaled linear": the square of a straight line from sqrt(0.00085) to sqrt(0.012)
    alpha_bar_k  = prod over j <= k of (1 - beta_j)
    sigma_k      = sqrt((1 - alpha_bar_k) / alpha_bar_k)
    x            = z + sigma_k e                    the state, variance exploding, as a sampler of the host holds it
    c_in         = 1 / sqrt(1 + sigma_k^2)          c_in x is the variance-preserving state that the network sees

The network predicts e. Since x = z + sigma e, that is dx/dsigma, and flow.walk with sigma for t is Euler's method.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...config.sections import LAST_TIMESTEP
from ..residual.flow import expand

TIMESTEPS = 1000
BETA_FIRST, BETA_LAST = 0.00085, 0.012


def _all_sigmas() -> Tensor:
    beta = torch.linspace(BETA_FIRST**0.5, BETA_LAST**0.5, TIMESTEPS, dtype=torch.float64) ** 2
    alpha_bar = torch.cumprod(1 - beta, 0)
    return ((1 - alpha_bar) / alpha_bar).sqrt().float()


SIGMAS = _all_sigmas()
"""sigma_k for k = 0..999, rising. [1000]"""


def draw_timesteps(count: int, last: int, generator: torch.Generator) -> Tensor:
    """Training timesteps, uniform over 0..last, stratified over the batch as flow.draw_times says. [count], int64"""
    strata = torch.arange(count, dtype=torch.float64)
    strata = (strata + torch.rand(count, generator=generator, dtype=torch.float64)) / count
    u = strata[torch.randperm(count, generator=generator)]
    return (u * (last + 1)).long().clamp(max=last)


def state(z: Tensor, e: Tensor, sigma: Tensor) -> Tensor:
    """x = z + sigma e; sigma: [B]."""
    return z + expand(sigma, z) * e


def network_input(x: Tensor, sigma: Tensor) -> Tensor:
    """c_in x; sigma: [B]."""
    return x / expand((1 + sigma.square()).sqrt(), x)


def timestep_of(sigma: Tensor) -> Tensor:
    """The timestep whose log sigma is nearest, as the host finds it. [B] -> [B], int64"""
    distances = sigma.log() - SIGMAS.to(sigma.device).log()[:, None]
    return distances.abs().argmin(0)


def sigmas(steps: int, last: int = LAST_TIMESTEP) -> Tensor:
    """The steps + 1 sigmas of a sampler of `steps` steps from sigma_last down to 0, evenly spaced in k. [steps + 1]

    It is the host's scheduler "simple" over the timesteps 0..last. steps: at most last + 1.
    """
    k = torch.tensor([last - i * (last + 1) // steps for i in range(steps)])
    return torch.cat([SIGMAS[k], torch.zeros(1)])
