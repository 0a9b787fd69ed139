"""A MODEL of the host in FP32 and in short dtypes: one denoising step at each of a few sigmas.

The step is the host's own, from the conditioning to `apply_model`: a guider with a sampler that asks once. What differs
is the clone that it works on, whose compute dtype the host's own switch sets; the weights are shared and stay as they
were loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import torch
from torch import Tensor

from ....training.errors import BadInput
from ....training.precision.assessment import LATENT_LIMIT, Choice, choose, describe_tensor_error, layers_to_keep
from ....training.precision.audit import Audit
from ....training.precision.audit_report import AuditPart
from ....training.precision.dtypes import DTYPES
from ..collector import without_collector
from ..patching.audited import Audited, error_of, native_support
from ..patching.exact_float32 import exact_float32
from ..patching.storage import storage_name
from .select import model_dtypes

__all__ = ["AuditedModel", "audit_model", "check_sigmas", "empty_conditioning", "runs_of_model"]

_WORDS = {"early": 10.0, "middle": 50.0, "late": 90.0}  # per cent of the sampling
_CONTEXT_DIMS = ("context_dim", "context_in_dim", "cross_attention_dim", "text_dim", "cap_feat_dim")
_TOKENS, _POOLED = 77, 1280  # of an empty text; SDXL's pooled output
_TIME_IDS = 6 * 256  # what SDXL appends to it


@dataclass
class AuditedModel(Audited):
    """denoised: for each part and dtype's name the raw latent of FP32, and the one in the dtype."""

    choice: Choice | None = None
    keep: tuple[str, ...] = ()
    keep_why: str = ""
    denoised: list[tuple[AuditPart, str, Tensor, Tensor]] = field(default_factory=list)


def check_sigmas(text: str) -> list[str]:
    """"10%, middle, 0.3" -> its entries: early, middle, late, a percentage of the sampling, or a sigma itself."""
    entries = [entry for entry in re.split(r"[\s,;]+", text.strip().lower()) if entry]
    for entry in entries:
        if entry not in _WORDS and not re.fullmatch(r"\d*\.?\d+(e[+-]?\d+)?%?", entry):
            raise BadInput(
                f"sigmas must be a list of early, middle, late, percentages of the sampling such as 25%, or sigmas "
                f"such as 0.5; got {entry!r}."
            )
        if entry.endswith("%") and not 0 < float(entry[:-1]) < 100:
            raise BadInput(f"A percentage in sigmas must be between 0 and 100; got {entry}.")
    if not entries:
        raise BadInput("sigmas is empty: name at least one, such as early, middle, late.")
    return list(dict.fromkeys(entries))


def runs_of_model(sigmas: list[str], names: tuple[str, ...]) -> int:
    """Steps of a progress bar."""
    return len(sigmas) * (1 + len(names))


def audit_model(
    model: Any,
    positive: list,
    latent: Tensor,
    sigmas: list[str],
    names: tuple[str, ...],
    seed: int,
    step: Callable[[str], None],
) -> AuditedModel:
    """`latent`: raw [1, C, ...], noised to each sigma; zeros for pure noise. `step(line)` is called before each run.

    The hooks that watch are gone afterwards, and so is every clone. Raises BadInput for a sigma outside of the model's
    range, and for a model that gives NaN in FP32 already.
    """
    sampling = model.get_model_object("model_sampling")
    at = {_title(entry, sigma): sigma for entry, sigma in ((e, _sigma(e, sampling)) for e in sigmas)}
    noise = comfy.sample.prepare_noise(latent, seed)
    held = storage_name(model_dtypes(model)[0])
    audited = AuditedModel()
    audited.notes.append(f"MODEL: {type(model.model).__name__}, weights in {held}; FP32 means FP32 compute over those.")
    trials: dict[str, list[tuple[bool, str]]] = {name: [] for name in names}
    for title, sigma in at.items():
        # an operation of the host casts its weights to its input's dtype, so a layer runs alone as it is
        audit = Audit(names, in_dtype=lambda layer, _dtype: layer, seed=seed)
        part = AuditPart(f"MODEL at {title}", audit)
        step(f"{part.name} in FP32")
        with exact_float32(), audit.reference(model.model.diffusion_model):
            reference, direction = _denoise(model, torch.float32, positive, noise, latent, sigma)
        if not torch.isfinite(reference).all():
            raise BadInput(
                f"The model gives NaN or infinity at {title} in FP32 already: its weights are damaged or were not all "
                f"in the checkpoint, so there is nothing to compare with."
            )
        for name in names:
            step(f"{part.name} in {name}")
            with audit.lowered(name, model.model.diffusion_model):
                low, low_direction = _denoise(model, DTYPES[name], positive, noise, latent, sigma)
            errors = error_of([low_direction], [direction])
            part.sentences.append(describe_tensor_error(f"{name} step", errors, LATENT_LIMIT))
            trials[name].append((errors.relative <= LATENT_LIMIT, f"{title}, {part.sentences[-1]}"))
            audited.denoised.append((part, name, reference, low))
        audited.parts.append(part)
    _conclude(audited, model, names, trials)
    return audited


