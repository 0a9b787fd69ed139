"""What a MODEL will compute with, read from its patcher: the module itself is shared by all clones of the patcher, and
shows what the one that was loaded last has put on it."""

from __future__ import annotations

from typing import Any

import torch

from ..patching.float32_modules import FP32Softmax, keep_in_float32

__all__ = ["as_selected", "computes_in", "foreign_attention", "keeps_softmax"]

_OVERRIDE = "optimized_attention_override"
_OURS = "ref2v"  # how the keys of what our selectors hang on a patcher begin


def computes_in(model: Any) -> torch.dtype:
    """The dtype of the MODEL's layers at work."""
    return model.get_model_object("manual_cast_dtype") or model.model.get_dtype()


def _override(model: Any) -> Any:
    return model.model_options.get("transformer_options", {}).get(_OVERRIDE)


def keeps_softmax(model: Any) -> bool:
    """Whether Select Model Precision has put the scores of attention into FP32."""
    return isinstance(_override(model), FP32Softmax)


def foreign_attention(model: Any) -> Any:
    """What another node computes the MODEL's attention with, None: nothing, so the host's own function does."""
    override = _override(model)
    while isinstance(override, FP32Softmax):
        override = override.before
    return override


class _Loaded:
    """All of a patcher that our hooks look at."""

    def __init__(self, model: torch.nn.Module):
        self.model = model


def as_selected(twin: torch.nn.Module, model: Any) -> Any:
    """Bring `twin`, a copy of the module of `model`, to what the host makes of it when it loads this very MODEL.

    The hooks that keep parts in FP32 go when the object that is returned does.
    """
    twin.manual_cast_dtype = model.get_model_object("manual_cast_dtype")
    for part in twin.modules():
        if getattr(model, "force_cast_weights", False) and hasattr(part, "comfy_cast_weights"):
            part.comfy_cast_weights = True
        for hooks in (part._forward_pre_hooks, part._forward_hooks):  # of another clone, which is loaded now
            for key in [key for key, hook in hooks.items() if hook.__module__ == keep_in_float32.__module__]:
                del hooks[key]
    loaded = _Loaded(twin)
    for key, injections in getattr(model, "injections", {}).items():
        for injection in injections if key.startswith(_OURS) else ():
            injection.inject(loaded)
    return loaded
