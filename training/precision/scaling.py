"""When a loss scaler is needed, and when it must not be there."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["needs_scaler"]


def needs_scaler(compute: torch.dtype, trainables: Iterable[torch.dtype]) -> bool:
    """Whether the loss has to be scaled: only for FP16 compute over parameters that are all FP32.

    Gradients below 6e-8 are 0 in FP16; in BF16 and FP32 they are not, so there is nothing to save. Decided from the
    dtypes and not by a trial: unscaling BF16 gradients fails on CUDA and passes on a CPU, and FP16 gradients (those of
    FP16 parameters) cannot be unscaled at all.
    """
    return compute == torch.float16 and set(trainables) == {torch.float32}
