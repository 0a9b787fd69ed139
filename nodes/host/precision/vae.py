"""A VAE whose encoder and decoder each have a dtype of their own, beside the VAE that it was made of.

Nothing of the source is changed. The half that is cast gets weights of its own, on a patcher of its own; the other half
stays the source's very modules, which the source's patcher moves to the device and back as ever. All paths of the host
(whole, tiled in one to three dimensions, batches) stay the host's code: they call `encode` and `decode` of the module
that they are given, and there, once, the input is cast. Pixels have been rescaled by then, in FP32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import comfy.model_management
import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name
from ....training.precision.policy import VAE_DECODER, VAE_ENCODER, automatic
from ....training.precision.settle import DEFAULT, settle
from ..private_copy import LOADED_STATE, copy_module
from ..vae import class_name, copy_vae, refuse_empty, with_module

__all__ = ["SelectedVAE", "remember_loader", "select_vae_precision", "source_to_copy"]

# class of the VAE's module -> children that encode, children that decode
_FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "AutoencoderKL": (("encoder", "quant_conv"), ("post_quant_conv", "decoder")),  # SD 1, SD 2, SDXL, Flux 2, Hunyuan
    "AutoencodingEngine": (("encoder",), ("decoder",)),  # SD 3, Flux 1, SVD, HunyuanImage, HunyuanVideo 1.5
    "WanVAE": (("encoder", "conv1"), ("conv2", "decoder")),  # Wan 2.1, Wan 2.2, Qwen Image
    "TAESD": (("taesd_encoder",), ("taesd_decoder",)),
    "TAEHV": (("encoder",), ("decoder",)),
    "VideoVAE": (("encoder",), ("decoder",)),  # LTXV, Mochi
    "CausalContinuousVideoTokenizer": (("encoder", "quant_conv"), ("post_quant_conv", "decoder")),  # Cosmos
    "StageA": (("in_block", "down_blocks"), ("up_blocks", "out_block")),  # Stable Cascade
    "StageC_coder": (("encoder",), ("previewer",)),
    "AudioOobleckVAE": (("encoder",), ("decoder",)),  # Stable Audio
}
_NEITHER = {"vquantizer"}  # children with weights that neither encode nor decode use


@dataclass(frozen=True)
class SelectedVAE:
    """The VAE to work with, and what a person is told: which half runs in what, and why."""

    vae: Any
    report: str


@dataclass(frozen=True)
class _Origin:
    """Where a VAE of ours came from. It sits on the module, so that it survives what others do with the VAE object.

    weights: the VAE with the best weights at hand, None where it is the very one that carries this. encoder, decoder:
    the dtypes that the loader chose, to which "default" goes back.
    """

    weights: Any
    encoder: torch.dtype
    decoder: torch.dtype

    def __deepcopy__(self, _memo: dict) -> _Origin:
        return self  # a copy of the module comes from the same place; the source is not copied with it


class _SharedWeights:
    """Tells the host that a patcher needs another patcher's model on the device too, as its own model patches do."""

    def __init__(self, patcher: Any) -> None:
        self._patcher = patcher

    def models(self) -> list[Any]:
        return [self._patcher]

    def to(self, *_args: Any) -> _SharedWeights:
        return self

    def __deepcopy__(self, _memo: dict) -> _SharedWeights:
        return self  # the host deep-copies a patcher's options when it clones it


# Made once for each source and pair of dtypes, and gone when nobody uses it any more.
_MADE: weakref.WeakKeyDictionary[Any, dict[tuple, weakref.ref]] = weakref.WeakKeyDictionary()


