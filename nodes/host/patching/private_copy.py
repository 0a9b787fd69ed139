"""A module of the host copied, in a dtype of its own: weights, and nothing of what the host hung on it while loading.

`copy.deepcopy` alone would not do. A module that is loaded carries bookkeeping that makes a second patcher believe that
the copy is loaded too, its weights may be patched (LoRA), and newer hosts hang memory handles on it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ....training.errors import BadInput

__all__ = [
    "LOADED_STATE",
    "cast_weight",
    "copy_module",
    "forget_loading",
    "has_quantized_weights",
    "is_dynamic",
    "is_quantized",
    "kept_dtype",
    "loaded_dtype",
    "unpatched",
]

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
_RECORDED = "_comfy_model_dtype"  # how newer hosts note, beside a weight, the dtype that their loader chose for it


def copy_module(
    module: torch.nn.Module,
    patcher: Any,
    dtype: torch.dtype | Callable[[str, torch.Tensor], torch.Tensor],
    *,
    prefix: str = "",
) -> torch.nn.Module:
    """`module` with weights and buffers of its own on the CPU, floating-point ones in `dtype`.

    `dtype` may be a function instead: it is given each weight's key and the weight, and returns the one that the copy
    gets. `patcher`: the one that manages the model; `prefix`: where in that model `module` lies, such as "decoder.".
    The weights are the unpatched ones; under a newer host's dynamic VRAM those are the file's own, before any rounding.
    Raises BadInput for weights that cannot be copied: quantized, or not loaded yet.
    """
    made = dtype if callable(dtype) else lambda _key, weight: cast_weight(weight, dtype)
    with patcher.use_ejected():
        # deepcopy's memo is filled beforehand with the new weights, so that neither the old ones nor the host's
        # loading handles are ever copied.
        memo: dict[int, Any] = {}
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            weight = made(prefix + key, unpatched(patcher, prefix + key, tensor))
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
        forget_loading(part)
    if not isinstance(getattr(type(private), "device", None), property):
        private.device = torch.device("cpu")  # the host moves a model from there
    return private


def is_dynamic(patcher: Any) -> bool:
    """Is its model under a newer host's dynamic VRAM? Weights in memory are the file's own then, in the file's dtype;
    the one that the loader chose stands beside each, and they are cast as they are used.
    """
    return getattr(patcher, "is_dynamic", lambda: False)()


def is_quantized(tensor: torch.Tensor) -> bool:
    """A packed format: its values are not the numbers that it stores."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "dequantize")


def has_quantized_weights(root: torch.nn.Module) -> bool:
    """Has a part of `root` weights of a packed format, or such that a scale beside them belongs to?"""
    if any(is_quantized(weight) or not weight.is_floating_point() for weight in root.parameters()):
        return True
    return any(hasattr(part, "scale_weight") or hasattr(part, "scaled_fp8") for part in root.modules())


def loaded_dtype(module: torch.nn.Module, name: str, patcher: Any) -> torch.dtype:
    """In which dtype the host has the weight `name` of `module`, a part of the model of `patcher`, on the device."""
    recorded = getattr(module, name + _RECORDED, None) if is_dynamic(patcher) else None
    return recorded or getattr(module, name).dtype


def kept_dtype(root: torch.nn.Module, patcher: Any) -> torch.dtype | None:
    """In which dtype the host has most weights of `root`, a part of the model of `patcher`; None: quantized ones."""
    if has_quantized_weights(root):
        return None
    counts: Counter[torch.dtype] = Counter()
    for part in root.modules():
        for name, weight in part.named_parameters(recurse=False):
            counts[loaded_dtype(part, name, patcher)] += weight.numel()
    return max(counts, key=counts.__getitem__)


def unpatched(patcher: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The weight `tensor` of the model of `patcher` without what LoRA nodes have put into it, detached.

    Raises BadInput for one that cannot be copied.
    """
    if is_quantized(tensor):
        raise BadInput(f"The weight {key} is quantized, so its precision cannot be changed; load it unquantized.")
    if (backup := patcher.backup.get(key)) is not None:
        tensor = backup.weight
    elif (hooked := getattr(patcher, "hook_backup", {}).get(key)) is not None:
        tensor = hooked[0]
    elif (buffer := getattr(patcher, "backup_buffers", {}).get(key)) is not None:
        tensor = buffer
    if tensor.is_meta and is_dynamic(patcher):  # one that the file lacks; the host makes zeros of it as it is used
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.is_meta:
        raise BadInput(f"The weight {key} is not in memory yet, so it cannot be copied into another precision.")
    return tensor.detach()


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy on the CPU, in `dtype` if it is floating point. What `dtype` cannot hold becomes the nearest that it can;
    a cast alone may make it infinity or NaN, which would spoil every output.
    """
    if not weight.is_floating_point() or weight.dtype == dtype:
        return weight.to("cpu", copy=True)
    most = torch.finfo(dtype).max
    if weight.numel() and most < torch.finfo(weight.dtype).max:
        if weight.dtype.itemsize == 1:  # such dtypes can do little more than be cast
            weight = weight.float()
        low, high = weight.aminmax()
        if low < -most or high > most:
            weight = weight.clamp(-most, most)
    return weight.to("cpu", dtype, copy=True)


def forget_loading(part: torch.nn.Module) -> None:
    """Take off a copied module what the host has hung on the one that it was copied from."""
    if "prev_comfy_cast_weights" in part.__dict__:
        part.comfy_cast_weights = part.prev_comfy_cast_weights
    elif "seed_key" in part.__dict__:  # dynamic VRAM has every layer cast, and notes nowhere what it did before
        part.__dict__.pop("comfy_cast_weights", None)
    for attribute in LOADED_STATE:
        part.__dict__.pop(attribute, None)
    for functions in ("weight_function", "bias_function"):
        if functions in part.__dict__:
            setattr(part, functions, [])
    for attribute in [name for name in part.__dict__ if name.endswith(_RECORDED)]:
        weight = getattr(part, attribute.removesuffix(_RECORDED), None)
        if weight is not None:
            setattr(part, attribute, weight.dtype)
