"""How fast a run computes: FLOP/s, their share of what the device can do (MFU), and the time that it waits for data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Speed", "count_flops", "peak_flops"]

# Dense TFLOP/s from the makers' data sheets, by a part of the name that torch gives: bfloat16 or float16 with sums in
# float32, and TF32, in which torch lets convolutions in float32 compute
_PEAK = {
    "H200": (989, 494),
    "H100 PCIe": (756, 378),
    "H100": (989, 494),
    "A100": (312, 156),
    "L40S": (362, 183),
    "L4": (121, 60),
    "RTX 4090": (165, 82),
    "RTX 3090": (71, 35),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device can reach in this dtype; None where that is not known, as of any CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = next((peaks for part, peaks in _PEAK.items() if part in name), None)
    if peaks is None or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    return 1e12 * peaks[dtype == torch.float32]


def count_flops(run: Callable[[], Any]) -> tuple[Any, int]:
    """(what `run` gives, the floating-point operations of its matrix products, convolutions and attention).

    By the formulas of torch.utils.flop_counter. Its own FlopCounterMode takes operations apart first, which moves the
    last bits of a step; here each runs as it would without being counted.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, operation, types, given=(), options=None):
            out = operation(*given, **(options or {}))
            flops_of = flop_registry.get(operation._overloadpacket)
            if flops_of is not None:
                self.total += flops_of(*given, **(options or {}), out_val=out)
            return out

    with Counter() as counter:
        return run(), counter.total


class Speed:
    """Adds up a session's steps. The first one is left out: it has the set-up in it.

    peak: of the device (`peak_flops`).
    """

    def __init__(self, peak: float | None):
        self.peak = peak
        self.steps, self.seconds, self.waited, self.flops = -1, 0.0, 0.0, 0.0
        self.last: dict[str, float] = {}

    def add(self, seconds: float, waited: float, flops: float) -> None:
        """A step that took `seconds`, of which `waited` for its data; flops: of this process, 0 where not counted."""
        self.steps += 1
        self.last = self._numbers(seconds, waited, flops)
        if self.steps:
            self.seconds, self.waited, self.flops = self.seconds + seconds, self.waited + waited, self.flops + flops

    def summary(self) -> dict[str, float]:
        """Means over the steps, for the report; {} after a session of one step."""
        if self.steps < 1:
            return {}
        return self._numbers(self.seconds / self.steps, self.waited / self.steps, self.flops / self.steps)

    def _numbers(self, seconds: float, waited: float, flops: float) -> dict[str, float]:
        numbers = {"step_seconds": seconds, "data_seconds": waited}
        if flops:
            numbers["flops_per_second"] = flops / max(seconds, 1e-9)
            if self.peak:
                numbers["mfu"] = numbers["flops_per_second"] / self.peak
        return numbers
