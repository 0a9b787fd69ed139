"""A MODEL that computes and is stored in dtypes of one's own, beside the MODEL that it was made of.

Nothing of the source is changed. Another dtype to compute in shares the source's weights: it is the host's own switch
(`set_model_compute_dtype`) on a clone of the patcher, which the host puts on and off the model as it loads one clone or
the other; that holds for quantized weights and under the dynamic VRAM of newer hosts too, where weights are cast as
they are used. Another dtype to store needs a copy of the diffusion model, on a plain patcher of its own to which all
moves that other nodes have put on the source's. Where no copy can be made, the weights stay, and the report says why.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any

import comfy.ldm.modules.attention
import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name, dtype_of_most
from ....training.precision.module_kinds import EMBEDDINGS, IN_OUT, NORMS, find_modules, split_patterns
from ....training.precision.policy import DIFFUSION_MODEL, automatic
from ....training.precision.resolve import DEFAULT, resolve_compute
from ..patching.float32_modules import FP32Softmax, keep_in_float32, split_castable
from ..patching.patcher import patcher_of_copy, plain_patcher, reread_and_copy, retarget, unload_model
from ..patching.private_copy import cast_weight, copy_in_parts, storage_dtype
from ..patching.provenance import MadeOnce, Provenance
from ..patching.storage import as_loaded, choose_storage

__all__ = ["Keep", "SelectedModel", "model_dtypes", "model_precision", "select_model_precision", "without_precision"]

_KEY = "ref2v_precision"
_OVERRIDE = "optimized_attention_override"
_HOLD_SCORES = ("attention_basic", "attention_split", "attention_sub_quad")  # the host's attentions that are not fused


@dataclass(frozen=True)
class Keep:
    """What stays in FP32. layers: name patterns within the diffusion model, with commas or line breaks between them."""

    norms: bool = False
    embeddings: bool = False
    in_out: bool = False
    attention_softmax: bool = False
    layers: str = ""

    def kinds(self) -> list[str]:
        wanted = {NORMS: self.norms, EMBEDDINGS: self.embeddings, IN_OUT: self.in_out}
        return [kind for kind, is_wanted in wanted.items() if is_wanted]


@dataclass(frozen=True)
class SelectedModel:
    """The MODEL to work with, and what a person is told: what is kept and computes in what, and why."""

    model: Any
    report: str


@dataclass(frozen=True)
class _ModelProvenance(Provenance):
    """What a MODEL was made of; it is an attachment of the patcher, which the host passes on to clones.

    source: the MODEL that came into the first selector of a chain. weights: the patcher of the weights at work. chosen:
    what a selector chose for its layers, as a text to know it again by. untouched: this patcher is the very one that we
    made, and no other node has worked between it and `source`.
    """

    weights: Any
    chosen: str
    untouched: bool

    def on_model_patcher_clone(self) -> _ModelProvenance:
        return replace(self, untouched=False)


_COPIES = MadeOnce()  # of each source's model, the patchers of the copies, by dtype and modules in FP32


def select_model_precision(
    model: Any, compute: str = DEFAULT, storage: str = DEFAULT, keep: Keep | None = None
) -> SelectedModel:
    """`model` with the dtypes named: compute "default" (what the loader chose), "auto" or one of `COMPUTE`; storage
    "default" or a key of `DTYPES`; `keep` in FP32.

    What an earlier selector chose is replaced. A dtype that this machine lacks is logged, said in the report and passed
    over; so is a storage that these weights cannot be brought into.
    """
    keep = keep or Keep()
    provenance = model.get_attachment(_KEY)
    source = provenance.source if provenance else model
    device = model.load_device
    loaded, computed = model_dtypes(source)
    supported = tuple(source.model.model_config.supported_inference_dtypes)
    computes, compute_line = resolve_compute(
        "Compute", compute, computed, device, lambda: automatic(DIFFUSION_MODEL, device, supported)
    )
    stores, storage_line = choose_storage("Storage", storage, loaded, device)
    in_float32, keep_lines = _modules_in_float32(source, keep, computes, loaded, stores)
    weights = source
    if stores != loaded:
        try:
            weights = _copied(source, stores, in_float32)
        except BadInput as refused:
            stores, storage_line = loaded, as_loaded("Storage", storage, loaded, str(refused))
            in_float32, keep_lines = _modules_in_float32(source, keep, computes, loaded, stores)
    if stores != loaded and stores.itemsize == 1:
        storage_line += f" (norms and biases stay {dtype_name(loaded)})"
    lines = [f"{_kind(source)} on {device}", compute_line, storage_line]
    lines += _warnings(getattr(weights, "ref2v_made_of", loaded), stores, computes, supported, computed)
    softmax, softmax_lines = _softmax(keep, computes)
    lines += keep_lines + softmax_lines
    if (computes, stores) == (computed, loaded) and not in_float32 and not softmax:
        return SelectedModel(_as_loaded(model, provenance), "\n".join(lines))

    new = retarget(_without_ours(model, provenance), weights)
    new.set_model_compute_dtype(computes)  # layers of the host cast their weights from here on
    if in_float32:
        new.set_injections(_KEY, [keep_in_float32(in_float32, computes)])
    if softmax:
        options = new.model_options["transformer_options"]
        options[_OVERRIDE] = FP32Softmax(options.get(_OVERRIDE))
    untouched = provenance is None or provenance.untouched
    chosen = f"{computes} {sorted(in_float32)} {softmax}"
    new.set_attachments(_KEY, _ModelProvenance(source, weights, chosen, untouched))
    if weights is not source:
        size = sum(w.numel() * w.element_size() for w in weights.model.diffusion_model.parameters())
        lines.append(f"Held beside the weights of the MODEL that came in: {size / 2**20:.1f} MiB.")
    return SelectedModel(new, "\n".join(lines))


def model_precision(model: Any) -> str:
    """What a selector chose for the layers of `model`, as a text to know it again by; "" where none did."""
    provenance = model.get_attachment(_KEY)
    return provenance.chosen if provenance else ""


def without_precision(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options, injections) of `model` but for what a selector has put there, which `model_precision` tells."""
    options = {**model.model_options, "transformer_options": dict(model.model_options.get("transformer_options", {}))}
    if isinstance(ours := options["transformer_options"].get(_OVERRIDE), FP32Softmax):
        options["transformer_options"][_OVERRIDE] = ours.before
    return options, {key: each for key, each in getattr(model, "injections", {}).items() if key != _KEY}


