"""What a device can compute in: found out by trying, not from a list of model numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from .dtypes import dtype_name

__all__ = ["Support", "stores", "support"]


@dataclass(frozen=True)
class Support:
    """Whether a dtype `runs` on a device, whether it is `native` there (not emulated), and, if either is not, why."""

    runs: bool
    native: bool
    why: str = ""


@cache
def support(device: torch.device, dtype: torch.dtype) -> Support:
    """Can `device` run a convolution and a matrix product in `dtype`, and does it do so in hardware?"""
    sentence = f"{_device_name(device)} cannot compute in {dtype_name(dtype)}"
    if not dtype.is_floating_point:
        return Support(False, False, sentence)
    try:
        _try_out(device, dtype)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return Support(False, False, f"{sentence} ({str(error).splitlines()[0][:120]})")
    if not _is_native(device, dtype):
        return Support(True, False, f"{_device_name(device)} emulates {dtype_name(dtype)}")
    return Support(True, True)


@cache
def stores(device: torch.device, dtype: torch.dtype) -> Support:
    """Can `device` keep weights in `dtype` and cast them to FP32? Not every device that has memory has every dtype."""
    try:
        back: list[float] | str = torch.tensor([0.5, -2.0], device=device).to(dtype).float().tolist()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        back = str(error).splitlines()[0][:120]
    if back != [0.5, -2.0]:
        sentence = f"{_device_name(device)} cannot keep weights in {dtype_name(dtype)}"
        return Support(False, False, f"{sentence} ({back})" if isinstance(back, str) else sentence)
    return Support(True, True)


def _try_out(device: torch.device, dtype: torch.dtype) -> None:
    pixels = torch.ones(1, 2, 4, 4, device=device, dtype=dtype)
    weight = torch.ones(2, 2, 3, 3, device=device, dtype=dtype)
    mapped = torch.nn.functional.conv2d(pixels, weight, padding=1)
    rows = torch.nn.functional.linear(mapped.reshape(1, -1), torch.ones(3, 32, device=device, dtype=dtype))
    if not torch.isfinite(torch.nn.functional.silu(rows).float()).all():  # waits for the device as well
        raise RuntimeError("it gives NaN")


def _is_native(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype == torch.float32:
        return True
    if device.type == "cuda":
        if torch.version.hip is not None:
            return True
        capability = torch.cuda.get_device_capability(device)
        # fp16 runs at full rate from Volta on (and slower than fp32 on most of Pascal), bf16 from Ampere on
        return capability >= ((7, 0) if dtype == torch.float16 else (8, 0))
    if device.type == "cpu":
        asked = "_is_mkldnn_fp16_supported" if dtype == torch.float16 else "_is_mkldnn_bf16_supported"
        return bool(getattr(torch.ops.mkldnn, asked)())
    return True


def _device_name(device: torch.device) -> str:
    return {"cpu": "this CPU", "cuda": "this GPU", "xpu": "this GPU", "mps": "this GPU"}.get(
        device.type, f"the device {device}"
    )
