"""The base MODEL of the host: its latent format, its size, and its own sampler at low noise."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import comfy.sample
import comfy.samplers
import comfy.utils
import torch

from ....training.errors import BadInput
from ..patching.fingerprint import hash_weights

__all__ = [
    "enlarge_latent",
    "has_plain_options",
    "latent_scaling",
    "low_noise_latent",
    "model_fingerprint",
    "model_name",
    "model_parameters",
    "sampler_names",
    "scheduler_names",
]

_COMPUTES_IN = "manual_cast_dtype"  # the object that the host's switch of the dtype to compute in puts on a patcher
_ON_TOP = ("wrappers", "callbacks", "weight_wrapper_patches", "forced_hooks")


def sampler_names() -> list[str]:
    """The samplers of this host, as its KSampler lists them."""
    return list(comfy.samplers.KSampler.SAMPLERS)


def scheduler_names() -> list[str]:
    """The schedulers of this host, as its KSampler lists them."""
    return list(comfy.samplers.KSampler.SCHEDULERS)


def enlarge_latent(latent: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """A latent [C,h,w] on the grid of `size` = (height, width): what the host's Upscale Latent does with bicubic."""
    if tuple(latent.shape[1:]) == size:
        return latent
    return comfy.utils.common_upscale(latent[None], size[1], size[0], "bicubic", "disabled")[0]


def model_name(model: Any) -> str:
    """What kind of model the host took this for, e.g. "SD15" or "SDXL"."""
    return type(model.model.model_config).__name__


def model_parameters(model: Any) -> int:
    """Number of parameters of the diffusion network alone."""
    # by shape: a packed format may count the bytes that it stores
    return sum(math.prod(p.shape) for p in model.model.diffusion_model.parameters() if p is not None)


def model_fingerprint(model: Any) -> str:
    """Hex digest of the model's kind, weights (sampled, LoRA patches included), the dtype that a node has it compute in
    and what a selector chose for it. It says nothing of other patches: `has_plain_options` does."""
    from .guard import reruns_in_float32  # the list of samplers does without
    from .select import model_precision

    digest = hashlib.sha256(model_name(model).encode() + model_precision(model).encode())
    digest.update(str(model.object_patches.get(_COMPUTES_IN, "")).encode())
    if reruns_in_float32(model):
        digest.update(b"guarded")
    hash_weights(digest, model)
    return digest.hexdigest()


def has_plain_options(model: Any) -> bool:
    """Whether no other node has put a patch, a wrapper or a function of its own on this MODEL, beside weights.

    `model_fingerprint` does not see those, so what such a model samples must not be taken for another one's. What
    Select Model Precision and NaN Guard put on it is in the fingerprint.
    """
    from .guard import GUARD
    from .select import without_precision

    options, injections = without_precision(model)
    patched = {name: patch for name, patch in model.object_patches.items() if name != _COMPUTES_IN}
    on_top = (getattr(model, name, None) for name in _ON_TOP)
    return not any(_holds_something(each, GUARD) for each in (options, injections, patched, *on_top))


def _holds_something(value: Any, but: str) -> bool:
    """Whether anything is in dicts in dicts, whatever the key `but` has."""
    if isinstance(value, dict):
        return any(_holds_something(each, but) for key, each in value.items() if key != but)
    return bool(value)


def latent_scaling(model: Any) -> tuple[str, int, float | list[float], float | list[float]]:
    """(name, channels, scale, shift) of the model's latent format: model space = (raw - shift) * scale.

    Scale and shift are numbers, or one number a channel. They are read from the format's usual attributes and then
    checked against its `process_in`; a format that does something else raises BadInput naming it.
    """
    latent_format = model.get_model_object("latent_format")
    name, channels = type(latent_format).__name__, latent_format.latent_channels
    mean, std = getattr(latent_format, "latents_mean", None), getattr(latent_format, "latents_std", None)
    factor = float(getattr(latent_format, "scale_factor", 1.0))
    if torch.is_tensor(mean) and torch.is_tensor(std):
        scale = [factor / value for value in std.flatten().tolist()]
        shift = mean.flatten().tolist()
    else:
        scale, shift = factor, float(getattr(latent_format, "shift_factor", None) or 0.0)

    spatial = (1, 3, 5) if latent_format.latent_dimensions == 3 else (3, 5)
    if latent_format.latent_dimensions not in (2, 3):
        raise BadInput(f"The base model's latent format {name} is not one of pictures.")
    x = torch.randn(1, channels, *spatial, generator=torch.Generator().manual_seed(0))
    per_channel = (1, channels) + (1,) * len(spatial)
    widen = lambda v: torch.tensor(v).reshape(per_channel) if isinstance(v, list) else v  # noqa: E731
    want, got = (x - widen(shift)) * widen(scale), latent_format.process_in(x)
    if got.shape != want.shape or not torch.allclose(got.float(), want, rtol=1e-5, atol=1e-6):
        raise BadInput(
            f"The base model's latent format {name} is not of the form (latent - shift) * scale, which is all that a "
            f"refiner file can carry; choose another base model, or a base from a degradation."
        )
    return name, channels, scale, shift


def low_noise_latent(
    model: Any,
    latent: torch.Tensor,
    positive: list,
    negative: list,
    *,
    seed: int,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
    denoise: float,
) -> torch.Tensor:
    """What the host's KSampler gives for this latent_image: noised to `denoise`, then denoised with these settings.

    latent: raw [C,h,w]; returns the same shape, raw, float32 on the CPU. The noise is drawn from `seed` alone, so a
    picture's base latent does not depend on the pictures before it.
    """
    batch = comfy.sample.fix_empty_latent_channels(model, latent[None])
    noise = comfy.sample.prepare_noise(batch, seed)
    result = comfy.sample.sample(
        model,
        noise,
        steps,
        cfg,
        sampler_name,
        scheduler,
        positive,
        negative,
        batch,
        denoise=denoise,
        disable_pbar=True,
        seed=seed,
    )
    if result.ndim == 5 and result.shape[2] == 1:
        result = result[:, :, 0]
    result = result[0].float().cpu().clone()
    if result.shape != latent.shape:
        raise BadInput(
            f"The base model gives a latent of {list(result.shape)} for one of {list(latent.shape)}: the VAE and the "
            f"model do not belong together."
        )
    if not math.isfinite(float(result.abs().max())):
        raise BadInput(
            f"The base model ({model_name(model)}, its UNet) gives NaN or infinity after denoising at {denoise}: its "
            f"weights are damaged, were not all in the checkpoint, or overflow in the precision it runs in."
        )
    return result
