"""Weights as they lie in memory: by module and dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..precision.dtypes import dtype_name

__all__ = ["WeightRow", "rows_of", "total_bytes", "weight_rows"]


@dataclass(frozen=True)
class WeightRow:
    """One part of a network in one dtype. count: numbers; size: bytes."""

    module: str
    dtype: str
    count: int
    size: int


def weight_rows(module: torch.nn.Module, depth: int = 1) -> tuple[WeightRow, ...]:
    """Parameters and buffers by the first `depth` parts of their name and by dtype; a shared tensor counts once."""
    weights = [*module.named_parameters(), *module.named_buffers()]
    return rows_of(((name, tensor, tensor.dtype) for name, tensor in weights), depth)


def rows_of(weights: Iterable[tuple[str, torch.Tensor, torch.dtype]], depth: int = 1) -> tuple[WeightRow, ...]:
    """The same of (name, tensor, dtype that it is brought to the device in)."""
    rows: dict[tuple[str, str], list[int]] = {}
    seen: set[int] = set()
    for name, tensor, dtype in weights:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        key = ".".join(name.split(".")[:-1][:depth]) or name, dtype_name(dtype)
        row = rows.setdefault(key, [0, 0])
        row[0] += tensor.numel()
        row[1] += tensor.numel() * dtype.itemsize
    return tuple(WeightRow(*key, *row) for key, row in rows.items())


def total_bytes(rows: tuple[WeightRow, ...]) -> int:
    return sum(row.size for row in rows)
