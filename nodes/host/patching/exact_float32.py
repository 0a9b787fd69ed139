"""FP32 that is FP32, whatever other node packs have allowed torch to round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["exact_float32"]


@contextmanager
def exact_float32() -> Iterator[None]:
    """Within the block, FP32 matrices are multiplied in FP32, not in TF32 or BF16, and so are convolutions on NVIDIA,
    which torch allows TF32 by default. The settings are the process's; afterwards they are what they were.
    """
    matrices, convolutions = torch.get_float32_matmul_precision(), _convolutions()
    torch.set_float32_matmul_precision("highest")
    _set_convolutions(False)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matrices)
        _set_convolutions(convolutions)


def _convolutions() -> bool | None:
    """May cuDNN use TF32? None where torch does not say: who has used its newer settings may not ask by this one."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _set_convolutions(allowed: bool | None) -> None:
    if allowed is not None and _convolutions() not in (None, allowed):
        torch.backends.cudnn.allow_tf32 = allowed
