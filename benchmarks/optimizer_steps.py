"""One real step of each optimizer of training/memory/optimizers.py, to be measured against its estimate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from training.memory.meter import StorageMeter
from training.memory.optimizers import OPTIMIZERS
from training.run.optim.bf16_adamw import BF16AdamW

__all__ = ["measure_step"]


class _InWholeChunks(BF16AdamW):
    """Takes its chunks as it does on a GPU, on whatever device it runs."""

    def _in_cache(self, device: torch.device) -> bool:
        return False


def _build(name: str, parameters: list[torch.nn.Parameter], gpu: bool) -> torch.optim.Optimizer:
    wanted = OPTIMIZERS[name]
    if wanted.rounding is None:
        fused = name == "AdamW"
        return torch.optim.AdamW(parameters, fused=fused, foreach=not fused)
    names = {parameter: str(index) for index, parameter in enumerate(parameters)}
    kind = _InWholeChunks if gpu else BF16AdamW
    return kind([{"params": parameters}], names, lr=1e-3, rounding=wanted.rounding, moments=wanted.moments)


def measure_step(
    name: str, counts: list[int], *, gpu: bool, moved: Callable[[list[torch.nn.Parameter]], None] = lambda _: None
) -> tuple[int, int]:
    """(bytes of the state, bytes at the peak of a step beside weights, gradients and state), without step counters.

    counts: elements of each parameter; gpu: with the chunks of a GPU; moved: shown the parameters before and after.
    """
    dtype = torch.float32 if OPTIMIZERS[name].parameters == 4 else torch.bfloat16
    parameters = [torch.nn.Parameter(torch.randn(count, dtype=dtype)) for count in counts]
    optimizer = _build(name, parameters, gpu)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()  # makes the state
    state = [tensor for each in optimizer.state.values() for key, tensor in each.items() if key != "step"]
    counters = [each["step"] for each in optimizer.state.values()]
    meter = StorageMeter(*parameters, *(parameter.grad for parameter in parameters), *state, *counters)
    held = meter.live
    moved(parameters)
    with meter:
        optimizer.step()
    moved(parameters)
    return sum(tensor.nbytes for tensor in state), meter.peak - held
