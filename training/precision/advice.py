"""FP16 or BF16 for training on this device, and why."""

from __future__ import annotations

import torch

from .device import support

__all__ = ["training_advice"]

# a parameter that is trained: weight, gradient and AdamW's state, pure_bf16 with bf16 moments; a frozen one: weight
_BYTES = {"fp32": (16, 4), "pure_bf16": (8, 2)}


def training_advice(device: torch.device, parameters: int, adapters: int = 0) -> str:
    """One line: the precision that suits a network of `parameters` parameters on `device`, with its reason. adapters:
    the parameters that are trained beside it, which then stays as it is; 0: it is trained itself."""
    bf16, fp16 = (support(device, dtype) for dtype in (torch.bfloat16, torch.float16))
    if bf16.runs and bf16.native:
        advice = "bf16: this device has it in hardware, and with float32's range it needs no loss scaling"
    elif fp16.runs and fp16.native and device.type != "cpu":
        advice = f"fp16: {bf16.why}, while it has fp16 in hardware; its range ends at 65504, so the loss is scaled"
    else:
        advice = f"fp32: {bf16.why}"
    trained, frozen = (adapters, parameters) if adapters else (parameters, 0)
    full, low = ((trained * each + frozen * still) / 2**20 for each, still in _BYTES.values())
    what = "gradients and optimizer of this network"
    if adapters:
        what = "this network, and gradients and optimizer of its adapters,"
    return (
        f"advice: {advice}; weights{' of' if adapters else ','} {what} take {full:,.0f} MiB, and {low:,.0f} MiB "
        'in pure_bf16 with "moments": "bf16"'
    )
