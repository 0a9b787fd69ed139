"""Residual flow: the refiner's mathematics as pure functions on tensors.

Symbols, used as names everywhere in the pack (docs/architecture.md, "Residual flow"):

    z    target latent, [B, C, H, W], in model space
    b    base latent, the same shape
    e    noise ~ N(0, I), the same shape
    s    noise scale, a float >= 0
    t    time in (0, 1], [B]; equal to the host's sigma
    x_t  = (1 - t) z + t (b + s e)        the state at time t
    v    = (b + s e) - z                  its velocity dx_t / dt, constant along a path
    c_v  = sqrt(RMS(z - b)^2 + s^2)       RMS of v, so that the network's target has unit scale

It is the straight path of rectified flow (Liu et al. 2022, arXiv:2209.03003; Lipman et al. 2022, arXiv:2210.02747)
with the source distribution N(b, s^2) instead of N(0, 1): all that is left to learn is the residual z - b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x_t [B, C, H, W], t [B]) -> v [B, C, H, W]"""


def expand(t: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, 1, ...] with as many dimensions as `like`."""
    return t.reshape(t.shape[0], *(1,) * (like.ndim - 1))


def velocity(z: Tensor, b: Tensor, e: Tensor, s: float) -> Tensor:
    """v = (b + s e) - z."""
    return b + s * e - z


def state(z: Tensor, b: Tensor, e: Tensor, t: Tensor, s: float) -> Tensor:
    """x_t = (1 - t) z + t (b + s e)."""
    t = expand(t, z)
    return (1 - t) * z + t * (b + s * e)


def velocity_scale(residual_rms: float, s: float) -> float:
    """c_v = sqrt(RMS(z - b)^2 + s^2): the preconditioning of the target (cf. Karras et al. 2022, table 1, c_out)."""
    return math.hypot(residual_rms, s)


def loss_per_sample(output: Tensor, v: Tensor, c_v: float, mask: Tensor | None = None) -> Tensor:
    """|| net - v / c_v ||^2, averaged over each sample: [B]. In float32 at least, whatever the network computes in.

    mask: what each cell's loss counts, as in `mean_per_sample`.
    """
    return mean_per_sample(_error(output, v, c_v).square(), mask)


def mean_per_sample(losses: Tensor, mask: Tensor | None) -> Tensor:
    """[B, C, H, W] -> [B]: so that their mean is the mean over the batch, each cell counting as its mask says.

    mask: [B, 1, H, W] in 0..1. It is divided by its mean over the batch, so a mask of ones changes no bit, and a crop
    that shows little of what counts counts little. Where nothing counts, the loss is 0.
    """
    if mask is not None:
        mask = mask.to(losses.dtype)
        losses = losses * mask / mask.mean().clamp(min=1e-12)
    return losses.flatten(1).mean(1)


def huber_per_sample(output: Tensor, v: Tensor, c_v: float, delta: float, mask: Tensor | None = None) -> Tensor:
    """2 H(net - v / c_v), averaged over each sample: [B]. Twice Huber's loss (Huber 1964, doi:10.1214/aoms/1177703732):

        2 H(r) = r^2 for |r| <= delta, else 2 delta |r| - delta^2

    so that it equals the square up to delta, and a single large error pulls no harder than one of delta. The target
    has RMS 1, so a delta of 1 is an error as large as the target itself.
    """
    r = _error(output, v, c_v)
    return mean_per_sample(2 * huber_loss(r, torch.zeros_like(r), reduction="none", delta=delta), mask)


def _error(output: Tensor, v: Tensor, c_v: float) -> Tensor:
    wide = torch.promote_types(torch.promote_types(output.dtype, v.dtype), torch.float32)
    return output.to(wide) - v.to(wide) / c_v


def min_snr_weight(t: Tensor, s: float, residual_rms: float, gamma: float) -> Tensor:
    """t^2 min(SNR(t), gamma), with SNR(t) = ((1 - t) sigma_r / (t s))^2 and sigma_r = RMS(z - b). [B] -> [B]

    Given the base, the state is b + (1 - t)(z - b) + t s e: the residual is the signal. Min-SNR (Hang et al. 2023,
    arXiv:2303.09556) weighs the error of z by min(SNR, gamma); the error of v is 1 / t of it. s must be above 0.
    """
    signal = ((1 - t) * (residual_rms / s)).square()  # = t^2 SNR, which needs no division by t
    return torch.minimum(signal, gamma * t.square())


def sigmas(steps: int) -> Tensor:
    """The steps + 1 times that a sampler of `steps` steps walks: 1, 1 - 1/steps, ..., 1/steps, 0. [steps + 1]

    Equal to the host's "simple" scheduler over 1000 uniform sigmas when steps divides 1000 (8 does).
    """
    return torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64).float()


def draw_times(count: int, grid: Tensor, on_grid: float, generator: torch.Generator) -> Tensor:
    """Training times [count]: a share `on_grid` of them on the sampler's own sigmas, the rest uniform in (0, 1].

    Both are stratified over the batch: the k-th of n uniform draws lies in ((k, k+1)/n], which lowers the variance
    of the loss without a bias (Kingma et al. 2021, arXiv:2107.00630, appendix I.1).
    `grid` holds the sampler's sigmas without the final 0.
    """
    strata = torch.arange(count, dtype=torch.float64)
    strata = (strata + torch.rand(count, generator=generator, dtype=torch.float64)) / count
    u = strata[torch.randperm(count, generator=generator)]
    # rand is in [0, 1); t must be in (0, 1], and t = 0 carries no information about v
    uniform = 1.0 - u
    picked = grid.double()[torch.clamp((u * len(grid)).long(), max=len(grid) - 1)]
    # which share goes on the grid is drawn apart, so that grid and strata stay independent
    chosen = torch.rand(count, generator=generator, dtype=torch.float64) < on_grid
    return torch.where(chosen, picked, uniform).float()


def walk(v_of: Velocity, x: Tensor, times: Tensor) -> Iterator[Tensor]:
    """Walk x from times[0] to times[-1]; yields the state after each step. Euler is exact for straight paths."""
    for now, then in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
        t = torch.full((x.shape[0],), now, dtype=torch.float32, device=x.device)
        x = x + (then - now) * v_of(x, t)
        yield x


def sample(v_of: Velocity, b: Tensor, e: Tensor, s: float, times: Tensor) -> Tensor:
    """The refined latent: from x_1 = b + times[0] s e along v to t = 0. b, e: [B, C, H, W]."""
    *_, refined = walk(v_of, b + float(times[0]) * s * e, times)
    return refined


def blend(b: Tensor, refined: Tensor, strength: float) -> Tensor:
    """b + strength (refined - b); exact at both ends, so that strength 1 changes no bit."""
    if strength == 1.0:
        return refined
    if strength == 0.0:
        return b
    return torch.lerp(b, refined, strength)
