"""A picture to measure a VAE on where a person has linked none."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

__all__ = ["sample_picture"]


def sample_picture(side: int = 512) -> Tensor:
    """[1, side, side, 3] in [0, 1], always the same: smooth colours, a grey ramp, patches of full colour, edges, rings
    that get finer to the limit of the grid, and film grain. What a short dtype spoils first is somewhere in it.
    """
    y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    red, green = 0.5 + 0.4 * torch.sin(5 * x + 2 * y), 0.5 + 0.4 * torch.cos(4 * y - 3 * x)
    picture = torch.stack([red, green, 0.3 + 0.5 * x * y])
    half, strip = side // 2, max(side // 12, 1)
    radius = (x - 0.25).square() + (y - 0.75).square()  # lower left
    rings = 0.5 + 0.45 * torch.cos(3.14159 * side * radius)
    picture[:, half + strip :, :half] = rings[half + strip :, :half]
    picture[:, half : half + strip] = x[half : half + strip]  # the grey ramp, across
    for k in range(8):  # the corners of the colour cube, upper right
        colour = torch.tensor([float(k & 1), float(k >> 1 & 1), float(k >> 2 & 1)])
        left = half + (k % 4) * (half // 4)
        top = (k // 4) * (half // 4)
        picture[:, top : top + half // 5, left : left + half // 5] = colour[:, None, None]
    grain = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    picture[:, half + strip :, half:] += 0.06 * grain[half + strip :, half:]  # lower right
    return rearrange(picture.clamp(0, 1), "channels height width -> 1 height width channels").contiguous()
