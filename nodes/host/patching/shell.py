"""Modules of the host that run its own code over other weights, or over the same ones with a look at what comes out.

The host's VAE and CLIP objects call a few methods of the module that they hold. A subclass of the module's own class
stands in those doors; all behind them stays the host's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .private_copy import LOADED_STATE, copy_module

__all__ = ["at_dtype", "bare_copy", "guard_of", "half_dtype", "shell", "to_dtype", "with_doors"]

# method of a VAE's module -> the half that it runs; newer hosts have VAEs that do their own tiling
_VAE_DOORS = {"encode": "encoder", "decode": "decoder", "encode_tiled": "encoder", "decode_tiled": "decoder"}
_DTYPE_OF = {"encoder": "ref2v_encode_dtype", "decoder": "ref2v_decode_dtype"}


def with_doors(family: type, door: Callable[[str, str, Callable[..., Any]], Callable[..., Any]]) -> type:
    """A subclass of `family`, a class of VAE modules, of the same name: each method that runs a half of it is
    `door(name of the method, half, the family's own method)`.
    """
    methods = {
        name: door(name, half, getattr(family, name)) for name, half in _VAE_DOORS.items() if hasattr(family, name)
    }
    return type(family.__name__, (family,), methods)


def half_dtype(module: torch.nn.Module, half: str) -> torch.dtype | None:
    """In which dtype the "encoder" or "decoder" of a VAE's module is fed, where that is ours to say."""
    return getattr(module, _DTYPE_OF[half], None)


def to_dtype(x: Any, dtype: torch.dtype) -> Any:
    """`x` in `dtype`, if it is a tensor of floating-point numbers."""
    return x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x


def at_dtype(memory_used: Callable[..., float], dtype: torch.dtype) -> Callable[..., float]:
    """The host's estimate for one half of a VAE, which asks for the dtype of the whole."""
    return lambda shape, _dtype, *args, **kwargs: memory_used(shape, dtype, *args, **kwargs)


def guard_of(module: torch.nn.Module) -> Any:
    """The NaN guard that stands in the doors of `module`, or None. `without(host object)` gives that object without it,
    `around(host object)` puts it around another.
    """
    return getattr(module, "ref2v_guard", None)


def shell(module: torch.nn.Module, kind: type) -> torch.nn.Module:
    """A second object over the very children, weights and hooks of `module`, of the class `kind`.

    The host goes on loading and unloading `module`: whatever that changes, the shell sees.
    """
    made = kind.__new__(kind)
    made.__dict__.update({key: value for key, value in module.__dict__.items() if key not in (*LOADED_STATE, "device")})
    return made


def bare_copy(root: torch.nn.Module, patcher: Any, kind: type, *, prefix: str = "") -> torch.nn.Module:
    """A module like `root`, of the class `kind`, without children, with its own FP32 copies of the few weights that are
    `root`'s own. `patcher`: the one that manages the model; `prefix`: where in that model `root` lies, such as "vae.".
    """
    empty = shell(root, kind)
    for key, value in empty.__dict__.items():  # hooks, and what holds parameters, buffers and children
        if isinstance(value, (dict, set)) and key.startswith("_"):
            empty.__dict__[key] = type(value)()
    alone = torch.nn.Module()
    for name, parameter in root.named_parameters(recurse=False):
        alone.register_parameter(name, parameter)
    for name, buffer in root.named_buffers(recurse=False):
        alone.register_buffer(name, buffer, persistent=name not in root._non_persistent_buffers_set)
    alone = copy_module(alone, patcher, torch.float32, prefix=prefix)
    empty._parameters.update(alone._parameters)
    empty._buffers.update(alone._buffers)
    empty._non_persistent_buffers_set.update(alone._non_persistent_buffers_set)
    return empty
