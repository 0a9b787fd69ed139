"""A VAE whose encoder and decoder each have a dtype of their own, beside the VAE that it was made of.

Read from top to bottom: what the VAE was made of (source.py), which dtypes are meant, the copies (copies.py), and what
a person is told. Nothing of the source is changed. Under the dynamic VRAM of newer hosts all of it is copied, from the
file's own weights, onto a plain patcher.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch

from ....training.precision.dtypes import dtype_name
from ....training.precision.policy import VAE_DECODER, VAE_ENCODER, automatic
from ....training.precision.resolve import DEFAULT, resolve_compute
from .copies import NoCopy, compute_dtype, vae_in_dtypes
from .halves import Halves, find_halves, lacking_half, refuse_missing_half
from .source import RecognisedVAE, VAEProvenance, class_name, recognise, refuse_without_dtype

__all__ = ["SelectedVAE", "half_in_float32", "select_vae_precision", "vae_dtypes"]

_LOG = logging.getLogger("ref2v")
# What a selector gives a VAE object of its own; the rest is as it came in.
_OURS = {"first_stage_model", "patcher", "vae_dtype", "size", "memory_used_encode", "memory_used_decode", "get_sd"}
_HALVES = (("encoder", VAE_ENCODER), ("decoder", VAE_DECODER))


@dataclass(frozen=True)
class SelectedVAE:
    """The VAE to work with, and what a person is told: which half runs in what, and why."""

    vae: Any
    report: str


def select_vae_precision(vae: Any, encoder: str = DEFAULT, decoder: str = DEFAULT) -> SelectedVAE:
    """`vae` with the dtypes named: "default" (what the loader chose), "auto", or a key of `DTYPES`.

    A dtype that this machine lacks is logged, said in the report and passed over; so is any, for weights that cannot
    be copied, quantized ones above all. Raises BadInput with the reason for a VAE that has no dtype to select.
    """
    given, as_loaded = recognise(vae), encoder == decoder == DEFAULT
    source, provenance = given.source, given.provenance
    if not (as_loaded and provenance.encoder == provenance.decoder == source.vae_dtype):
        refuse_without_dtype(source)
    halves = find_halves(source.first_stage_model)
    if as_loaded:
        dtypes, lines = (provenance.encoder, provenance.decoder), [_as_loaded(provenance)]
    else:
        refuse_missing_half(source, provenance.lacks or lacking_half(source), encoder, decoder)
        dtypes, lines = _dtypes_asked_for(given, halves, encoder, decoder)
    try:
        made = vae_in_dtypes(given, halves, *dtypes, check_layers=not as_loaded)
        if not as_loaded:
            lines += _remarks(given, made, dtypes)
    except NoCopy as refused:
        made, lines = source, [_passed_over(source, refused)]
    made = _as_others_left_it(made, given.bare)
    return SelectedVAE(made if given.guard is None else given.guard.wrap(made), "\n".join(lines))


def _as_loaded(provenance: VAEProvenance) -> str:
    encoder, decoder = dtype_name(provenance.encoder), dtype_name(provenance.decoder)
    return f"{class_name(provenance.source)}: encoder {encoder}, decoder {decoder}, as loaded."


def _dtypes_asked_for(
    given: RecognisedVAE, halves: Halves | None, encoder: str, decoder: str
) -> tuple[tuple[torch.dtype, torch.dtype], list[str]]:
    """((encoder, decoder) as far as this machine and this family of VAEs have them, the lines of the report)."""
    source, device = given.source, given.bare.patcher.load_device
    working = tuple(getattr(source, "working_dtypes", ()))
    dtypes, lines = [], [f"{class_name(source)} on {device}"]
    for (half, kind), asked in zip(_HALVES, (encoder, decoder), strict=True):
        loaded = getattr(given.provenance, half)
        dtype, line = resolve_compute(
            half.capitalize(), asked, loaded, device, lambda kind=kind: automatic(kind, device, working)
        )
        dtypes.append(dtype)
        lines.append(line)
    first, second = dtypes
    if first != second and halves is None:
        first = second = first if torch.finfo(first).eps <= torch.finfo(second).eps else second
        lines.append(
            f"This kind of VAE is not known here, so it cannot be split: all of it runs in {dtype_name(first)}."
        )
    return (first, second), lines


def _remarks(given: RecognisedVAE, made: Any, dtypes: tuple[torch.dtype, torch.dtype]) -> list[str]:
    """A warning for each dtype that is finer than the one that the loader had rounded the weights to, and the memory.
    Under dynamic VRAM the weights are the file's own, so no loader has rounded them.
    """
    stored = given.stored
    finer = [dtype for dtype in dict.fromkeys(dtypes) if torch.finfo(dtype).eps < torch.finfo(stored).eps]
    lines = [
        f"{dtype_name(dtype)} compute over {dtype_name(stored)} weights: the loader had already rounded what is in the "
        f"file. Load VAE (Precision) reads it as it is."
        for dtype in ([] if given.dynamic else finer)
    ]
    if made is not given.source:
        size = comfy.model_management.module_size(made.first_stage_model)
        lines.append(f"Held beside the weights of the VAE that came in: {size / 2**20:.1f} MiB.")
    return lines


def _passed_over(source: Any, refused: NoCopy) -> str:
    line = f"{class_name(source)}: {dtype_name(source.vae_dtype)}, as loaded; a dtype for it is passed over: {refused}"
    _LOG.warning(line)
    return line


def _as_others_left_it(made: Any, vae: Any) -> Any:
    """`made` with what other node packs have put on the object `vae`; itself where that is nothing."""
    missing, own = object(), vars(made)
    put = {k: v for k, v in vars(vae).items() if k not in _OURS and own.get(k, missing) is not v}
    if not put:
        return made
    new = copy.copy(made)
    vars(new).update(put)
    return new


# ------------------------------------------------------------------------------------------ for the guard and the plan


def vae_dtypes(vae: Any) -> tuple[torch.dtype, torch.dtype]:
    """In which dtypes the encoder and the decoder of a VAE run."""
    return compute_dtype(vae, "encoder"), compute_dtype(vae, "decoder")


def half_in_float32(vae: Any, half: str) -> Any:
    """A VAE whose `half`, "encoder" or "decoder", runs in FP32 on the best weights at hand; the other half is for
    nobody's use. Raises BadInput with the reason where it cannot be made.
    """
    given = recognise(vae)
    source = given.source
    refuse_without_dtype(source)
    halves = find_halves(source.first_stage_model)
    other = torch.float32 if halves is None else source.vae_dtype
    return vae_in_dtypes(given, halves, *((torch.float32, other) if half == "encoder" else (other, torch.float32)))
