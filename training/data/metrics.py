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
    from scipy.ndimage import gaussian_filter

    def mean(values):
        return gaussian_filter(values, (0, 1.5, 1.5), truncate=3.5)  # 11 pixels wide

    x, y = target.numpy(), picture.numpy()
    x_mean, y_mean = mean(x), mean(y)
    x_variance, y_variance = mean(x * x) - x_mean * x_mean, mean(y * y) - y_mean * y_mean
    covariance = mean(x * y) - x_mean * y_mean
    c1, c2 = 0.01**2, 0.03**2
    alike = (2 * x_mean * y_mean + c1) * (2 * covariance + c2)
    alike /= (x_mean**2 + y_mean**2 + c1) * (x_variance + y_variance + c2)
    side = min(target.shape[-2:])
    edge = (min(11, side - 1 + side % 2) - 1) // 2  # there the window hangs over the border
    return float(alike[:, edge : target.shape[-2] - edge, edge : target.shape[-1] - edge].mean(dtype="float64"))


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
