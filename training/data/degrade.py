"""Named degradations: a stand-in for a base model, made from the target picture itself."""

from __future__ import annotations

import io
import math

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.nn import functional

from ..errors import BadInput
from .buckets import resize
from .pictures import to_uint8

# kind -> (what `amount` means, lowest, highest)
AMOUNTS = {
    "resize": ("the factor by which the picture shrinks", 1.0, 32.0),
    "blur": ("the blur's sigma in pixels", 0.0, 64.0),
    "jpeg": ("the JPEG quality", 1.0, 100.0),
}


def check_degradation(kind: str, amount: float) -> None:
    """Raise BadInput unless `degrade` can do this. For "resize" and "blur" the lower bound itself does nothing, and is
    refused: base and target would be equal."""
    if kind not in AMOUNTS:
        raise BadInput(f"The degradation must be one of {', '.join(AMOUNTS)}, not {kind!r}.")
    meaning, low, high = AMOUNTS[kind]
    if kind == "jpeg":
        if not low <= amount <= high or amount != int(amount):
            raise BadInput(f"The degradation's amount ({meaning}) must be a whole number from 1 to 100, not {amount}.")
    elif not low < amount <= high:
        raise BadInput(f"The degradation's amount ({meaning}) must be above {low:g}, {high:g} at most, not {amount}.")


def degrade(picture: Tensor, kind: str, amount: float) -> Tensor:
    """A worse version of `picture` ([3, H, W] in [0, 1]), of the same size and range.

    resize: antialiased bicubic down by the factor `amount` (3 = to a third), bicubic up again.
    blur: Gaussian with sigma `amount` in pixels, the border repeated.
    jpeg: through a JPEG file of quality `amount`.

    Raises:
        BadInput: an unknown kind or an amount out of its range.
    """
    check_degradation(kind, amount)
    if kind == "resize":
        height, width = picture.shape[1:]
        small = max(1, round(height / amount)), max(1, round(width / amount))
        return resize(resize(picture, small), (height, width))
    if kind == "blur":
        return _blur(picture, amount)
    return _jpeg(picture, int(amount))


def _blur(picture: Tensor, sigma: float) -> Tensor:
    radius = max(1, math.ceil(3 * sigma))
    offsets = torch.arange(-radius, radius + 1, dtype=torch.float32)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
    weights = (weights / weights.sum()).to(picture)
    padded = functional.pad(picture[:, None], (radius, radius, radius, radius), mode="replicate")
    across = functional.conv2d(padded, weights.view(1, 1, 1, -1))
    return functional.conv2d(across, weights.view(1, 1, -1, 1))[:, 0].clamp(0, 1)


def _jpeg(picture: Tensor, quality: int) -> Tensor:
    file = io.BytesIO()
    Image.fromarray(to_uint8(picture)).save(file, "JPEG", quality=quality)
    decoded = torch.from_numpy(np.array(Image.open(file, formats=("JPEG",))))
    decoded = rearrange(decoded, "height width channels -> channels height width").contiguous()
    return (decoded.float() / 255).to(picture)
