"""Settings of torch that belong to the whole process: as a run needs them, and afterwards as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["run_settings"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it torch refuses cuBLAS in deterministic mode


@contextmanager
def run_settings(deterministic: bool) -> Iterator[None]:
    """Within the block FP32 matrices are multiplied in FP32, whatever another node pack has allowed; with
    `deterministic` sums on a GPU come out alike each time, and an operation that cannot is refused by torch."""
    matrices = torch.get_float32_matmul_precision()
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    try:
        torch.set_float32_matmul_precision("highest")
        if deterministic:
            os.environ.setdefault(_WORKSPACE, ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        yield
    finally:
        torch.set_float32_matmul_precision(matrices)
        if deterministic:
            torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
            if workspace is None:
                os.environ.pop(_WORKSPACE, None)
