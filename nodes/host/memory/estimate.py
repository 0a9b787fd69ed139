"""Attention Memory and Training Memory inside the host: its device, its attention function, its MODEL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.ldm.modules.attention as host_attention
import comfy.model_management
import numpy as np
import torch

from ....training.errors import BadInput
from ....training.memory.chart import attention_chart, columns_chart
from ....training.memory.estimate import CUSTOM, GIB, SIZES, AttentionEstimate, estimate_attention
from ....training.memory.machine import Machine, container, planned_machine
from ....training.memory.models import PRESETS
from ....training.memory.training_estimate import TrainingEstimate, TrainingQuestion, estimate_training
from ..model.selected import foreign_attention
from ..model.shapes import compute_dtype, read_model_shape

__all__ = [
    "CUSTOM",
    "attention_memory",
    "chart_image",
    "columns_image",
    "host_backend",
    "host_machine",
    "memory_fingerprint",
    "training_memory",
]

_BACKENDS = {
    "attention_basic": "basic",
    "attention_split": "split",
    "attention_sub_quad": "sub-quadratic",
    "attention_pytorch": "pytorch",
    "attention_flash": "flash",
    "attention_xformers": "xformers",
    "attention_sage": "sage",
}


def host_backend(model: Any = None) -> str:
    """The backend that this host computes attention with. BadInput where it is one that we do not know."""
    if model is not None and foreign_attention(model) is not None:
        raise BadInput("backend: another node has replaced this model's attention; choose the backend that it uses.")
    name = getattr(host_attention.optimized_attention, "__name__", str(host_attention.optimized_attention))
    if name not in _BACKENDS:
        raise BadInput(f"backend: this host computes attention with {name}, for which there is no formula; choose one.")
    return _BACKENDS[name]


def host_machine(model: Any = None) -> Machine:
    """The host's device. What it holds of models counts as free: the host makes room for the one that runs.

    On the CPU weights lie in main memory either way; only those of the connected MODEL are added again.
    """
    management = comfy.model_management
    device = model.load_device if model is not None else management.get_torch_device()
    on_cpu = device.type == "cpu"
    free = management.get_free_memory(device)
    if not on_cpu:
        held = (each for each in management.current_loaded_models if each.device == device)
        free += sum(each.model_loaded_memory() for each in held)
    elif model is not None:
        free += model.model_size()
    total = management.get_total_memory(device)
    if not on_cpu:
        return Machine(int(free), int(total), True, management.get_torch_device_name(device))
    where = "no GPU: ComfyUI runs on the CPU here, so this is the main memory"
    limits = container()
    if limits is not None and model is not None:  # as above
        limits = replace(limits, free=limits.free + int(model.model_size()))
    return Machine(int(free), int(total), False, where).inside(limits)


def memory_fingerprint(memory_gib: float | None) -> str:
    """The host's cache may answer until the free memory has moved by a quarter GiB; never, where it does not matter."""
    if memory_gib:
        return "planned"
    free = comfy.model_management.get_free_memory()
    if comfy.model_management.get_torch_device().type == "cpu" and (limits := container()) is not None:
        free = min(free, limits.free)
    return str(free // (GIB // 4))


def attention_memory(
    preset: str,
    size: str,
    width: int,
    height: int,
    batch_size: int,
    frames: int,
    dtype: str,
    backend: str,
    cfg: bool,
    text_tokens: int,
    memory_gib: float,
    model: Any = None,
) -> AttentionEstimate:
    """The inputs of the node -> its answer. A connected MODEL wins over the preset, a named size over width, height."""
    shape = PRESETS[preset] if model is None else read_model_shape(model)
    if size != CUSTOM:
        width, height = SIZES[size]
    if dtype == "auto":
        dtype = "bf16" if model is None else compute_dtype(model)
    return estimate_attention(
        shape,
        width,
        height,
        planned_machine(memory_gib) if memory_gib else host_machine(model),
        batch=batch_size,
        frames=frames,
        dtype=dtype,
        cfg=cfg,
        text=text_tokens,
        backend=backend,
        auto=host_backend(model) if backend == "auto" else "",
        weights=None if model is None else model.model_size(),
        half_math=torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
    )


def training_memory(size: str, width: int, height: int, memory_gib: float, **inputs: Any) -> TrainingEstimate:
    """The inputs of the node Training Memory -> its answer; `inputs` are fields of TrainingQuestion."""
    if size != CUSTOM:
        width, height = SIZES[size]
    machine = planned_machine(memory_gib) if memory_gib else host_machine()
    return estimate_training(TrainingQuestion(width=width, height=height, **inputs), machine)


def chart_image(estimate: AttentionEstimate) -> torch.Tensor:
    """The chart as IMAGE [1, 720, 1280, 3], float32 in [0, 1]."""
    return _as_image(attention_chart(estimate))


def columns_image(estimate: Any) -> torch.Tensor:
    """The chart of a Model Memory or Training Memory, likewise."""
    verdict = estimate.verdict.split(" (")[0]
    return _as_image(columns_chart(f"{estimate.title}:\n{verdict}", estimate.columns(), estimate.machine.free))


def _as_image(picture: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).float()[None] / 255
