"""A VAE whose encoder and decoder each have a dtype of their own, beside the VAE that it was made of.

Nothing of the source is changed; split.py has how. Here: what was asked for and is refused, where a VAE came from.
Under the dynamic VRAM of newer hosts all of it is copied, from the file's own weights, onto a plain patcher.
"""

from __future__ import annotations

import copy
import logging
import weakref
from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name, dtype_of_most
from ....training.precision.policy import VAE_DECODER, VAE_ENCODER, automatic
from ....training.precision.resolve import DEFAULT, resolve_compute
from ..patching.patcher import made_from
from ..patching.private_copy import has_quantized_weights, is_dynamic
from ..patching.shell import guard_of, half_dtype
from .halves import find_halves, lacking_half
from .host_vae import class_name, copy_vae, refuse_empty
from .split import is_all_in, split_vae

__all__ = [
    "SelectedVAE",
    "half_in_float32",
    "held_dtype",
    "lacking_half_of",
    "remember_loader",
    "select_vae_precision",
    "source_to_copy",
    "vae_dtypes",
]


@dataclass(frozen=True)
class SelectedVAE:
    """The VAE to work with, and what a person is told: which half runs in what, and why."""

    vae: Any
    report: str


@dataclass(frozen=True)
class _Origin:
    """Where a VAE of ours came from. It sits on the module, so that it survives what others do with the VAE object.

    weights: the VAE with the best weights at hand, None where it is the very one that carries this. encoder, decoder:
    the dtypes that the loader chose, to which "default" goes back. lacks: the half that its file does not have.
    """

    weights: Any
    encoder: torch.dtype
    decoder: torch.dtype
    lacks: str = ""

    def __deepcopy__(self, _memo: dict) -> _Origin:
        return self  # a copy of the module comes from the same place; the source is not copied with it


_LOG = logging.getLogger("ref2v")

# What a selector gives a VAE object of its own; the rest is as it came in.
_OURS = {"first_stage_model", "patcher", "vae_dtype", "size", "memory_used_encode", "memory_used_decode", "get_sd"}
# Made once for each source and pair of dtypes, and gone when nobody uses it any more.
_MADE: weakref.WeakKeyDictionary[Any, dict[tuple, weakref.ref]] = weakref.WeakKeyDictionary()


def select_vae_precision(vae: Any, encoder: str = DEFAULT, decoder: str = DEFAULT) -> SelectedVAE:
    """`vae` with the dtypes named: "default" (what the loader chose), "auto", or a key of `DTYPES`.

    A dtype that this machine lacks is logged, said in the report and passed over; so is any, for weights that cannot
    be copied, quantized ones above all. Raises BadInput with the reason for a VAE that has no dtype to select.
    """
    refuse_empty(vae)
    if (guard := guard_of(vae.first_stage_model)) is not None:  # it goes around the VAE in its new dtypes
        selected = select_vae_precision(guard.without(vae), encoder, decoder)
        return replace(selected, vae=guard.around(selected.vae))
    origin = _origin(vae)
    source, device = origin.weights, vae.patcher.load_device
    if encoder == decoder == DEFAULT:
        if not origin.encoder == origin.decoder == source.vae_dtype:
            _refuse_what_has_no_dtype(source)
        chose = f"encoder {dtype_name(origin.encoder)}, decoder {dtype_name(origin.decoder)}"
        try:
            loaded = _made(origin, origin.encoder, origin.decoder)
        except _NoCopy as refused:
            return SelectedVAE(source, _passed_over(source, refused))
        return SelectedVAE(_as_others_left_it(loaded, vae), f"{class_name(vae)}: {chose}, as loaded.")
    _refuse_what_has_no_dtype(source)
    _refuse_a_half_that_is_not_there(source, origin.lacks or lacking_half(source), encoder, decoder)
    working = tuple(getattr(source, "working_dtypes", ()))
    first, said_first = resolve_compute(
        "Encoder", encoder, origin.encoder, device, lambda: automatic(VAE_ENCODER, device, working)
    )
    second, said_second = resolve_compute(
        "Decoder", decoder, origin.decoder, device, lambda: automatic(VAE_DECODER, device)
    )
    lines = [said_first, said_second]
    if first != second and find_halves(source.first_stage_model) is None:
        first = second = first if torch.finfo(first).eps <= torch.finfo(second).eps else second
        lines.append(
            f"This kind of VAE is not known here, so it cannot be split: all of it runs in {dtype_name(first)}."
        )
    try:
        selected = _made(origin, first, second, whole=_is_all_in_its_dtype(source))
    except _NoCopy as refused:
        return SelectedVAE(_as_others_left_it(source, vae), _passed_over(source, refused))
    lines += _rounded_before(source, first, second)
    if selected is not source:
        held = comfy.model_management.module_size(selected.first_stage_model)
        lines.append(f"Held beside the weights of the VAE that came in: {held / 2**20:.1f} MiB.")
    return SelectedVAE(_as_others_left_it(selected, vae), "\n".join([f"{class_name(vae)} on {device}", *lines]))


def _as_others_left_it(selected: Any, vae: Any) -> Any:
    """`selected` with what other node packs have put on the object `vae`; itself where that is nothing."""
    missing, own = object(), vars(selected)
    put = {k: v for k, v in vars(vae).items() if k not in _OURS and own.get(k, missing) is not v}
    if not put:
        return selected
    new = copy.copy(selected)
    vars(new).update(put)
    return new


def remember_loader(vae: Any, encoder: torch.dtype, decoder: torch.dtype, lacks: str = "") -> None:
    """Note on a VAE that our loader has just read, in FP32, what "default" means for it and for all made of it.

    `lacks`: "encoder" or "decoder" where the file has no such half, else "".
    """
    vae.first_stage_model.ref2v_origin = _Origin(None, encoder, decoder, lacks)


