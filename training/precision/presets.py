"""Ready-made precision plans, each choice with its reason."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .device import support
from .dtypes import dtype_name
from .plan import PrecisionPlan

__all__ = ["PRESETS", "preset_plan"]

_AS_LOADED = "as loaded, with ComfyUI's own FP32 compute: it stores FP16, of which BF16 would lose three more bits"
_DECODER = "the decoder gives the picture itself: in half precision it adds noise of high frequency"
_NO_NEW_BITS = "FP32 compute; wider storage would not bring back what a file or loader has rounded"


def _recommended(_device: torch.device) -> PrecisionPlan:
    return PrecisionPlan(
        model_compute="bf16",
        vae_encoder="bf16",
        vae_decoder="fp32",
        reasons={
            "model": "BF16 has the range of FP32, and sampling averages out what its rounding adds",
            "clip": _AS_LOADED,
            "VAE encoder": "its latent is noised afterwards: BF16 keeps enough",
            "VAE decoder": _DECODER,
        },
    )


def _article(_device: torch.device) -> PrecisionPlan:
    return PrecisionPlan(
        model_compute="bf16",
        model_storage="bf16",
        clip={"all": ("bf16", "bf16")},
        vae_encoder="bf16",
        vae_decoder="fp32",
        reasons={
            "model": "all in BF16, as the article has it",
            "clip": "all in BF16, as the article has it; recommended leaves it as loaded, which keeps three bits more",
            "VAE encoder": "all in BF16, as the article has it",
            "VAE decoder": _DECODER,
        },
    )


def _quality(_device: torch.device) -> PrecisionPlan:
    return PrecisionPlan(
        model_compute="fp32",
        clip={"all": ("default", "fp32")},
        vae_encoder="fp32",
        vae_decoder="fp32",
        reasons={
            "model": _NO_NEW_BITS,
            "clip": _NO_NEW_BITS,
            "VAE encoder": "FP32 throughout",
            "VAE decoder": "FP32 throughout",
        },
    )


def _fast(device: torch.device) -> PrecisionPlan:
    name, why = _fastest(device)
    return PrecisionPlan(
        model_compute=name,
        keep=("norms",) if name == "fp16" else (),
        vae_encoder=name if name != "fp16" else "fp32",
        vae_decoder=name if name != "fp16" else "fp32",
        reasons={
            "model": why + ("; norms stay in FP32, since their sums pass FP16's limit first" if name == "fp16" else ""),
            "clip": "as loaded: it runs once a prompt",
            "VAE encoder": why if name != "fp16" else "several VAEs pass FP16's limit, 65504",
            "VAE decoder": f"{why}; look at flat areas for fine noise" if name == "bf16" else "several VAEs pass "
            "FP16's limit, 65504" if name == "fp16" else why,
        },
    )


def _low_memory(device: torch.device) -> PrecisionPlan:
    name, why = _fastest(device)
    return PrecisionPlan(
        model_compute=name,
        model_storage="fp8_e4m3fn",
        keep=("norms", "embeddings", "in_out"),
        clip={"t5xxl": ("fp8_e4m3fn", "default"), "umt5xxl": ("fp8_e4m3fn", "default")},
        vae_encoder="bf16",
        vae_decoder="bf16",
        reasons={
            "model": f"weights in FP8, a byte each, cast as they are used; what is small and delicate computes in FP32 "
            f"({why})",
            "clip": "as loaded, FP16",
            "t5xxl": "the largest text encoder, in FP8; expect small changes in what the prompt does",
            "umt5xxl": "the largest text encoder, in FP8; expect small changes in what the prompt does",
            "VAE encoder": "half the memory of FP32",
            "VAE decoder": "half the memory of FP32, at the price of fine noise",
        },
    )


def _auto(_device: torch.device) -> PrecisionPlan:
    return PrecisionPlan(
        model_compute="auto",
        vae_encoder="auto",
        vae_decoder="auto",
        reasons={"clip": _AS_LOADED},  # the selectors say what the device has, and why
    )


def _fastest(device: torch.device) -> tuple[str, str]:
    """The dtype in which `device` computes fastest, and why."""
    bf16, fp16 = support(device, torch.bfloat16), support(device, torch.float16)
    if bf16.runs and bf16.native:
        return "bf16", "this device computes in BF16 at full rate"
    if fp16.runs and fp16.native:
        return "fp16", f"FP16: {bf16.why}"
    return dtype_name(torch.float32), f"FP32: {bf16.why}, and {fp16.why}"


PRESETS: dict[str, Callable[[torch.device], PrecisionPlan]] = {
    "recommended": _recommended,
    "article": _article,
    "quality": _quality,
    "fast": _fast,
    "low memory": _low_memory,
    "auto": _auto,
}


def preset_plan(name: str, device: torch.device) -> PrecisionPlan:
    """The plan of a preset out of `PRESETS` for `device`. KeyError for another name."""
    return PRESETS[name](device)
