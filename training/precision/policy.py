"""Which dtype suits which part of a model, each choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .device import support
from .dtypes import dtype_name

__all__ = ["DIFFUSION_MODEL", "TEXT_ENCODER", "VAE_DECODER", "VAE_ENCODER", "AutomaticDtype", "automatic"]

VAE_ENCODER, VAE_DECODER, TEXT_ENCODER = "VAE encoder", "VAE decoder", "text encoder"
DIFFUSION_MODEL = "diffusion model"


@dataclass(frozen=True)
class AutomaticDtype:
    dtype: torch.dtype
    why: str


def automatic(kind: str, device: torch.device, allowed: tuple[torch.dtype, ...] = ()) -> AutomaticDtype:
    """The dtype for a part of the kind `kind` on `device`; `allowed`: those that its model is known to work in.

    A VAE decoder is always FP32: it gives the picture itself, and in BF16 it adds noise of high frequency. A VAE
    encoder is BF16 where the device has it in hardware: its latent is noised or averaged afterwards. FP16 is never
    picked for a VAE: the activations of several pass its limit, 65504. A text encoder is always FP32: it runs once for
    a prompt, and what it gives is the key and the value of every cross-attention of every step. A diffusion model is
    BF16 where the device has it in hardware, for its range, else FP16 where it has that, else FP32.
    """
    if kind == DIFFUSION_MODEL:
        return _half(device, allowed)
    if kind == TEXT_ENCODER:
        return AutomaticDtype(torch.float32, "a text encoder runs once, and its error would be in every step")
    if kind == VAE_DECODER:
        return AutomaticDtype(torch.float32, "a decoder gives the picture itself")
    if kind == VAE_ENCODER:
        if allowed and torch.bfloat16 not in allowed:
            names = ", ".join(dtype_name(dtype) for dtype in allowed)
            return AutomaticDtype(torch.float32, f"this VAE is known to work in {names}, not in bf16")
        available = support(device, torch.bfloat16)
        if available.runs and available.native:
            return AutomaticDtype(torch.bfloat16, "an encoder keeps enough in bf16, and this device has it in hardware")
        return AutomaticDtype(torch.float32, available.why)
    kinds = (VAE_ENCODER, VAE_DECODER, TEXT_ENCODER, DIFFUSION_MODEL)
    raise ValueError(f"kind must be one of {', '.join(map(repr, kinds))}; got {kind!r}")


def _half(device: torch.device, allowed: tuple[torch.dtype, ...]) -> AutomaticDtype:
    """BF16, FP16 or FP32 for a model that is known to work in `allowed` (none named: in all)."""
    reasons = []
    for dtype in (torch.bfloat16, torch.float16):
        available = support(device, dtype)
        if not (available.runs and available.native):
            reasons.append(available.why)
        elif allowed and dtype not in allowed:
            reasons.append(f"this model is not known to work in {dtype_name(dtype)}")
        else:
            return AutomaticDtype(dtype, "; ".join([*reasons, f"this device has {dtype_name(dtype)} in hardware"]))
    return AutomaticDtype(torch.float32, "; ".join(reasons))
