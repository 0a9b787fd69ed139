"""The VAE in the dtypes wanted: its source, or a VAE beside it, copied whole or with a dtype for each half.

Of two halves, the one that is cast gets weights of its own, on a patcher of its own; the other one stays the source's
very modules, which the source's patcher moves to the device and back as ever. All paths of the host (whole, tiled in
one to three dimensions, batches) stay the host's code: they call `encode` and `decode` of the module that they are
given, and there, once, the input is cast. Pixels have been rescaled by then, in FP32.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name
from ..patching.exact_float32 import exact_float32
from ..patching.patcher import patcher_of_copy
from ..patching.private_copy import copy_in_parts, copy_module
from ..patching.provenance import MadeOnce
from .halves import Halves
from .source import RecognisedVAE, recognise

__all__ = [
    "NoCopy",
    "compute_dtype",
    "copy_vae",
    "estimate_for",
    "is_all_in",
    "named_layers",
    "set_compute_dtypes",
    "subclass_by_half",
    "to_dtype",
    "vae_in_dtypes",
]

# method of a VAE's module -> the half that it runs; newer hosts have VAEs that do their own tiling
_METHODS = {"encode": "encoder", "decode": "decoder", "encode_tiled": "encoder", "decode_tiled": "decoder"}
_ABOUT_DTYPES = re.compile(r"dtype|scalar type|should be the same|BFloat16|Half")
_MADE = MadeOnce()  # of each source, by the dtypes of its halves and those that its loader chose


class NoCopy(BadInput):
    """These weights cannot be copied into another dtype."""


def vae_in_dtypes(
    given: RecognisedVAE,
    halves: Halves | None,
    encoder: torch.dtype,
    decoder: torch.dtype,
    *,
    check_layers: bool = False,
) -> Any:
    """The VAE with its halves in these dtypes: the source itself where it has them, else one object for all who use it.

    halves: None for a family that is not known, which takes one dtype for both. check_layers: copy the source too where
    a layer of it is in another dtype than the VAE, which would stop it. Raises NoCopy with the reason.
    """
    source, provenance = given.source, given.provenance
    # Under dynamic VRAM weights are cast as they are used: whatever they are in, they run in the VAE's dtype.
    uniform = given.dynamic or not check_layers or is_all_in(source.first_stage_model, source.vae_dtype)
    if uniform and encoder == decoder == source.vae_dtype:
        return source
    key = (encoder, decoder, provenance.encoder, provenance.decoder)
    return _MADE.get(source, key, lambda: _made(given, halves, encoder, decoder))


def _made(given: RecognisedVAE, halves: Halves | None, encoder: torch.dtype, decoder: torch.dtype) -> Any:
    source, root, patcher = given.source, given.source.first_stage_model, given.source.patcher
    dtypes = {} if halves is None else dict.fromkeys(halves[0], encoder) | dict.fromkeys(halves[1], decoder)
    # A half that is stored in its dtype already stays the source's own. Not so under dynamic VRAM: the host's code for
    # a plain patcher would not load it.
    own = {} if given.dynamic else {name: dtype for name, dtype in dtypes.items() if dtype == source.vae_dtype}
    shared = {name for name, dtype in own.items() if is_all_in(root.get_submodule(name), dtype)}
    kind = _casting_class(type(root))
    try:
        if halves is None:
            private = copy_module(root, patcher, encoder)
        else:  # what is in neither half (statistics, codebooks) is small: in FP32, and cast where it is used
            private = copy_in_parts(root, patcher, dtypes, shared=shared, kind=kind)
    except BadInput as refused:
        raise NoCopy(str(refused)) from refused
    private.ref2v_provenance = given.provenance
    if halves is None:
        return _vae_over(private, source, encoder)
    set_compute_dtypes(private, encoder, decoder)
    new = _vae_over(private, source, torch.float32)  # FP32 outside of the halves: nothing is rounded on the way to them
    new.memory_used_encode = estimate_for(source.memory_used_encode, encoder)
    new.memory_used_decode = estimate_for(source.memory_used_decode, decoder)
    if shared:
        new.get_sd = lambda: {**root.state_dict(), **private.state_dict()}  # all weights, for those who save the VAE
        new.patcher.set_model_patch(_SharedWeights(patcher), "ref2v_shared_weights")
    return new


def copy_vae(vae: Any, dtype: torch.dtype) -> Any:
    """A VAE object of its own, with its own weights in `dtype` on a plain patcher; the VAE that came in is not touched.

    What the host has rounded away when it loaded the file does not come back.
    """
    source = recognise(vae).source
    return _vae_over(copy_module(source.first_stage_model, source.patcher, dtype), source, dtype)


def _vae_over(module: torch.nn.Module, source: Any, dtype: torch.dtype) -> Any:
    """`source` again, with another module at work, which is fed in `dtype`, on a patcher of its own."""
    new = copy.copy(source)
    new.first_stage_model = module
    new.patcher = patcher_of_copy(source.patcher, module)
    new.vae_dtype = dtype
    new.size = None
    return new


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


def is_all_in(module: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Whether every weight is in `dtype`: other packs change single layers of a VAE that they were given."""
    weights = (*module.parameters(), *module.buffers())
    return all(weight.dtype == dtype for weight in weights if weight.is_floating_point())


