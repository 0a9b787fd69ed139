"""A module of the host once more: as a copy with weights of its own, or as a proxy, a second object over the same ones.

`copy.deepcopy` alone would not do for a copy. A module that is loaded carries bookkeeping that makes a second patcher
believe that the copy is loaded too, its weights may be patched (LoRA), and newer hosts hang memory handles on it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ....training.errors import BadInput
from ..progress import NOT_A_FAILURE

__all__ = [
    "LOADED_STATE",
    "cast_weight",
    "copy_in_parts",
    "copy_module",
    "forget_loading",
    "has_quantized_weights",
    "is_dynamic",
    "is_quantized",
    "loaded_dtype",
    "module_proxy",
    "storage_dtype",
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


Dtype = torch.dtype | Callable[[str, torch.Tensor], torch.Tensor]
"""A dtype, or a function that is given each weight's key and the weight, and returns the one that the copy gets."""


def copy_module(module: torch.nn.Module, patcher: Any, dtype: Dtype, *, prefix: str = "") -> torch.nn.Module:
    """`module` with weights and buffers of its own on the CPU, floating-point ones in `dtype`.

    `patcher`: the one that manages the model; `prefix`: where in that model `module` lies, such as "decoder.".
    The weights are the unpatched ones; under a newer host's dynamic VRAM those are the file's own, before any rounding.
    Raises BadInput for weights that cannot be copied: quantized, not loaded yet, or with handles of dynamic VRAM on
    them that no version of this pack may know of.
    """
    try:
        private = _copied(module, patcher, dtype, prefix)
    except (BadInput, *NOT_A_FAILURE):
        raise
    except Exception as failure:
        if not is_dynamic(patcher):
            raise
        raise BadInput(f"a copy of it out of dynamic VRAM failed ({type(failure).__name__}: {failure})") from failure
    for part in private.modules():
        forget_loading(part)
    _note_on_cpu(private)
    return private


def _copied(module: torch.nn.Module, patcher: Any, dtype: Dtype, prefix: str) -> torch.nn.Module:
    """deepcopy, whose memo is filled beforehand with the new weights, so that neither the old ones nor the host's
    loading handles are ever copied.
    """
    made = dtype if callable(dtype) else lambda _key, weight: cast_weight(weight, dtype)
    with patcher.use_ejected():
        memo: dict[int, Any] = {}
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            weight = made(prefix + key, _unpatched(patcher, prefix + key, tensor))
            if isinstance(tensor, torch.nn.Parameter):
                weight = torch.nn.Parameter(weight, requires_grad=False)
            memo[id(tensor)] = weight
        for part in module.modules():
            for attribute in LOADED_STATE:
                handle = part.__dict__.get(attribute)
                if handle is not None:
                    memo[id(handle)] = handle  # shared, then dropped by `forget_loading`
        return copy.deepcopy(module, memo)


def copy_in_parts(
    root: torch.nn.Module,
    patcher: Any,
    dtypes: Mapping[str, Dtype],
    *,
    other: Dtype = torch.float32,
    shared: Collection[str] = (),
    kind: type | None = None,
    prefix: str = "",
) -> torch.nn.Module:
    """`root` with each part that `dtypes` names (a dot: a part of a part) copied in a dtype of its own and all else in
    `other`, as an object of the class `kind`, else of its own. `patcher`, `prefix` and errors as in `copy_module`.

    shared: parts that stay the very modules of `root`, whose patcher goes on managing them.
    """
    private = _copy_without_children(root, patcher, kind or type(root), prefix=prefix)
    for name, child in root.named_children():
        path = prefix + name
        if path in shared:
            # Past torch's own `__setattr__`, which makes a child of every module: the patcher of the copy would move
            # what the source's patcher moves. A holder that is no module would have to answer all that the host asks.
            private.__dict__[name] = child
        elif any(inner.startswith(f"{path}.") for inner in (*dtypes, *shared)):
            part = copy_in_parts(child, patcher, dtypes, other=other, shared=shared, prefix=f"{path}.")
            private.add_module(name, part)
        else:
            private.add_module(name, copy_module(child, patcher, dtypes.get(path, other), prefix=f"{path}."))
    return private


def _copy_without_children(root: torch.nn.Module, patcher: Any, kind: type, *, prefix: str = "") -> torch.nn.Module:
    """A module like `root`, of the class `kind`, without children and hooks, with FP32 copies of the few weights that
    are `root`'s own. `patcher`: the one that manages the model; `prefix`: where in it `root` lies, such as "vae.".

    deepcopy would follow a whole model to the sampler's run in progress and to its configuration, which others share.
    """
    empty = module_proxy(root, kind)
    for key, value in empty.__dict__.items():  # hooks, and what holds parameters, buffers and children
        if isinstance(value, (dict, set)) and key.startswith("_"):
            empty.__dict__[key] = type(value)()
    own = torch.nn.Module()
    for name, parameter in root.named_parameters(recurse=False):
        own.register_parameter(name, parameter)
    for name, buffer in root.named_buffers(recurse=False):
        own.register_buffer(name, buffer, persistent=name not in root._non_persistent_buffers_set)
    own = copy_module(own, patcher, torch.float32, prefix=prefix)
    empty._parameters.update(own._parameters)
    empty._buffers.update(own._buffers)
    empty._non_persistent_buffers_set.update(own._non_persistent_buffers_set)
    _note_on_cpu(empty)
    return empty


def module_proxy(module: torch.nn.Module, kind: type | None = None, **children: torch.nn.Module) -> torch.nn.Module:
    """A second object over the very children, weights and hooks of `module`, of the class `kind`, else of its own.

    The host goes on loading and unloading `module`: whatever that changes, the proxy sees. `children`: what the proxy
    calls instead of those of that name.
    """
    kind = kind or type(module)
    proxy = kind.__new__(kind)
    own = (*LOADED_STATE, "device")
    proxy.__dict__.update({key: value for key, value in module.__dict__.items() if key not in own})
    if children:
        proxy.__dict__["_modules"] = {**module._modules, **children}
    return proxy


def _note_on_cpu(private: torch.nn.Module) -> None:
    """The host moves a model from `device`, and where a module has none, takes it for where it puts models away."""
    if not isinstance(getattr(type(private), "device", None), property):
        private.device = torch.device("cpu")


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


def storage_dtype(root: torch.nn.Module, patcher: Any) -> torch.dtype | None:
    """In which dtype the host has most weights of `root`, a part of the model of `patcher`; None: quantized ones."""
    if has_quantized_weights(root):
        return None
    counts: Counter[torch.dtype] = Counter()
    for part in root.modules():
        for name, weight in part.named_parameters(recurse=False):
            counts[loaded_dtype(part, name, patcher)] += weight.numel()
    return max(counts, key=counts.__getitem__)


def _unpatched(patcher: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
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
