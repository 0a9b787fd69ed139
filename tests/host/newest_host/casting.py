"""How a layer under dynamic VRAM gets its weights as it computes.

Each weight is brought over in the dtype noted on the layer (`weight_comfy_model_dtype`), with a LoRA worked in, and
stays there until another clone of the patcher takes the model. Then it is cast to the dtype of the layer's input.
"""

from __future__ import annotations

from typing import Any

import comfy.float
import comfy.lora
import comfy.model_patcher
import comfy.ops
import torch

__all__ = ["Handle", "PatchAtUse", "cast_weights", "zeros_for_meta"]

_HOST_CAST = comfy.ops.cast_bias_weight


class Handle:
    """What stands for a layer's place in GPU memory (`_v`). The real one must never be copied, so neither is this."""

    def __deepcopy__(self, _memo: dict) -> Any:
        raise RuntimeError("a handle of the host's GPU memory was copied")

    __copy__ = __deepcopy__


class PatchAtUse:
    """The LoRA of one weight, worked in when the weight is brought over."""

    is_lowvram_patch = True

    def __init__(self, key: str, patches: dict[str, list]) -> None:
        self.key, self.patches = key, patches

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        return comfy.lora.calculate_weight(self.patches[self.key], weight, self.key, intermediate_dtype=weight.dtype)


def zeros_for_meta(layer: torch.nn.Module) -> None:
    """A weight that no file had is zeros from the first use on."""
    for name in ("weight", "bias"):
        weight = getattr(layer, name, None)
        if weight is not None and weight.is_meta:
            setattr(layer, name, torch.nn.Parameter(torch.zeros(weight.shape, dtype=weight.dtype), requires_grad=False))


def cast_weights(
    layer: Any,
    input: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    bias_dtype: torch.dtype | None = None,
    offloadable: bool = False,
    compute_dtype: torch.dtype | None = None,
    want_requant: bool = False,
) -> tuple:
    """(weight, bias), with `offloadable` also the token for the host's uncast, of a layer about to compute."""
    packed = _is_packed(layer.weight) if layer.weight is not None else False
    if not hasattr(layer, "_v") and not packed:
        return _HOST_CAST(layer, input, dtype, device, bias_dtype, offloadable)
    if input is not None:  # without one, an embedding asks for its weight as it is
        dtype = input.dtype if dtype is None else dtype
    bias_dtype = dtype if bias_dtype is None else bias_dtype
    if not hasattr(layer, "_v"):
        weight = _as_asked(layer, "weight", layer.weight, dtype)
        bias = _as_asked(layer, "bias", layer.bias, bias_dtype)
        return (weight, bias, None) if offloadable else (weight, bias)
    if layer._v_signature is None:
        zeros_for_meta(layer)
        layer._v_weight = _brought_over(layer, "weight")
        layer._v_bias = _brought_over(layer, "bias")
        layer._v_signature = object()
    weight = _as_asked(layer, "weight", layer._v_weight, dtype)
    bias = _as_asked(layer, "bias", layer._v_bias, bias_dtype)
    return (weight, bias, None) if offloadable else (weight, bias)


def _brought_over(layer: Any, name: str) -> torch.Tensor | None:
    weight = getattr(layer, name, None)
    if weight is None:
        return None
    noted = getattr(layer, f"{name}_comfy_model_dtype", None)
    weight = weight.detach()
    if not _is_packed(weight):
        weight = weight.to(noted or weight.dtype, copy=True)
    patch = getattr(layer, f"{name}_lowvram_function", None)
    if patch is None:
        return weight
    held = weight.dtype
    plain = weight.dequantize() if _is_packed(weight) else weight
    patched = patch(plain.float())
    seed = comfy.model_patcher.string_to_seed(f"{layer.seed_key}.{name}")
    return comfy.float.stochastic_rounding(patched, held, seed=seed)


def _is_packed(weight: torch.Tensor) -> bool:
    return getattr(weight, "is_quantized_by_the_host", False)


def _as_asked(layer: Any, name: str, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if weight is None:
        return None
    weight = weight.to(dtype=dtype)
    if _is_packed(weight):
        weight = weight.dequantize()  # to the dtype that it now says it stands for
    for function in getattr(layer, f"{name}_function", ()):
        weight = function(weight)
    return weight
