"""FP16 or BF16 for training on this device, and why."""

from __future__ import annotations

import torch

from ..config.choices import Precision
from .device import support

__all__ = ["automatic_precision", "training_advice"]

# a parameter that is trained: weight, gradient and AdamW's state, pure_bf16 with bf16 moments; a frozen one: weight
_BYTES = {"fp32": (16, 4), "pure_bf16": (8, 2)}


def automatic_precision(device: torch.device) -> tuple[Precision, str]:
    """(what precision "auto" is on the device, why). Never fp16 or pure_bf16: those are a choice of their own."""
    found = support(device, torch.bfloat16)
    if found.runs and found.native:
        return "bf16", "this device has it in hardware"
    return "fp32", found.why


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
