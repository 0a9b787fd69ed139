"""How far a result in a short dtype is from the one in FP32: of tensors, and of pictures as an eye sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..data import metrics

__all__ = ["FP16_LARGEST", "Errors", "PictureError", "compare_pictures", "rescale_error"]

FP16_LARGEST = 65504.0
_BANDS = 32  # rings of the radial spectrum; the upper half of them counts as fine detail


@dataclass
class Errors:
    """The error of a tensor against its FP32 reference, summed over calls. Relative errors are ratios of norms."""

    error: float = 0.0  # squared norms
    reference: float = 0.0
    other: float = 0.0
    product: float = 0.0
    largest: float = 0.0  # largest absolute error of an element
    not_finite: int = 0
    calls: int = 0

    def add(self, low: Tensor, reference: Tensor) -> None:
        """Two tensors of one shape, in any dtypes. Elements that are NaN or infinite in `low` alone are counted, and
        left out of the rest.
        """
        low, reference = low.detach().float().reshape(-1), reference.detach().float().reshape(-1)
        good = torch.isfinite(low)
        bad = int((~good & torch.isfinite(reference)).sum())
        if bad:
            low, reference = low[good], reference[good]
        difference = low - reference
        self.error += float(torch.linalg.vector_norm(difference)) ** 2
        self.reference += float(torch.linalg.vector_norm(reference)) ** 2
        self.other += float(torch.linalg.vector_norm(low)) ** 2
        self.product += float(torch.dot(low, reference))
        self.largest = max(self.largest, float(difference.abs().max()) if low.numel() else 0.0)
        self.not_finite += bad
        self.calls += 1

    @property
    def relative(self) -> float:
        """||low - reference|| / ||reference||; infinite where the short dtype gave NaN or infinity."""
        if self.not_finite:
            return math.inf
        return math.sqrt(self.error / self.reference) if self.reference else (math.inf if self.error else 0.0)

    @property
    def cosine(self) -> float:
        """1 = the same direction; NaN where the short dtype gave NaN or infinity."""
        if self.not_finite:
            return math.nan
        norms = math.sqrt(self.other * self.reference)
        return min(self.product / norms, 1.0) if norms else 1.0


@dataclass(frozen=True)
class PictureError:
    """A picture against its FP32 reference.

    psnr in dB; ssim; colour: CIEDE2000, mean over the pixels, and colour_99, which one pixel in a hundred passes;
    chroma: mean change of CIELAB chroma, below 0 = greyer; fine: energy of the difference in fine detail (above half of
    the Nyquist frequency) against the reference's own there, in dB, so -30 is a thousandth.
    """

    psnr: float
    ssim: float
    colour: float
    colour_99: float
    chroma: float
    fine: float
    finite: bool = True

    @classmethod
    def broken(cls) -> PictureError:
        """Of a picture that holds NaN or infinity."""
        return cls(0.0, 0.0, math.inf, math.inf, math.nan, math.inf, finite=False)


def compare_pictures(picture: Tensor, reference: Tensor) -> PictureError:
    """[N, H, W, 3] pictures in [0, 1] (sRGB), the mean over N; colour_99 over all pixels.

    CIEDE2000 as Sharma, Wu & Dalal 2005 give it; the spectrum is that of training/data/metrics.py.
    """
    import numpy

    from .colour import ciede2000, lab_of_rgb

    if not torch.isfinite(picture).all():
        return PictureError.broken()
    picture, reference = (x[..., :3].detach().float().cpu().clamp(0, 1) for x in (picture, reference))
    colours, chromas, psnrs, ssims, noise, own = [], [], [], [], 0.0, 0.0
    for low, fine in zip(picture, reference, strict=True):
        one, other = (lab_of_rgb(x.double().numpy()) for x in (low, fine))
        colours.append(ciede2000(other, one))
        chromas.append(float((numpy.hypot(*numpy.moveaxis(one[..., 1:], -1, 0))).mean()))
        chromas[-1] -= float((numpy.hypot(*numpy.moveaxis(other[..., 1:], -1, 0))).mean())
        low, fine = (rearrange(x, "height width channels -> channels height width") for x in (low, fine))
        psnrs.append(metrics.psnr(low, fine))
        ssims.append(metrics.ssim(low, fine))
        noise += _fine_power(low - fine)
        own += _fine_power(fine)
    colour = numpy.stack(colours)
    return PictureError(
        psnr=sum(psnrs) / len(psnrs),
        ssim=sum(ssims) / len(ssims),
        colour=float(colour.mean()),
        colour_99=float(numpy.percentile(colour, 99)),
        chroma=sum(chromas) / len(chromas),
        fine=10 * math.log10(max(noise, 1e-14) / max(own, 1e-14)),
    )


def _fine_power(picture: Tensor) -> float:
    return float(metrics.radial_spectrum(picture, _BANDS)[_BANDS // 2 :].exp().mean())


def rescale_error(pixels: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Mean absolute error of [0, 1] -> [-1, 1] with the cast to `dtype` after the rescaling, and with it before."""
    exact = pixels.double() * 2 - 1
    after = (pixels.float() * 2 - 1).to(dtype)
    before = pixels.to(dtype) * 2 - 1
    return float((after.double() - exact).abs().mean()), float((before.double() - exact).abs().mean())