def _conclude(audited: AuditedModel, model: Any, names: tuple[str, ...], trials: dict) -> None:
    layers = [layer for part in audited.parts for layer in part.layers]
    native = native_support(model.load_device, names)
    # a dtype is as good as it is at its worst sigma
    worst = {name: min(tried, key=lambda one: one[0]) for name, tried in trials.items()}
    audited.choice = choose(worst, native, layers)
    advice = [layers_to_keep(part.layers, audited.choice.dtype) for part in audited.parts]
    audited.keep = tuple(dict.fromkeys(layer for layers_named, _ in advice for layer in layers_named))
    audited.keep_why = "lose more than rounding explains, or near the dtype's limit: " + ", ".join(
        dict.fromkeys(why for _, reasons in advice for why in reasons)
    )


# ------------------------------------------------------------------------------------------------- one denoising step


class _Once(comfy.samplers.Sampler):
    """Asks the model once, at the first sigma, and keeps the direction of the step: (x - denoised) / sigma."""

    direction: Tensor | None = None

    def sample(self, model_wrap, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None,
               disable_pbar=False):  # fmt: skip
        sampling = model_wrap.inner_model.model_sampling
        x = sampling.noise_scaling(sigmas[0], noise, latent_image, self.max_denoise(model_wrap, sigmas))
        denoised = model_wrap(x, sigmas[:1].expand(x.shape[0]), **extra_args)
        self.direction = ((x - denoised) / sigmas[0]).float().cpu()
        return denoised


def _denoise(
    model: Any, dtype: torch.dtype, positive: list, noise: Tensor, latent: Tensor, sigma: float
) -> tuple[Tensor, Tensor]:
    """(denoised latent, raw; direction of the step, in model space), both float32 on the CPU."""
    clone, once = model.clone(), _Once()
    clone.set_model_compute_dtype(dtype)
    try:
        denoised = comfy.samplers.sample(
            clone, noise, positive, positive, 1.0, clone.load_device, once, torch.tensor([sigma, 0.0]),
            model_options=clone.model_options, latent_image=latent, disable_pbar=True,
        )  # fmt: skip
    finally:
        _unload(clone)
    return denoised.float().cpu(), once.direction


def _unload(clone: Any) -> None:
    """Take the clone off the device by the host's own hand, which also puts back what the clone had switched."""
    others = [loaded for loaded in comfy.model_management.current_loaded_models if loaded.model is not clone]
    with without_collector():
        comfy.model_management.free_memory(1e30, clone.load_device, others)


# ------------------------------------------------------------------------------------------------------- what it needs


def _sigma(entry: str, sampling: Any) -> float:
    least, most = float(sampling.sigma_min), float(sampling.sigma_max)
    percent = _WORDS.get(entry, float(entry[:-1]) if entry.endswith("%") else None)
    if percent is not None:
        return min(max(float(sampling.percent_to_sigma(percent / 100)), least), most)
    if not least <= float(entry) <= most:
        raise BadInput(f"A sigma of this model must be from {least:.4g} to {most:.4g}; got {entry}.")
    return float(entry)


def _title(entry: str, sigma: float) -> str:
    return f"sigma {sigma:.3g}" + (f" ({entry})" if entry in _WORDS or entry.endswith("%") else "")


def empty_conditioning(model: Any) -> list:
    """A CONDITIONING of zeros in the shape that the model takes. BadInput where that cannot be told."""
    config = model.model.model_config.unet_config
    dims = [config[name] for name in _CONTEXT_DIMS if isinstance(config.get(name), int)]
    if not dims:
        raise BadInput(
            f"What text a {type(model.model).__name__} takes is not known here; link its clip, or a positive "
            f"conditioning."
        )
    adm = config.get("adm_in_channels") or 0
    pooled = config.get("vec_in_dim") or (adm - _TIME_IDS if adm > _TIME_IDS else _POOLED)
    return [[torch.zeros(1, _TOKENS, dims[0]), {"pooled_output": torch.zeros(1, pooled)}]]
