"""The whole audit: what is linked is run, in FP32 and in each dtype, one model after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.model_management
import numpy
import torch
from torch import Tensor

from ....training.errors import BadInput
from ....training.precision.assessment import describe_picture_error
from ....training.precision.audit import SAMPLE
from ....training.precision.audit_chart import chart, difference_picture
from ....training.precision.audit_report import AuditPart, report
from ....training.precision.device import support
from ....training.precision.dtypes import AUDITED, DTYPES
from ....training.precision.measures import FP16_LARGEST, compare_pictures
from ....training.precision.plan import PrecisionPlan
from ....training.precision.policy import VAE_DECODER, VAE_ENCODER
from ....training.precision.resolve import DEFAULT
from ....training.precision.sample_picture import sample_picture
from ..clip.audit import AuditedCLIP, audit_clip, runs_of_clip
from ..model.audit import AuditedModel, audit_model, check_sigmas, empty_conditioning, runs_of_model
from ..patching.exact_float32 import exact_float32
from ..progress import NodeProgress, raise_if_interrupted
from ..vae.audit import AuditedVAE, audit_vae, frames_of, runs_of_vae

__all__ = ["PrecisionAudit", "audit_precision"]

_CELL = 8  # pixels a latent cell, where no VAE says it


@dataclass(frozen=True)
class PrecisionAudit:
    """report: Markdown; chart: [1, H, W, 3]; differences: [N, H, W, 3], a line below each says what it is."""

    report: str
    chart: Tensor
    differences: Tensor
    plan: PrecisionPlan


def audit_precision(
    model: Any | None,
    clip: Any | None,
    vae: Any | None,
    image: Tensor | None,
    *,
    prompt: str,
    positive: list | None,
    sigmas: str,
    dtypes: str,
    seed: int,
    node_id: str | None,
) -> PrecisionAudit:
    """Any of the three models, at least one. `sigmas` as check_sigmas reads them, `dtypes` a key of AUDITED.

    None of what comes in is altered. A dtype that this machine lacks is left out, and said. Raises BadInput.
    """
    if model is None and clip is None and vae is None:
        raise BadInput("Nothing to measure: link at least one of model, clip and vae.")
    device = comfy.model_management.get_torch_device()
    names, notes = _dtypes(dtypes, device)
    entries = check_sigmas(sigmas) if model is not None else []
    own_image = image is not None
    image = image if own_image else sample_picture()
    notes = [f"Seed {seed}, prompt {prompt[:80]!r}." if clip is not None else f"Seed {seed}.", *notes]
    if vae is not None:
        size = f"{image.shape[2]}x{image.shape[1]}"
        notes.append(f"Picture: {'the one linked' if own_image else 'the built-in test picture'}, {size}.")

    total = runs_of_vae(names) * (vae is not None) + runs_of_clip(names) * (clip is not None)
    progress = NodeProgress(node_id, total + runs_of_model(entries, names))

    def step(line: str) -> None:
        raise_if_interrupted()
        progress.text(line)
        progress.advance()

    seen_vae = audit_vae(vae, image, names, seed, step) if vae is not None else None
    seen_clip = audit_clip(clip, prompt, names, seed, step) if clip is not None else None
    seen_model = None
    if model is not None:
        condition, note = _condition(model, clip, prompt, positive)
        latent, more = _latent(model, seen_vae, image)
        seen_model = audit_model(model, condition, latent, entries, names, seed, step)
        seen_model.notes += [note, more]
    pictures = _pictures(seen_vae, seen_clip, seen_model)
    parts: list[AuditPart] = []
    for seen in (seen_vae, seen_clip, seen_model):
        if seen is not None:
            parts += seen.parts
            notes += seen.notes
    notes.append(
        f"own: what a layer loses by itself, on its FP32 input rounded to the dtype, over all values. so far: what has "
        f"gathered up to it in a whole run, over {SAMPLE} values of each output. of fp16's range, overflow (above "
        f"{FP16_LARGEST:.0f}) and to zero: from the FP32 run."
    )
    plan = _plan(seen_vae, seen_clip, seen_model)
    comfy.model_management.soft_empty_cache()
    text = report(f"Precision audit on {device}: FP32 against {' and '.join(names)}", notes, parts, plan)
    return PrecisionAudit(text, _image(chart(parts)), _stack(pictures), plan)


# ---------------------------------------------------------------------------------------------------------- what to run


def _dtypes(wanted: str, device: torch.device) -> tuple[tuple[str, ...], list[str]]:
    """The short dtypes that this device has, and what there is to say about them."""
    if wanted not in AUDITED:
        raise BadInput(f"dtypes must be one of {', '.join(AUDITED)}; got {wanted!r}.")
    names, notes = [], []
    for name in AUDITED[wanted]:
        had = support(device, DTYPES[name])
        if had.runs:
            names.append(name)
        if had.why:
            notes.append(f"{had.why}." if had.runs else f"{name} is left out: {had.why}.")
    if not names:
        raise BadInput(f"Nothing to compare FP32 with: {notes[0]}")
    return tuple(names), notes


def _condition(model: Any, clip: Any | None, prompt: str, positive: list | None) -> tuple[list, str]:
    if positive is not None:
        return positive, "Conditioning of the model: the one linked."
    if clip is not None:
        condition = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
        return condition, "Conditioning of the model: the prompt, by the clip linked."
    return empty_conditioning(model), "Conditioning of the model: zeros, since neither positive nor clip is linked."


def _latent(model: Any, seen: AuditedVAE | None, image: Tensor) -> tuple[Tensor, str]:
    """What is noised for the model: the picture's latent where it fits, else nothing but noise of its size."""
    latent_format = model.get_model_object("latent_format")
    flat = latent_format.latent_dimensions == 2
    if seen is not None and seen.encodes:
        fits = seen.latent.shape[1] == latent_format.latent_channels and seen.latent.ndim == (4 if flat else 5)
        if fits:
            return seen.latent[:1], "The model denoises the latent of the picture."
    height, width = (max(side // _CELL, 8) for side in image.shape[1:3])
    shape = (1, latent_format.latent_channels, *(() if flat else (1,)), height, width)
    note = f"The model denoises pure noise, {width} x {height} cells: no VAE that fits it is linked."
    return torch.zeros(shape), note


# -------------------------------------------------------------------------------------------------------- what came out


def _pictures(vae: AuditedVAE | None, clip: AuditedCLIP | None, model: AuditedModel | None) -> list[Tensor]:
    """Difference pictures; also of denoised latents, where the VAE can decode them: their verdicts go to the parts."""
    pictures = list(vae.pictures) if vae else []
    for part, dtype, reference, low in model.denoised if model else []:
        if vae is not None and vae.encodes and reference.shape[1:2] == vae.latent.shape[1:2]:
            with exact_float32():
                fine, coarse = (frames_of(vae.fine.decode(x)) for x in (reference, low))
            error = compare_pictures(coarse, fine)
            part.sentences.append(describe_picture_error(f"{dtype} prediction, decoded", error))
            difference = (coarse[0] - fine[0]).movedim(-1, 0)
        else:
            plane = (low - reference)[0].mean(0)
            difference = (plane if plane.ndim == 2 else plane[0]).expand(3, -1, -1)
        pictures.append(difference_picture(difference, f"{part.name}, {dtype}"))
    if not pictures and clip is not None:
        pictures = [difference_picture(difference, what) for what, difference in clip.differences]
    return pictures


def _plan(vae: AuditedVAE | None, clip: AuditedCLIP | None, model: AuditedModel | None) -> PrecisionPlan:
    """What was not measured stays at "default", without a reason."""
    reasons: dict[str, str] = {}
    chosen: dict[str, Any] = {}
    for part, key in ((VAE_ENCODER, "vae_encoder"), (VAE_DECODER, "vae_decoder")):
        if vae is not None and part in vae.choices:
            chosen[key], reasons[part] = vae.choices[part].dtype, vae.choices[part].why
    if clip is not None:
        # a shorter storage only loses, and a longer one brings nothing back
        chosen["clip"] = {name: (DEFAULT, choice.dtype) for name, choice in clip.compute.items()}
        reasons |= {name: f"{clip.storage[name]}; {choice.why}" for name, choice in clip.compute.items()}
    if model is not None and model.choice is not None:
        chosen["model_compute"], reasons["model"] = model.choice.dtype, model.choice.why
        chosen["keep"] = model.keep
        if model.keep:
            reasons["keep"] = model.keep_why
    return PrecisionPlan(**chosen, reasons=reasons)


def _image(picture: Any) -> Tensor:
    return torch.from_numpy(numpy.asarray(picture, dtype=numpy.float32) / 255)[None]


def _stack(pictures: list[Tensor]) -> Tensor:
    """[H, W, 3] of any sizes -> [N, H, W, 3], the smaller ones on black."""
    height, width = (max(picture.shape[i] for picture in pictures) for i in (0, 1))
    batch = torch.zeros(len(pictures), height, width, 3)
    for one, picture in zip(batch, pictures, strict=True):
        one[: picture.shape[0], : picture.shape[1]] = picture
    return batch
