"""Weights as they lie in memory: by module and dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..precision.dtypes import dtype_name

__all__ = ["WeightRow", "total_bytes", "weight_rows"]


@dataclass(frozen=True)
class WeightRow:
    """One part of a network in one dtype. count: numbers; size: bytes."""

    module: str
    dtype: str
    count: int
    size: int


def weight_rows(module: torch.nn.Module, depth: int = 1) -> tuple[WeightRow, ...]:
    """Parameters and buffers by the first `depth` parts of their name and by dtype; a shared tensor counts once."""
    rows: dict[tuple[str, str], list[int]] = {}
    seen: set[int] = set()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        key = ".".join(name.split(".")[:-1][:depth]) or name, dtype_name(tensor.dtype)
        row = rows.setdefault(key, [0, 0])
        row[0] += tensor.numel()
        row[1] += tensor.numel() * tensor.element_size()
    return tuple(WeightRow(*key, *row) for key, row in rows.items())


def total_bytes(rows: tuple[WeightRow, ...]) -> int:
    return sum(row.size for row in rows)
