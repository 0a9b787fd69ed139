"""The names that a person picks for a dtype."""

from __future__ import annotations

import torch

__all__ = ["COMPUTE", "DTYPES", "dtype_name"]

# Storage dtypes; the first three can compute as well.
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
COMPUTE = ("fp32", "bf16", "fp16")

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bf16"; a dtype without a short name keeps torch's, such as "float64"."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
