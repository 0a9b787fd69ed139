"""Picture measures: pure functions on float arrays or tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def psnr(picture: Tensor, target: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of [C, H, W] pictures in [0, 1]; 100 dB at most, where both are the same."""
    error = float((picture.double() - target.double()).square().mean())
    return -10 * math.log10(max(error, 1e-10))


def ssim(picture: Tensor, target: Tensor) -> float:
    """Structural similarity (Wang et al. 2004: Gaussian window, sigma 1.5) of [C, H, W] pictures in [0, 1]."""
    from skimage.metrics import structural_similarity

    side = min(target.shape[-2:])
    return float(
        structural_similarity(
            target.numpy(), picture.numpy(), channel_axis=0, data_range=1.0, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False, win_size=min(11, side - 1 + side % 2),  # 11 is the window of that sigma
        )
    )


def radial_spectrum(picture: Tensor, bands: int = 32) -> Tensor:
    """Natural log of the mean power in `bands` rings of equal width up to the Nyquist frequency. [C, H, W] -> [bands]

    A Hann window keeps the picture's borders from leaking into every ring.
    """
    _, height, width = picture.shape
    window = torch.outer(torch.hann_window(height, dtype=torch.float64), torch.hann_window(width, dtype=torch.float64))
    grey = picture.double().mean(0)
    power = torch.fft.fft2((grey - grey.mean()) * window).abs().square() / (height * width)
    fy, fx = torch.fft.fftfreq(height, dtype=torch.float64), torch.fft.fftfreq(width, dtype=torch.float64)
    radius = torch.hypot(fy[:, None], fx[None, :])
    ring = (radius / 0.5 * bands).long()
    inside = ring < bands
    total = torch.zeros(bands, dtype=torch.float64).index_add_(0, ring[inside], power[inside])
    count = torch.zeros(bands, dtype=torch.float64).index_add_(0, ring[inside], torch.ones_like(power[inside]))
    return torch.log(total / count.clamp(min=1) + 1e-12)


def spectrum_distance(picture: Tensor, target: Tensor) -> float:
    """Mean absolute difference of radial_spectrum: 0 = as much detail at every scale.

    It sees the missing detail that PSNR rewards.
    """
    return float((radial_spectrum(picture) - radial_spectrum(target)).abs().mean())
