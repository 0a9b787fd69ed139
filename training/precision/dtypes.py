"""The names that a person picks for a dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

__all__ = ["AUDITED", "COMPUTE", "DTYPES", "dtype_name", "dtype_of_most"]

# Storage dtypes; the first three can compute as well.
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
COMPUTE = ("fp32", "bf16", "fp16")
# what a person picks for an audit -> the dtypes that are tried, the one to prefer first
AUDITED: dict[str, tuple[str, ...]] = {"bf16 and fp16": ("bf16", "fp16"), "bf16": ("bf16",), "fp16": ("fp16",)}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bf16"; a dtype without a short name keeps torch's, such as "float64"."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def dtype_of_most(weights: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype that most numbers of a network are kept in: small parts of it may have another."""
    counts: Counter[torch.dtype] = Counter()
    for weight in weights:
        counts[weight.dtype] += weight.numel()
    return max(counts, key=counts.__getitem__)