def named_layers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, layer) of every layer, those of a shared half too, which `named_modules` of a VAE of ours does not see."""
    for where, part in module.named_modules():
        yield where, part
        for name, shared in part.__dict__.items():
            if isinstance(shared, torch.nn.Module):
                for inside, layer in shared.named_modules():
                    yield ".".join(filter(None, (where, name, inside))), layer


# --------------------------------------------------------------------------------------------------- the dtypes at work


def set_compute_dtypes(module: torch.nn.Module, encoder: torch.dtype, decoder: torch.dtype) -> None:
    """Note on a module of ours in which dtype each half of it is fed."""
    module.ref2v_compute_dtypes = {"encoder": encoder, "decoder": decoder}


def compute_dtype(vae: Any, half: str) -> torch.dtype:
    """In which dtype the "encoder" or "decoder" of a VAE runs."""
    ours = getattr(getattr(vae, "first_stage_model", None), "ref2v_compute_dtypes", None)
    return getattr(vae, "vae_dtype", None) if ours is None else ours[half]


def to_dtype(x: Any, dtype: torch.dtype) -> Any:
    """`x` in `dtype`, if it is a tensor of floating-point numbers."""
    return x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x


def estimate_for(memory_used: Callable[..., float], dtype: torch.dtype) -> Callable[..., float]:
    """The host's estimate for one half of a VAE, which asks for the dtype of the whole."""
    return lambda shape, _dtype, *args, **kwargs: memory_used(shape, dtype, *args, **kwargs)


def subclass_by_half(family: type, replaced: Callable[[str, str, Callable[..., Any]], Callable[..., Any]]) -> type:
    """A subclass of `family`, a class of VAE modules, of the same name: each method that runs a half of it is
    `replaced(name of the method, half, the family's own method)`.
    """
    methods = {
        name: replaced(name, half, getattr(family, name)) for name, half in _METHODS.items() if hasattr(family, name)
    }
    return type(family.__name__, (family,), methods)


@cache
def _casting_class(family: type) -> type:
    """A subclass of the host's own class, of the same name, that casts what comes in to the dtype of the half."""

    def casting(_method: str, half: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self, x, *args, **kwargs):
            dtype = self.ref2v_compute_dtypes[half]
            run = partial(inner, self, to_dtype(x, dtype), *args, **kwargs)
            try:
                with exact_float32() if dtype == torch.float32 else nullcontext():
                    return run()
            except RuntimeError as error:  # what is about memory is for the host, which then works in tiles
                if not _ABOUT_DTYPES.search(str(error)):
                    raise
                raise BadInput(_in_words(error, self, half, _failing_layer(self, run))) from error

        return call

    return subclass_by_half(family, casting)


def _in_words(error: RuntimeError, module: torch.nn.Module, half: str, layer: str) -> str:
    dtype = module.ref2v_compute_dtypes[half]
    why, other = str(error).splitlines()[0][:160], "fp32" if dtype != torch.float32 else "default"
    return (
        f"The {half} of the VAE ({type(module).__name__}) cannot run in {dtype_name(dtype)}, as its layer "
        f"{layer} stops with {why!r}; choose {other} for the {half}."
    )


def _failing_layer(module: torch.nn.Module, run: Callable[[], Any]) -> str:
    """The innermost layer in which `run()` stops, by hooks for this one call more."""
    entered: list[str] = []

    def leave(_layer: torch.nn.Module, _args: tuple, _output: Any) -> None:
        entered.pop()

    handles = []
    for name, layer in named_layers(module):
        handles.append(layer.register_forward_pre_hook(lambda _layer, _args, name=name: entered.append(name)))
        handles.append(layer.register_forward_hook(leave))
    try:
        run()
    except RuntimeError:
        return entered[-1] if entered else "(none of its own)"
    finally:
        for handle in handles:
            handle.remove()
    return "(none of its own)"