def select_vae_precision(vae: Any, encoder: str = DEFAULT, decoder: str = DEFAULT) -> SelectedVAE:
    """`vae` with the dtypes named: "default" (what the loader chose), "auto", or a key of `DTYPES`.

    A dtype that this machine lacks is logged, said in the report and passed over. Raises BadInput with the reason for
    a VAE that cannot be split or copied.
    """
    refuse_empty(vae)
    origin = _origin(vae)
    if encoder == decoder == DEFAULT:
        chose = f"encoder {dtype_name(origin.encoder)}, decoder {dtype_name(origin.decoder)}"
        return SelectedVAE(_made(origin, origin.encoder, origin.decoder), f"{class_name(vae)}: {chose}, as loaded.")
    source, device = origin.weights, vae.patcher.load_device
    _refuse_what_cannot_be_copied(source, encoder)
    working = tuple(getattr(source, "working_dtypes", ()))
    first, said_first = settle(
        "Encoder", encoder, origin.encoder, device, lambda: automatic(VAE_ENCODER, device, working)
    )
    second, said_second = settle("Decoder", decoder, origin.decoder, device, lambda: automatic(VAE_DECODER, device))
    lines = [said_first, said_second]
    if first != second and _halves(source.first_stage_model) is None:
        first = second = first if torch.finfo(first).eps <= torch.finfo(second).eps else second
        lines.append(
            f"This kind of VAE is not known here, so it cannot be split: all of it runs in {dtype_name(first)}."
        )
    selected = _made(origin, first, second)
    lines += _rounded_before(source, first, second)
    if selected is not source:
        held = comfy.model_management.module_size(selected.first_stage_model)
        lines.append(f"Held beside the weights of the VAE that came in: {held / 2**20:.1f} MiB.")
    return SelectedVAE(selected, "\n".join([f"{class_name(vae)} on {device}", *lines]))


def remember_loader(vae: Any, encoder: torch.dtype, decoder: torch.dtype) -> None:
    """Note on a VAE that our loader has just read, in FP32, what "default" means for it and for all made of it."""
    vae.first_stage_model.ref2v_origin = _Origin(None, encoder, decoder)


def source_to_copy(vae: Any) -> Any:
    """The VAE with the best weights at hand of which `vae` was made, itself if of none. BadInput, with the reason, for
    one that cannot be copied.
    """
    refuse_empty(vae)
    source = _origin(vae).weights
    _refuse_what_cannot_be_copied(source, DEFAULT)
    return source


# ------------------------------------------------------------------------------------------------- what was asked for


def _origin(vae: Any) -> _Origin:
    found = getattr(vae.first_stage_model, "ref2v_origin", None) or _Origin(None, vae.vae_dtype, vae.vae_dtype)
    return found if found.weights is not None else replace(found, weights=vae)


def _rounded_before(source: Any, *dtypes: torch.dtype) -> list[str]:
    """A warning for each dtype that is finer than the one in which the weights were kept."""
    held = source.vae_dtype
    finer = [dtype for dtype in dict.fromkeys(dtypes) if torch.finfo(dtype).eps < torch.finfo(held).eps]
    return [
        f"{dtype_name(dtype)} compute over {dtype_name(held)} weights: the loader had already rounded what is in the "
        f"file. Load VAE (Precision) reads it as it is."
        for dtype in finer
    ]


def _refuse_what_cannot_be_copied(source: Any, encoder: str) -> None:
    what, patcher = class_name(source), source.patcher
    if getattr(patcher, "is_dynamic", lambda: False)():
        raise BadInput(
            f"The VAE ({what}) is under this host's dynamic VRAM, where weights are in the file's precision and cast "
            f"as they are used, so a dtype of our own would be ignored; start ComfyUI with --disable-dynamic-vram."
        )
    if patcher.patches:
        raise BadInput(f"The VAE ({what}) is patched by another node; select its precision before that node.")
    if not any(True for _ in source.first_stage_model.children()):
        raise BadInput(f"The VAE ({what}) has no layers that compute, so it has no precision to select.")
    if encoder != DEFAULT and not _can_encode(source):
        raise BadInput(f"The VAE ({what}) can only decode: it has no encoder whose precision could be selected.")


def _can_encode(source: Any) -> bool:
    try:
        source.process_input(torch.zeros(1))
    except NotImplementedError:  # how the host says that a light VAE cannot
        return False
    return True


# ------------------------------------------------------------------------------------------------ the VAE in two parts


