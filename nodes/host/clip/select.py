"""A CLIP whose text encoders each have a dtype to be stored in and one to compute in, beside the CLIP it was made of.

Nothing of the source is changed. The host keeps text encoders in FP16 and casts each weight to FP32 as it computes, so
the two dtypes are independent:

- another dtype to compute in costs nothing: the CLIP calls a proxy of each encoder, of the same class and over the
  same layers, which casts what goes into the first of them. The host goes on managing the source's own model;
- another dtype to store needs weights of its own, on a patcher of its own, and those of all encoders: what a LoRA hook
  puts into a weight goes into the memory where it lies, so nothing may be shared.

What comes out is FP32 in any case: the host's own module around each encoder sees to it. Quantized weights, and those
under the dynamic VRAM of newer hosts, are cast as they are used, so they compute in any dtype; where no copy can be
made of them, they stay as they are stored, and the report says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import comfy.sd1_clip
import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name
from ....training.precision.policy import TEXT_ENCODER, automatic
from ....training.precision.resolve import DEFAULT, resolve_compute
from ..patching.patcher import patcher_of_copy, plain_patcher, reread_and_copy, retarget
from ..patching.private_copy import cast_weight, copy_module, module_proxy, storage_dtype
from ..patching.provenance import MadeOnce, Provenance, guard_of, provenance_of
from ..patching.storage import as_loaded, choose_storage, storage_name

__all__ = [
    "ALL",
    "ENCODERS",
    "SelectedCLIP",
    "compute_dtypes",
    "encoder_dtypes",
    "select_clip_precision",
    "storage_dtype_of",
    "text_encoders",
]

ALL = "all"
ENCODERS = (
    "clip_l", "clip_g", "clip_h", "t5xxl", "t5base", "umt5xxl", "umt5base", "pile_t5xl", "mt5xl", "byt5_small",
    "hydit_clip", "llama", "gemma2_2b", "gemma3_4b", "qwen25_3b", "qwen25_7b", "qwen3_4b", "mistral3_24b",
)  # fmt: skip
_HOST_COMPUTE = torch.float32  # written out in the host's SDClipModel, whatever the weights are kept in
_OVERFLOW_IN_FP16 = ("T5", "Gemma")  # classes whose activations are known to pass 65504


@dataclass(frozen=True)
class SelectedCLIP:
    """The CLIP to work with, and what a person is told: which encoder is kept and computes in what, and why."""

    clip: Any
    report: str


@dataclass(frozen=True)
class _Dtypes:
    storage: torch.dtype | None  # None: quantized
    compute: torch.dtype


@dataclass(frozen=True)
class _CLIPProvenance(Provenance):
    """What a CLIP was made of; it is noted on the module that the CLIP calls, which `CLIP.clone()` passes on.

    source: the CLIP that came into the first selector of a chain. weights: the patcher of the weights at work.
    selected: the dtypes of the encoders that were changed. stamp: of the CLIP as we made it, where only selectors stood
    before; a CLIP with another one has been patched by other nodes since `source`.
    """

    weights: Any
    selected: dict[str, _Dtypes]
    stamp: tuple | None


_COPIES = MadeOnce()  # of each source's model, the patchers of the copies, by (encoder, storage)


def select_clip_precision(
    clip: Any, encoder: str = ALL, storage: str = DEFAULT, compute: str = DEFAULT
) -> SelectedCLIP:
    """`clip` with the dtypes named for `encoder` ("all", or the name of one), the other encoders as they came in.

    storage: "default" (what the loader chose) or a key of `DTYPES`; compute: "default", "auto", or one of `COMPUTE`.
    A dtype that this machine lacks is logged, said in the report and passed over; so are an encoder that this CLIP does
    not have, and a storage that its weights cannot be brought into. Raises BadInput for a CLIP without any weights.
    """
    if getattr(clip, "cond_stage_model", None) is None:
        raise BadInput("The clip holds no weights: the checkpoint that it comes from has no text encoder.")
    if (guard := guard_of(clip.cond_stage_model)) is not None:  # it goes around the CLIP in its new dtypes
        chosen = select_clip_precision(guard.unwrap(clip), encoder, storage, compute)
        return replace(chosen, clip=guard.wrap(chosen.clip))
    provenance = provenance_of(clip.cond_stage_model)
    source = provenance.source if provenance else clip
    root, device = source.cond_stage_model, clip.patcher.load_device
    encoders = text_encoders(root)
    loaded = {name: _Dtypes(storage_dtype_of(part, source.patcher), _HOST_COMPUTE) for name, part in encoders.items()}
    lines = [f"{type(root).__name__} on {device}"]
    if not loaded:
        if storage == compute == DEFAULT:
            return SelectedCLIP(clip, f"{lines[0]}, as loaded.")
        raise BadInput(f"The CLIP ({type(root).__name__}) has no text encoder of a kind that is known here.")
    chosen = [*loaded] if encoder == ALL else [encoder]
    if not loaded.keys() >= {*chosen}:
        has = ", ".join(loaded)
        return SelectedCLIP(clip, f"{lines[0]}\nIt has no encoder {encoder!r}, so nothing changes; it has {has}.")

    selected = {**loaded, **(provenance.selected if provenance else {})}
    weights, storage_lines = _select_storage(source, chosen, storage, loaded, selected)
    for name, was in loaded.items():
        if name in chosen:
            computes, line = resolve_compute(
                f"{name} compute", compute, was.compute, device, lambda: automatic(TEXT_ENCODER, device)
            )
            selected[name] = replace(selected[name], compute=computes)
            lines += [storage_lines[name] + _beside(selected[name].storage, was.storage), line]
            lines += _warnings(root, name, selected[name], was)
        else:
            now = selected[name]
            since = "as loaded" if now == was else "as selected before"
            lines.append(f"{name}: kept in {storage_name(now.storage)}, computes in {dtype_name(now.compute)}, {since}")
    changed = {name: dtypes for name, dtypes in selected.items() if dtypes != loaded[name]}
    new = _made(clip, source, weights, loaded, changed) if changed else _as_loaded(clip, provenance)
    if weights is not source.patcher:
        size = sum(weight.numel() * weight.element_size() for weight in weights.model.parameters())
        lines.append(f"Held beside the weights of the CLIP that came in: {size / 2**20:.1f} MiB.")
    return SelectedCLIP(new, "\n".join(lines))


def _select_storage(
    source: Any, chosen: list[str], storage: str, loaded: dict[str, _Dtypes], selected: dict[str, _Dtypes]
) -> tuple[Any, dict[str, str]]:
    """(the patcher of weights in the dtypes of `selected`, with those of the `chosen` encoders changed to `storage`; a
    line of the report for each of these). `selected` then says what is had: as loaded, where no copy can be made.
    """
    lines = {}
    for name in chosen:
        part = f"{name} storage"
        stores, lines[name] = choose_storage(part, storage, loaded[name].storage, source.patcher.load_device)
        selected[name] = replace(selected[name], storage=stores)
    stored = _stored(selected, loaded)
    if not stored:
        return source.patcher, lines
    try:
        return _copied(source, stored), lines
    except BadInput as refused:
        for name in stored:
            selected[name] = replace(selected[name], storage=loaded[name].storage)
            if name in chosen:
                lines[name] = as_loaded(f"{name} storage", storage, loaded[name].storage, str(refused))
        return source.patcher, lines


def _stored(selected: dict[str, _Dtypes], loaded: dict[str, _Dtypes]) -> dict[str, torch.dtype]:
    """Of the encoders that are kept in another dtype than the loader chose, that dtype."""
    return {name: now.storage for name, now in selected.items() if now.storage not in (None, loaded[name].storage)}


def compute_dtypes(clip: Any) -> dict[str, torch.dtype]:
    """The encoders of a CLIP that compute in another dtype than the host's own, FP32."""
    encoders = text_encoders(clip.cond_stage_model).items()
    computes = {name: getattr(encoder.transformer, "ref2v_compute", None) for name, encoder in encoders}
    return {name: dtype for name, dtype in computes.items() if dtype is not None}


