"""Modules of a MODEL that compute in FP32 while the rest is in a low dtype, by hooks that the host puts on and off.

The host calls a patcher's injections when it brings the patcher's model to the device, and again when another patcher
of the same model takes its place. A layer of the host follows the dtype of its input, so casting the input is enough.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ....training.precision.module_kinds import LAST, ModuleMatch
from .private_copy import loaded_dtype

if TYPE_CHECKING:
    from comfy.patcher_extension import PatcherInjection

__all__ = ["FP32Softmax", "keep_in_float32", "split_castable"]

_REMOVE = "ref2v_remove_precision_hooks"  # on the model, not in a closure: clones of a patcher share the model


def split_castable(
    patcher: Any, wanted: ModuleMatch, *, weights_in_float32: bool
) -> tuple[dict[str, str], list[str]]:
    """(the modules `wanted` that a cast input makes compute in FP32, names of those that it does not); they are of the
    diffusion model of `patcher`.

    A layer that is not the host's own has its weights in the dtype that they are stored in, whatever comes in.
    `weights_in_float32`: the weights of all these modules are stored in FP32.
    """
    root = patcher.model.diffusion_model
    castable, foreign = {}, []
    for name, by in wanted.modules.items():
        own = [layer for layer in root.get_submodule(name).modules() if not hasattr(layer, "comfy_cast_weights")]
        fixed = [
            loaded_dtype(layer, weight, patcher) for layer in own for weight, _ in layer.named_parameters(recurse=False)
        ]
        if weights_in_float32 or all(dtype == torch.float32 for dtype in fixed):
            castable[name] = by
        else:
            foreign.append(name)
    return castable, foreign


def keep_in_float32(names: dict[str, str], compute: torch.dtype) -> PatcherInjection:
    """For `ModelPatcher.set_injections`: modules of the diffusion model by name -> kind, in a model that computes in
    `compute`. What they give goes on in `compute`, but for the last ones, whose output is the model's.
    """

    def inject(patcher: Any) -> None:
        eject(patcher)  # the host copies "is injected" to clones, so this may be the second time
        root, handles = patcher.model.diffusion_model, []
        for name in names:
            module = root.get_submodule(name)
            handles.append(module.register_forward_pre_hook(_to_float32, with_kwargs=True))
            if name not in LAST:
                handles.append(module.register_forward_hook(_back_to(compute)))
        # A patcher that dies while its model is loaded is never told so: the host goes on with the one that it was
        # cloned from, which knows nothing of these hooks.
        patcher.model.__dict__[_REMOVE] = weakref.finalize(patcher, _remove, handles)

    def eject(patcher: Any) -> None:
        patcher.model.__dict__.pop(_REMOVE, lambda: None)()

    from comfy.patcher_extension import PatcherInjection  # here, for the memory nodes read this file too

    return PatcherInjection(inject=inject, eject=eject)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if torch.is_tensor(value) and value.is_floating_point():
        return value.to(dtype)
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _to_float32(_module: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return _cast(args, torch.float32), {name: _cast(value, torch.float32) for name, value in kwargs.items()}


def _back_to(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda _module, _args, output: _cast(output, dtype)


class FP32Softmax:
    """An `optimized_attention_override` of the host: scores and softmax in FP32 in those attentions that hold them."""

    def __init__(self, before: Callable[..., Any] | None = None) -> None:
        self.before = before  # what another node has put there

    def __call__(self, attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) < 6:  # q, k, v, heads, mask, attn_precision
            kwargs["attn_precision"] = torch.float32
        else:
            args = (*args[:5], torch.float32, *args[6:])
        if self.before is not None:
            return self.before(attention, *args, **kwargs)
        return attention(*args, **kwargs)

    def __deepcopy__(self, _memo: dict) -> FP32Softmax:
        return self  # the host deep-copies a patcher's options when it clones it