def _halves(module: torch.nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Names of the children that encode and of those that decode; None for a family that is not known."""
    halves = _FAMILIES.get(type(module).__name__)
    children = dict(module.named_children())
    if halves is None or not {*halves[0], *halves[1]} <= children.keys():
        return None
    others = children.keys() - {*halves[0], *halves[1]} - _NEITHER
    if any(True for name in others for _ in children[name].parameters()):
        return None  # weights whose use nobody has looked at
    return halves


def _made(origin: _Origin, first: torch.dtype, second: torch.dtype) -> Any:
    """The VAE in these dtypes: the source itself where it has them, else one object for all who use it."""
    source = origin.weights
    if first == second == source.vae_dtype:
        return source
    made = _MADE.setdefault(source, {})
    key = (first, second, origin.encoder, origin.decoder)
    known = made.get(key, lambda: None)()
    if known is not None:
        return known
    halves = _halves(source.first_stage_model)
    new = copy_vae(source, first) if halves is None else _split(source, first, second, halves)
    new.first_stage_model.ref2v_origin = origin
    made[key] = weakref.ref(new)
    return new


def _split(source: Any, first: torch.dtype, second: torch.dtype, halves: tuple[tuple[str, ...], ...]) -> Any:
    root, patcher = source.first_stage_model, source.patcher
    private = _bare_copy(root, patcher)
    private.ref2v_encode_dtype, private.ref2v_decode_dtype = first, second
    dtypes = {name: dtype for names, dtype in zip(halves, (first, second), strict=True) for name in names}
    shared = {}
    for name, child in root.named_children():
        # what is in neither half (statistics, codebooks) is small, and cast where it is used
        dtype = dtypes.get(name, torch.float32)
        if name in dtypes and dtype == source.vae_dtype:
            shared[name] = child
        else:
            private.add_module(name, copy_module(child, patcher, dtype, prefix=f"{name}."))
    # Not registered as children: this module's patcher must not move what belongs to the source's.
    private.__dict__.update(shared)
    # FP32 outside of the halves: nothing is rounded on the way to them.
    new = with_module(source, private, torch.float32)
    new.memory_used_encode = _at(source.memory_used_encode, first)
    new.memory_used_decode = _at(source.memory_used_decode, second)
    if shared:
        new.get_sd = lambda: _whole_state(private, root)
        new.patcher.set_model_patch(_SharedWeights(patcher), "ref2v_shared_weights")
    return new


def _whole_state(private: torch.nn.Module, root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights, for those who save the VAE. `private.state_dict()` itself says what is its own: the host takes the
    size of a model from it.
    """
    return {**root.state_dict(), **private.state_dict()}


def _at(memory_used: Callable[..., float], dtype: torch.dtype) -> Callable[..., float]:
    return lambda shape, _dtype, *args, **kwargs: memory_used(shape, dtype, *args, **kwargs)


def _bare_copy(root: torch.nn.Module, patcher: Any) -> torch.nn.Module:
    """A module like `root` without its children, with its own FP32 copies of the few weights that are `root`'s own."""
    empty = _split_class(type(root)).__new__(_split_class(type(root)))
    kept = {key: value for key, value in root.__dict__.items() if key not in LOADED_STATE and key != "device"}
    empty.__dict__.update(kept)
    for key, value in kept.items():  # hooks, and what holds parameters, buffers and children
        if isinstance(value, (dict, set)) and key.startswith("_"):
            empty.__dict__[key] = type(value)()
    alone = torch.nn.Module()
    for name, parameter in root.named_parameters(recurse=False):
        alone.register_parameter(name, parameter)
    for name, buffer in root.named_buffers(recurse=False):
        alone.register_buffer(name, buffer, persistent=name not in root._non_persistent_buffers_set)
    alone = copy_module(alone, patcher, torch.float32)
    empty._parameters.update(alone._parameters)
    empty._buffers.update(alone._buffers)
    empty._non_persistent_buffers_set.update(alone._non_persistent_buffers_set)
    return empty


@cache
def _split_class(family: type) -> type:
    """A subclass of the host's own class, of the same name, that casts what comes in at its doors."""

    def casting(name: str, dtype_of: str) -> Callable[..., Any]:
        def call(self, x, *args, **kwargs):
            if torch.is_tensor(x) and x.is_floating_point():
                x = x.to(getattr(self, dtype_of))
            return getattr(super(made, self), name)(x, *args, **kwargs)

        return call

    # newer hosts have VAEs that do their own tiling
    doors = {"encode": "encode", "decode": "decode", "encode_tiled": "encode", "decode_tiled": "decode"}
    methods = {name: casting(name, f"ref2v_{half}_dtype") for name, half in doors.items() if hasattr(family, name)}
    made = type(family.__name__, (family,), methods)
    return made