def encoder_dtypes(clip: Any) -> dict[str, tuple[torch.dtype | None, torch.dtype]]:
    """(storage, None for quantized weights; compute) of each text encoder of a CLIP, by its name."""
    computes = compute_dtypes(clip)
    encoders = text_encoders(clip.cond_stage_model).items()
    return {name: (storage_dtype_of(part, clip.patcher), computes.get(name, _HOST_COMPUTE)) for name, part in encoders}


# ---------------------------------------------------------------------------------------------------- what is in a CLIP


def text_encoders(root: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The text encoders of a CLIP's model, by the names that the host gives them."""
    return {name: part for name, part in root.named_children() if isinstance(part, comfy.sd1_clip.SDClipModel)}


def storage_dtype_of(encoder: torch.nn.Module, patcher: Any) -> torch.dtype | None:
    """The dtype that the host has most of its weights in; None for quantized ones. `patcher`: of the CLIP."""
    return storage_dtype(encoder.transformer, patcher)


def _family(root: torch.nn.Module, name: str) -> str:
    return type(getattr(root, name).transformer).__name__


def _beside(keeps: torch.dtype | None, loaded: torch.dtype | None) -> str:
    if keeps is None or keeps.itemsize > 1 or keeps == loaded:
        return ""
    return f" (norms and biases stay {dtype_name(loaded)})"


def _warnings(root: torch.nn.Module, name: str, now: _Dtypes, loaded: _Dtypes) -> list[str]:
    lines = []
    if now.storage is not None and torch.finfo(now.storage).eps < torch.finfo(loaded.storage).eps:
        fine, coarse = dtype_name(now.storage), dtype_name(loaded.storage)
        lines.append(f"{name}: {fine} over {coarse} weights, rounded by the loader; what it lost does not come back.")
    if now.compute == torch.float16 and _family(root, name).startswith(_OVERFLOW_IN_FP16):
        lines.append(
            f"{name}: fp16 ends at 65504, and activations of {_family(root, name)} are known to pass it: look for NaN, "
            f"or take bf16."
        )
    return lines


# ------------------------------------------------------------------------------------------------------ the CLIP itself


def _stamp(clip: Any) -> tuple:
    """Changes when another node works on the CLIP."""
    return clip.patcher.patches_uuid, clip.layer_idx, clip.use_clip_schedule, id(clip.apply_hooks_to_conds)


def _is_untouched(clip: Any) -> bool:
    """Has no other node worked on `clip` since it came into the first selector?"""
    provenance = provenance_of(clip.cond_stage_model)
    return provenance is None or _stamp(clip) == provenance.stamp


def _made(
    clip: Any, source: Any, weights: Any, loaded: dict[str, _Dtypes], selected: dict[str, _Dtypes]
) -> Any:
    """`clip` again, with what other nodes have put on it, over the model of `weights` in the dtypes of `selected`."""
    new = clip.clone()
    new.patcher = retarget(new.patcher, weights)
    # The host loads and patches the model of the patcher; what the CLIP calls is a proxy over the same layers.
    computing = {}
    for name, now in selected.items():
        if now.compute != loaded[name].compute:
            encoder = getattr(weights.model, name)
            computing[name] = module_proxy(encoder, transformer=_computing_in(encoder.transformer, now.compute))
    new.cond_stage_model = module_proxy(weights.model, **computing)
    stamp = _stamp(new) if _is_untouched(clip) else None
    new.cond_stage_model.ref2v_provenance = _CLIPProvenance(source, weights, selected, stamp)
    return new


def _as_loaded(clip: Any, provenance: _CLIPProvenance | None) -> Any:
    """The very CLIP that came into the first selector, unless other nodes have worked on it since."""
    if provenance is None:
        return clip
    if _is_untouched(clip):
        return provenance.source
    new = clip.clone()
    new.patcher = retarget(new.patcher, provenance.source.patcher)
    new.cond_stage_model = provenance.source.cond_stage_model
    return new


def _copied(source: Any, stored: dict[str, torch.dtype]) -> Any:
    """The patcher of a copy of the source's model with these encoders kept in these dtypes; one for all who use it."""
    key = frozenset(stored.items())
    return _COPIES.get(source.patcher.model, key, lambda: _copy_of(plain_patcher(source.patcher), stored))


def _copy_of(patcher: Any, stored: dict[str, torch.dtype]) -> Any:
    def weight_of(name: str, weight: torch.Tensor) -> torch.Tensor:
        dtype = stored.get(name.split(".", 1)[0])
        if dtype is None or (dtype.itemsize == 1 and weight.ndim < 2):
            dtype = weight.dtype
        return cast_weight(weight, dtype)

    private = copy_module(patcher.model, patcher, weight_of)
    for name, dtype in stored.items():
        transformer = getattr(private, name).transformer
        if isinstance(getattr(transformer, "dtype", None), torch.dtype):
            transformer.dtype = dtype  # the host's T5 asks it
    new = patcher_of_copy(patcher, private)
    new.cached_patcher_init = reread_and_copy(patcher, lambda again: _copy_of(again, stored))
    return new


def _computing_in(transformer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    proxy = module_proxy(transformer, _casting(type(transformer)))
    proxy.ref2v_compute = dtype
    return proxy


@cache
def _casting(family: type) -> type:
    """A subclass of the host's own class, of the same name: layers follow the dtype of what comes into the first."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        embeds = kwargs.get("embeds")
        if embeds is not None:
            kwargs["embeds"] = embeds.to(self.ref2v_compute)
        kwargs["dtype"] = self.ref2v_compute
        return super(made, self).forward(*args, **kwargs)

    made = type(family.__name__, (family,), {"forward": forward})
    return made