# ------------------------------------------------------------------------------------------------- what was asked for


def _kind(source: Any) -> str:
    """What the host took the model for, such as "SD15"."""
    return type(source.model.model_config).__name__


def model_dtypes(model: Any) -> tuple[torch.dtype | None, torch.dtype]:
    """(dtype that the host has most weights in, None for quantized ones; dtype that the layers compute in)."""
    computes = model.get_model_object("manual_cast_dtype") or model.model.get_dtype()
    quantized = getattr(model.model.model_config, "scaled_fp8", None) is not None
    return None if quantized else storage_dtype(model.model.diffusion_model, model), computes


def _warnings(
    made_of: torch.dtype | None,
    stores: torch.dtype | None,
    computes: torch.dtype,
    supported: tuple[torch.dtype, ...],
    computed: torch.dtype,
) -> list[str]:
    """made_of: the dtype of the weights that are at work, or that they were copied from; None for quantized ones."""
    lines = []
    eps = lambda dtype: torch.finfo(dtype).eps  # noqa: E731
    if made_of is None:
        if computes != computed:
            lines.append(f"{dtype_name(computes)} compute over quantized weights, which are unpacked as they are used.")
    elif eps(stores) < eps(made_of):
        lines.append(
            f"{dtype_name(stores)} over {dtype_name(made_of)} weights, rounded by the loader; what it lost is lost."
        )
    elif computes != computed and eps(computes) < eps(stores):
        lines.append(f"{dtype_name(computes)} compute over {dtype_name(stores)} weights.")
    if computes != computed and supported and computes not in supported:
        names = ", ".join(dtype_name(dtype) for dtype in supported)
        lines.append(f"This model is known to work in {names}, not in {dtype_name(computes)}: look for NaN.")
    return lines


