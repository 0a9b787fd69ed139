"""A module of the host copied, in a dtype of its own: weights, and nothing of what the host hung on it while loading.

`copy.deepcopy` alone would not do. A module that is loaded carries bookkeeping that makes a second patcher believe that
the copy is loaded too, its weights may be patched (LoRA), and newer hosts hang memory handles on it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from ...training.errors import BadInput

__all__ = ["LOADED_STATE", "copy_module"]

# What the host hangs on a module while it is loaded: a copy that kept it would be taken for loaded already.
LOADED_STATE = (
    "model_loaded_weight_memory",
    "model_offload_buffer_memory",
    "model_lowvram",
    "lowvram_patch_counter",
    "current_weight_patches_uuid",
    "comfy_patched_weights",
    "prev_comfy_cast_weights",
    "dynamic_vbars",
    "dynamic_pins",
    "dynamic_patchers",
    "_v",
    "_v_signature",
    "_v_weight",
    "_v_bias",
    "_v_block",
    "_prefetch",
    "_pin_state",
    "_pins",
    "seed_key",
    "weight_lowvram_function",
    "bias_lowvram_function",
    "comfy_force_cast_weights",
    "_comfy_graph",
)


def copy_module(module: torch.nn.Module, patcher: Any, dtype: torch.dtype, *, prefix: str = "") -> torch.nn.Module:
    """`module` with weights and buffers of its own on the CPU, floating-point ones in `dtype`.

    `patcher`: the one that manages the model; `prefix`: where in that model `module` lies, such as "decoder.". The
    weights are the unpatched ones. Raises BadInput for weights that cannot be copied: quantized, or not loaded yet.
    """
    with patcher.use_ejected():
        # deepcopy's memo is filled beforehand with the new weights, so that neither the old ones nor the host's
        # loading handles are ever copied.
        memo: dict[int, Any] = {}
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            backup = patcher.backup.get(prefix + key)
            weight = _in_dtype(tensor if backup is None else backup.weight, dtype, prefix + key)
            if isinstance(tensor, torch.nn.Parameter):
                weight = torch.nn.Parameter(weight, requires_grad=False)
            memo[id(tensor)] = weight
        for part in module.modules():
            for attribute in LOADED_STATE:
                held = part.__dict__.get(attribute)
                if held is not None:
                    memo[id(held)] = held  # shared, then dropped below
        private = copy.deepcopy(module, memo)
    for part in private.modules():
        _forget_loading(part, dtype)
    if not isinstance(getattr(type(private), "device", None), property):
        private.device = torch.device("cpu")  # the host moves a model from there
    return private


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype, key: str) -> torch.Tensor:
    if hasattr(tensor, "dequantize") and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise BadInput(f"The weight {key} is quantized, so its precision cannot be changed; load it unquantized.")
    if tensor.is_meta:
        raise BadInput(f"The weight {key} is not in memory yet, so it cannot be copied into another precision.")
    tensor = tensor.detach()
    return tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def _forget_loading(part: torch.nn.Module, dtype: torch.dtype) -> None:
    if "prev_comfy_cast_weights" in part.__dict__:
        part.comfy_cast_weights = part.prev_comfy_cast_weights
    for attribute in LOADED_STATE:
        part.__dict__.pop(attribute, None)
    for functions in ("weight_function", "bias_function"):
        if functions in part.__dict__:
            setattr(part, functions, [])
    for attribute in [name for name in part.__dict__ if name.endswith("_comfy_model_dtype")]:
        setattr(part, attribute, dtype)
