"""A MODEL that computes and is kept in dtypes of one's own, beside the MODEL that it was made of.

Nothing of the source is changed. Another dtype to compute in shares the source's weights: it is the host's own switch
(`set_model_compute_dtype`) on a clone of the patcher, which the host puts on and off the model as it loads one clone or
the other; that holds for quantized weights and under the dynamic VRAM of newer hosts too, where weights are cast as
they are used. Another dtype to keep needs a copy of the diffusion model, on a plain patcher of its own to which all
moves that other nodes have put on the source's. Where no copy can be made, the weights stay, and the report says why.
"""

from __future__ import annotations

import uuid
import weakref
from dataclasses import dataclass, replace
from typing import Any

import comfy.ldm.modules.attention
import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name, dtype_of_most
from ....training.precision.module_kinds import EMBEDDINGS, IN_OUT, NORMS, find_modules, split_patterns
from ....training.precision.policy import DIFFUSION_MODEL, automatic
from ....training.precision.resolve import DEFAULT, resolve_compute
from ..patching.kept_modules import FP32Softmax, keep_in_float32, without_foreign_weights
from ..patching.patcher import carry, made_from, patcher_of_copy, plain_source, reloads, take_off
from ..patching.private_copy import LOADED_STATE, cast_weight, copy_module, kept_dtype
from ..patching.storage import as_loaded, said_of_storage

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
class _Origin:
    """Where a MODEL of ours came from; it is an attachment of the patcher, which the host passes on to clones.

    model: the one that came into the first selector of a chain. home: the patcher of the weights at work. untouched:
    this patcher is the very one that we made, and no other node has worked between it and `model`.
    """

    model: Any
    home: Any
    chosen: str
    untouched: bool

    def on_model_patcher_clone(self) -> _Origin:
        return replace(self, untouched=False)


# Of each source, the patchers of the copies made of it, by dtype and kept modules: gone when no MODEL uses them.
_COPIES: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple, weakref.ref]] = weakref.WeakKeyDictionary()


def select_model_precision(
    model: Any, compute: str = DEFAULT, storage: str = DEFAULT, keep: Keep | None = None
) -> SelectedModel:
    """`model` with the dtypes named: compute "default" (what the loader chose), "auto" or one of `COMPUTE`; storage
    "default" or a key of `DTYPES`; `keep` in FP32.

    What an earlier selector chose is replaced. A dtype that this machine lacks is logged, said in the report and passed
    over; so is a storage that these weights cannot be brought into.
    """
    keep = keep or Keep()
    origin = model.get_attachment(_KEY)
    source = origin.model if origin else model
    device = model.load_device
    held, computed = model_dtypes(source)
    supported = tuple(source.model.model_config.supported_inference_dtypes)
    computes, said = resolve_compute(
        "Compute", compute, computed, device, lambda: automatic(DIFFUSION_MODEL, device, supported)
    )
    stores, said_storage = said_of_storage("Storage", storage, held, device)
    kept, said_kept = _kept(source, keep, computes, held, stores)
    home = source
    if stores != held:
        try:
            home = _copied(source, stores, kept)
        except BadInput as refused:
            stores, said_storage = held, as_loaded("Storage", storage, held, str(refused))
            kept, said_kept = _kept(source, keep, computes, held, stores)
    if stores != held and stores.itemsize == 1:
        said_storage += f" (norms and biases stay {dtype_name(held)})"
    lines = [f"{_kind(source)} on {device}", said, said_storage]
    lines += _warnings(getattr(home, "ref2v_made_of", held), stores, computes, supported, computed)
    softmax, said_softmax = _softmax(keep, computes)
    lines += said_kept + said_softmax
    if (computes, stores) == (computed, held) and not kept and not softmax:
        return SelectedModel(_as_loaded(model, origin), "\n".join(lines))

    new = carry(_without_ours(model, origin), home)
    new.set_model_compute_dtype(computes)  # layers of the host cast their weights from here on
    if kept:
        new.set_injections(_KEY, [keep_in_float32(kept, computes)])
    if softmax:
        options = new.model_options["transformer_options"]
        options[_OVERRIDE] = FP32Softmax(options.get(_OVERRIDE))
    untouched = origin is None or origin.untouched
    new.set_attachments(_KEY, _Origin(source, home, f"{computes} {sorted(kept)} {softmax}", untouched))
    if home is not source:
        size = sum(w.numel() * w.element_size() for w in home.model.diffusion_model.parameters())
        lines.append(f"Held beside the weights of the MODEL that came in: {size / 2**20:.1f} MiB.")
    return SelectedModel(new, "\n".join(lines))