def _modules_in_float32(
    source: Any, keep: Keep, computes: torch.dtype, loaded: torch.dtype | None, stores: torch.dtype | None
) -> tuple[dict[str, str], list[str]]:
    """(name of a module that stays in FP32 -> what of `keep` it was found by, the lines of the report)."""
    network = source.model.diffusion_model
    patterns = split_patterns(keep.layers)
    if not keep.kinds() and not patterns:
        return {}, []
    wanted = find_modules(network, keep.kinds(), patterns)
    lines = [
        f"Nothing to keep in fp32 as {by}: {type(network).__name__} has none by that name." for by in wanted.missing
    ]
    if computes == torch.float32:
        return {}, [*lines, "Everything computes in fp32, so there is nothing to keep in it."]
    copied_in_float32 = stores != loaded and loaded == torch.float32
    castable, foreign = split_castable(source, wanted, weights_in_float32=copied_in_float32)
    for by in dict.fromkeys(castable.values()):
        names = [name for name, found_by in castable.items() if found_by == by]
        lines.append(
            f"Kept in fp32 ({by}): {', '.join(names[:4])}" + (f" and {len(names) - 4} more" * (len(names) > 4))
        )
    if foreign:
        lines.append(f"Not kept in fp32, since their weights cannot be cast in passing: {', '.join(foreign[:4])}.")
    return castable, lines


def _softmax(keep: Keep, computes: torch.dtype) -> tuple[bool, list[str]]:
    if not keep.attention_softmax:
        return False, []
    name = comfy.ldm.modules.attention.optimized_attention.__name__
    if computes == torch.float32:
        return False, ["Attention softmax: everything computes in fp32 already."]
    if name not in _HOLD_SCORES:
        return False, [f"Attention softmax: {name} is a fused kernel and accumulates in fp32 already; nothing changes."]
    return True, [f"Attention softmax: fp32, with the scores, in {name}."]


# ----------------------------------------------------------------------------------------------------- the MODEL itself


def _without_ours(model: Any, provenance: _ModelProvenance | None) -> Any:
    """A clone of `model` without what a selector has put on it."""
    new = model.clone()
    if provenance is None:
        return new
    source = provenance.source
    new.object_patches.pop("manual_cast_dtype", None)
    if "manual_cast_dtype" in source.object_patches:
        new.object_patches["manual_cast_dtype"] = source.object_patches["manual_cast_dtype"]
    new.force_cast_weights = source.force_cast_weights
    new.remove_injections(_KEY)
    new.remove_attachments(_KEY)
    options = new.model_options["transformer_options"]
    if isinstance(ours := options.get(_OVERRIDE), FP32Softmax):
        options.pop(_OVERRIDE)
        if ours.before is not None:
            options[_OVERRIDE] = ours.before
    new.patches_uuid = uuid.uuid4()  # else the host takes the model for loaded as it should be
    return new


def _as_loaded(model: Any, provenance: _ModelProvenance | None) -> Any:
    """The very MODEL that came into the first selector, unless other nodes have worked on it since."""
    if provenance is None:
        return model
    if provenance.untouched:
        return provenance.source
    return retarget(_without_ours(model, provenance), provenance.source)


def _copied(source: Any, dtype: torch.dtype, in_float32: dict[str, str]) -> Any:
    """The patcher of a copy of the source's model in `dtype`, the modules `in_float32` as loaded; one for all who use
    it.
    """
    key = (dtype, frozenset(in_float32))
    # Under dynamic VRAM the host reads the file once more, as it does itself for whoever needs a plain model.
    return _COPIES.get(source.model, key, lambda: _copy_of(plain_patcher(source), dtype, in_float32))


def _copy_of(source: Any, dtype: torch.dtype, in_float32: dict[str, str]) -> Any:
    prefixes = tuple(f"diffusion_model.{name}." for name in in_float32)

    def weight_of(name: str, weight: torch.Tensor) -> torch.Tensor:
        stays = name.startswith(prefixes) or (dtype.itemsize == 1 and weight.ndim < 2)
        return cast_weight(weight, weight.dtype if stays else dtype)

    root = source.model
    unload_model(source)  # what a clone has put on the model is no part of it
    if root._parameters or root._buffers:
        raise BadInput(f"The MODEL ({type(root).__name__}) has weights outside of its parts, so it cannot be copied.")
    as_it_is = lambda _name, weight: weight.to("cpu", copy=True)  # noqa: E731
    private = copy_in_parts(root, source, {"diffusion_model": weight_of}, other=as_it_is)
    private.current_patcher = None
    private.diffusion_model.dtype = dtype  # the host asks the network, not its weights
    new = patcher_of_copy(source, private)
    new.cached_patcher_init = reread_and_copy(source, lambda again: _copy_of(again, dtype, in_float32))
    new.ref2v_made_of = dtype_of_most(root.diffusion_model.parameters())
    return new