def vae_dtypes(vae: Any) -> tuple[torch.dtype, torch.dtype]:
    """In which dtypes the encoder and the decoder of a VAE run."""
    module = vae.first_stage_model
    return half_dtype(module, "encoder") or vae.vae_dtype, half_dtype(module, "decoder") or vae.vae_dtype


def half_in_float32(vae: Any, half: str) -> Any:
    """A VAE whose `half`, "encoder" or "decoder", runs in FP32 on the best weights at hand; the other half is for
    nobody's use. Raises BadInput with the reason where it cannot be made.
    """
    origin = _origin(vae)
    source = origin.weights
    _refuse_what_has_no_dtype(source)
    kept = source.vae_dtype if find_halves(source.first_stage_model) is not None else torch.float32
    return _made(origin, *((torch.float32, kept) if half == "encoder" else (kept, torch.float32)))


def lacking_half_of(vae: Any) -> str:
    """"encoder" or "decoder" where this VAE, or the file that our loader read it from, has no such half; else ""."""
    if (guard := guard_of(vae.first_stage_model)) is not None:
        vae = guard.without(vae)
    origin = _origin(vae)
    return origin.lacks or lacking_half(origin.weights)


def source_to_copy(vae: Any) -> Any:
    """The VAE with the best weights at hand of which `vae` was made, itself if of none. BadInput, with the reason, for
    one that cannot be copied.
    """
    refuse_empty(vae)
    if (guard := guard_of(vae.first_stage_model)) is not None:
        vae = guard.without(vae)
    source = _origin(vae).weights
    _refuse_what_has_no_dtype(source)
    if has_quantized_weights(source.first_stage_model):
        raise BadInput(f"The VAE ({class_name(source)}) has quantized weights, so there is no copy of it in FP32.")
    return source


# ------------------------------------------------------------------------------------------------- what was asked for


def _origin(vae: Any) -> _Origin:
    found = getattr(vae.first_stage_model, "ref2v_origin", None) or _Origin(None, vae.vae_dtype, vae.vae_dtype)
    return found if found.weights is not None else replace(found, weights=vae)


def _rounded_before(source: Any, *dtypes: torch.dtype) -> list[str]:
    """A warning for each dtype that is finer than the one in which the weights were kept. Under dynamic VRAM they are
    the file's own, so no loader has rounded them.
    """
    if is_dynamic(source.patcher):
        return []
    held = held_dtype(source)
    finer = [dtype for dtype in dict.fromkeys(dtypes) if torch.finfo(dtype).eps < torch.finfo(held).eps]
    return [
        f"{dtype_name(dtype)} compute over {dtype_name(held)} weights: the loader had already rounded what is in the "
        f"file. Load VAE (Precision) reads it as it is."
        for dtype in finer
    ]


class _NoCopy(BadInput):
    """These weights cannot be copied into another dtype."""


def _passed_over(source: Any, refused: _NoCopy) -> str:
    line = f"{class_name(source)}: {dtype_name(source.vae_dtype)}, as loaded; a dtype for it is passed over: {refused}"
    _LOG.warning(line)
    return line


def held_dtype(source: Any) -> torch.dtype:
    """The dtype that the weights have in memory. Under dynamic VRAM it is the file's, whatever the loader chose."""
    if not is_dynamic(source.patcher):
        return source.vae_dtype
    return dtype_of_most(source.first_stage_model.parameters())


def _is_all_in_its_dtype(source: Any) -> bool:
    """Under dynamic VRAM weights are cast as they are used: whatever they are in, they run in the VAE's dtype."""
    return is_dynamic(source.patcher) or is_all_in(source.first_stage_model, source.vae_dtype)


def _refuse_what_has_no_dtype(source: Any) -> None:
    what, patcher = class_name(source), source.patcher
    if patcher.patches:
        raise BadInput(f"The VAE ({what}) is patched by another node; select its precision before that node.")
    if not any(True for _ in source.first_stage_model.children()):
        raise BadInput(f"The VAE ({what}) has no layers that compute, so it has no precision to select.")


def _refuse_a_half_that_is_not_there(source: Any, lacks: str, encoder: str, decoder: str) -> None:
    what = class_name(source)
    if lacks == "encoder" and encoder != DEFAULT:
        raise BadInput(f"The VAE ({what}) can only decode: it has no encoder whose precision could be selected.")
    if lacks == "decoder" and decoder != DEFAULT:
        raise BadInput(f"The VAE ({what}) can only encode: it has no decoder whose precision could be selected.")


def _made(origin: _Origin, first: torch.dtype, second: torch.dtype, *, whole: bool = True) -> Any:
    """The VAE in these dtypes: the source itself where it has them, else one object for all who use it.

    `whole`: every layer of the source is in the source's dtype. One that is not would stop it, so it is copied too.
    """
    source = origin.weights
    if whole and first == second == source.vae_dtype:
        return source
    made = _MADE.setdefault(source, {})
    key = (first, second, origin.encoder, origin.decoder)
    known = made.get(key, lambda: None)()
    if known is not None:
        return known
    halves = find_halves(source.first_stage_model)

    def copied(_patcher: Any) -> Any:
        return copy_vae(source, first) if halves is None else split_vae(source, first, second, halves)

    try:
        new = made_from(source.patcher, copied)
    except BadInput as refused:
        raise _NoCopy(str(refused)) from refused
    new.first_stage_model.ref2v_origin = origin
    made[key] = weakref.ref(new)
    return new
