"""Learning rate over optimizer steps."""

from __future__ import annotations

import math


def warmup_cosine(step: int, warmup: int, horizon: int) -> float:
    """Factor on the peak rate for optimizer step `step` (0-based): linear up over `warmup` steps, then a cosine to 0.

    SGDR without restarts (Loshchilov & Hutter 2017, arXiv:1608.03983). Past the horizon it stays 0.
    """
    if step >= horizon:
        return 0.0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(horizon - warmup, 1)))
