"""What makes a step faster and leaves the mathematics alone: TF32, torch.compile, channels last; each with one line."""

from __future__ import annotations

import torch

from ..errors import BadInput

__all__ = ["channels_last_sentence", "compile_sentence", "has_tf32", "tf32_sentence"]


def has_tf32(device: torch.device) -> bool:
    """Whether float32 matrices can be multiplied in TF32 there: NVIDIA GPUs from Ampere on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def tf32_sentence(device: torch.device) -> str:
    """What `tf32` does on the device."""
    if not has_tf32(device):
        return f"tf32: {device.type} has no TF32, so float32 stays float32"
    return (
        "tf32: float32 matrices and convolutions in training are multiplied with 10 bits instead of 23; held-out pairs "
        "are measured without it"
    )


def channels_last_sentence(device: torch.device, compute: torch.dtype) -> str:
    """What `channels_last` does on the device for convolutions in the dtype `compute`."""
    if device.type == "cuda" and (compute != torch.float32 or has_tf32(device)):
        return "channels_last: tensor cores take convolutions in this order, so nothing is reordered before each"
    return f"channels_last: on {device.type} in {str(compute).removeprefix('torch.')} no gain is to be expected"


def compile_sentence(device: torch.device) -> str:
    """What `compile` does; BadInput where torch.compile does not work on this machine, which is tried out."""
    try:
        one = torch.compile(_small)(torch.ones(8, device=device, requires_grad=True))
        one.sum().backward()
    except Exception as error:  # no compiler, no Triton, a Python that it does not know: each raises its own kind
        first_line = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise BadInput(
            f"compile: expected a machine on which torch.compile works, but it failed ({first_line}); false trains "
            "without it."
        ) from error
    return (
        "compile: the network through torch.compile: its first step takes minutes, and again for each other size of a "
        "batch; its results differ in their last places"
    )


def _small(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x) * 2 + 1
