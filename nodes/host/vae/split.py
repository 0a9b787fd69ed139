"""The module of a VAE in two parts, each in a dtype of its own.

The part that is cast gets weights of its own, on a patcher of its own; the other part stays the source's very modules,
which the source's patcher moves to the device and back as ever. All paths of the host (whole, tiled in one to three
dimensions, batches) stay the host's code: they call `encode` and `decode` of the module that they are given, and there,
once, the input is cast. Pixels have been rescaled by then, in FP32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name
from ..patching.exact import exact_float32
from ..patching.private_copy import copy_module, is_dynamic
from ..patching.shell import at_dtype, bare_copy, half_dtype, to_dtype, with_doors
from .halves import Halves
from .host_vae import with_module

__all__ = ["is_all_in", "named_layers", "split_vae"]

_ABOUT_DTYPES = re.compile(r"dtype|scalar type|should be the same|BFloat16|Half")


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
    return all(held.dtype == dtype for held in _weights(module) if held.is_floating_point())


def named_layers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name, layer) of every layer, those of a shared half too, which `named_modules` of a split VAE does not see."""
    for where, part in module.named_modules():
        yield where, part
        for name, shared in part.__dict__.items():
            if isinstance(shared, torch.nn.Module):
                for inside, layer in shared.named_modules():
                    yield ".".join(filter(None, (where, name, inside))), layer


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def split_vae(source: Any, first: torch.dtype, second: torch.dtype, halves: Halves) -> Any:
    """A VAE beside `source` whose encoder computes in `first` and whose decoder in `second`."""
    root, patcher = source.first_stage_model, source.patcher
    dtypes = {name: dtype for names, dtype in zip(halves, (first, second), strict=True) for name in names}
    # Under dynamic VRAM the source's modules are no good to share: a plain patcher's host code would not load them.
    parts = _Parts(patcher, dtypes, None if is_dynamic(patcher) else source.vae_dtype)
    private = parts.copy(root, _split_class(type(root)))
    private.ref2v_encode_dtype, private.ref2v_decode_dtype = first, second
    # FP32 outside of the halves: nothing is rounded on the way to them.
    new = with_module(source, private, torch.float32)
    new.memory_used_encode = at_dtype(source.memory_used_encode, first)
    new.memory_used_decode = at_dtype(source.memory_used_decode, second)
    if parts.shares:
        new.get_sd = lambda: _whole_state(private, root)
        new.patcher.set_model_patch(_SharedWeights(patcher), "ref2v_shared_weights")
    return new


class _Parts:
    """Copies a module whose parts have the given dtypes; `shares` tells whether some are the source's own, which are
    those that are `held` in the dtype wanted. None: share none.
    """

    def __init__(self, patcher: Any, dtypes: dict[str, torch.dtype], held: torch.dtype | None) -> None:
        self.patcher, self.dtypes, self.held = patcher, dtypes, held
        self.shares = False

    def copy(self, module: torch.nn.Module, kind: type, prefix: str = "") -> torch.nn.Module:
        private = bare_copy(module, self.patcher, kind, prefix=prefix)
        for name, child in module.named_children():
            path = prefix + name
            dtype = self.dtypes.get(path)
            if dtype == self.held and is_all_in(child, dtype):
                # Not registered as a child: this module's patcher must not move what belongs to the source's.
                private.__dict__[name] = child
                self.shares = True
            elif any(inner.startswith(f"{path}.") for inner in self.dtypes):
                private.add_module(name, self.copy(child, type(child), f"{path}."))
            else:  # what is in neither half (statistics, codebooks) is small, and cast where it is used
                private.add_module(name, copy_module(child, self.patcher, dtype or torch.float32, prefix=f"{path}."))
        return private


def _whole_state(private: torch.nn.Module, root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All weights, for those who save the VAE. `private.state_dict()` itself says what is its own: the host takes the
    size of a model from it.
    """
    return {**root.state_dict(), **private.state_dict()}


@cache
def _split_class(family: type) -> type:
    """A subclass of the host's own class, of the same name, that casts what comes in at its doors."""

    def casting(_method: str, half: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self, x, *args, **kwargs):
            dtype = half_dtype(self, half)
            try:
                with exact_float32() if dtype == torch.float32 else nullcontext():
                    return inner(self, to_dtype(x, dtype), *args, **kwargs)
            except RuntimeError as error:  # what is about memory is for the host, which then works in tiles
                if not _ABOUT_DTYPES.search(str(error)):
                    raise
                raise BadInput(_in_words(error, self, half, dtype)) from error

        return call

    return with_doors(family, casting)


def _in_words(error: RuntimeError, module: torch.nn.Module, half: str, dtype: torch.dtype) -> str:
    said, other = str(error).splitlines()[0][:160], "fp32" if dtype != torch.float32 else "default"
    return (
        f"The {half} of the VAE ({type(module).__name__}) cannot run in {dtype_name(dtype)}, as its layer "
        f"{_failing_layer(error, module)} stops with {said!r}; choose {other} for the {half}."
    )


def _failing_layer(error: RuntimeError, module: torch.nn.Module) -> str:
    """The innermost layer in which the error came up, by the frames that it went through: no hook is needed."""
    names = {id(layer): name for name, layer in named_layers(module)}
    found, frame = "", error.__traceback__
    while frame is not None:
        found = names.get(id(frame.tb_frame.f_locals.get("self")), "") or found
        frame = frame.tb_next
    return found or "(none of its own)"