def model_precision(model: Any) -> str:
    """What a selector chose for the layers of `model`, as a text to know it again by; "" where none did."""
    origin = model.get_attachment(_KEY)
    return origin.chosen if origin else ""


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
    return None if quantized else kept_dtype(model.model.diffusion_model, model), computes


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


def _kept(
    source: Any, keep: Keep, computes: torch.dtype, held: torch.dtype | None, stores: torch.dtype | None
) -> tuple[dict[str, str], list[str]]:
    """(module -> what it was found by, the lines of the report)."""
    network = source.model.diffusion_model
    patterns = split_patterns(keep.layers)
    if not keep.kinds() and not patterns:
        return {}, []
    found = find_modules(network, keep.kinds(), patterns)
    lines = [
        f"Nothing to keep in fp32 as {by}: {type(network).__name__} has none by that name." for by in found.missing
    ]
    if computes == torch.float32:
        return {}, [*lines, "Everything computes in fp32, so there is nothing to keep in it."]
    kept, foreign = without_foreign_weights(source, found, kept_copy=stores != held and held == torch.float32)
    for by in dict.fromkeys(kept.values()):
        names = [name for name, found_by in kept.items() if found_by == by]
        lines.append(
            f"Kept in fp32 ({by}): {', '.join(names[:4])}" + (f" and {len(names) - 4} more" * (len(names) > 4))
        )
    if foreign:
        lines.append(f"Not kept in fp32, since their weights cannot be cast in passing: {', '.join(foreign[:4])}.")
    return kept, lines


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


def _without_ours(model: Any, origin: _Origin | None) -> Any:
    """A clone of `model` without what a selector has put on it."""
    new = model.clone()
    if origin is None:
        return new
    source = origin.model
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


def _as_loaded(model: Any, origin: _Origin | None) -> Any:
    """The very MODEL that came into the first selector, unless other nodes have worked on it since."""
    if origin is None:
        return model
    if origin.untouched:
        return origin.model
    return carry(_without_ours(model, origin), origin.model)


def _copied(source: Any, dtype: torch.dtype, kept: dict[str, str]) -> Any:
    """The patcher of a copy of the source's model in `dtype`, `kept` modules as loaded; one for all who use it."""
    copies = _COPIES.setdefault(source.model, {})
    key = (dtype, frozenset(kept))
    known = copies.get(key, lambda: None)()
    if known is not None:
        return known
    # Under dynamic VRAM the host reads the file once more, as it does itself for whoever needs a plain model.
    home = made_from(plain_source(source), lambda plain: _copy_of(plain, dtype, kept))
    copies[key] = weakref.ref(home)
    return home


def _copy_of(source: Any, dtype: torch.dtype, kept: dict[str, str]) -> Any:
    prefixes = tuple(f"diffusion_model.{name}." for name in kept)

    def weight_of(name: str, weight: torch.Tensor) -> torch.Tensor:
        stays = name.startswith(prefixes) or (dtype.itemsize == 1 and weight.ndim < 2)
        return cast_weight(weight, weight.dtype if stays else dtype)

    root = source.model
    take_off(source)  # what a clone has put on the model is no part of it
    private = _bare_copy(root)
    for name, child in root.named_children():
        is_network = name == "diffusion_model"
        made = weight_of if is_network else lambda _name, weight: weight.to("cpu", copy=True)
        private.add_module(name, copy_module(child, source, made, prefix=f"{name}."))
    private.diffusion_model.dtype = dtype  # the host asks the network, not its weights
    home = patcher_of_copy(source, private)
    home.cached_patcher_init = reloads(source, lambda again: _copy_of(again, dtype, kept))
    home.ref2v_made_of = dtype_of_most(root.diffusion_model.parameters())
    return home


def _bare_copy(root: torch.nn.Module) -> torch.nn.Module:
    """A second object of the host's own class, without children and without what the host notes while it is loaded.

    deepcopy would follow it to the sampler's run in progress and to the configuration, which models of a kind share.
    """
    if root._parameters or root._buffers:
        raise BadInput(f"The MODEL ({type(root).__name__}) has weights outside of its parts, so it cannot be copied.")
    bare = type(root).__new__(type(root))
    bare.__dict__.update({key: value for key, value in root.__dict__.items() if key not in LOADED_STATE})
    bare._modules, bare.device, bare.current_patcher = {}, torch.device("cpu"), None
    return bare
