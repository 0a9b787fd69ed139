"""Settings of torch that belong to the whole process: as a run needs them, and afterwards as they were."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["run_settings", "tf32_allowed"]

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # without it torch refuses cuBLAS in deterministic mode


@contextmanager
def run_settings(deterministic: bool) -> Iterator[None]:
    """Within the block FP32 matrices are multiplied in FP32, whatever another node pack has allowed; with
    `deterministic` sums on a GPU come out alike each time, and an operation that cannot is refused by torch."""
    matrices = _matrices()
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    try:
        _set_matrices("highest" if isinstance(matrices, str) else ("ieee",) * len(matrices))
        if deterministic:
            os.environ.setdefault(_WORKSPACE, ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        yield
    finally:
        _set_matrices(matrices)
        if deterministic:
            torch.use_deterministic_algorithms(algorithms[0], warn_only=algorithms[1])
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
            if workspace is None:
                os.environ.pop(_WORKSPACE, None)


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Within the block an NVIDIA GPU may use TF32 for matrices and convolutions in FP32, if `allowed`; else nothing
    changes. Afterwards it is as it was."""
    if not allowed:
        yield
        return
    matrices, convolutions = _matrices(), _convolutions()
    try:
        _set_matrices("high" if isinstance(matrices, str) else ("tf32",) * len(matrices))
        if convolutions is not None:
            torch.backends.cudnn.allow_tf32 = True
        yield
    finally:
        _set_matrices(matrices)
        if convolutions is not None:
            torch.backends.cudnn.allow_tf32 = convolutions


def _convolutions() -> bool | None:
    """Whether they may use TF32; None where another program speaks to torch of each kind, which is left alone."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None


def _matrices() -> str | tuple[str, ...]:
    """How FP32 matrices are multiplied now: torch's one word, or one for each of `_backends` where another program has
    set them apart, of which torch (2.9 and later) then refuses to speak in one word."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return tuple(backend.fp32_precision for backend in _backends())


def _set_matrices(precision: str | tuple[str, ...]) -> None:
    if isinstance(precision, str):
        torch.set_float32_matmul_precision(precision)
        return
    for backend, each in zip(_backends(), precision, strict=True):
        backend.fp32_precision = each


def _backends() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
