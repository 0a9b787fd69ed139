"""The device that an estimate is for."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import BadInput

__all__ = ["GIB", "Machine", "planned_machine", "this_machine"]

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """free, total: bytes. gpu: whether the kernels of CUDA run there. where: said in the report."""

    free: int
    total: int
    gpu: bool
    where: str


def planned_machine(gib: float) -> Machine:
    """A GPU of `gib` GiB with nothing on it."""
    size = int(gib * GIB)
    return Machine(size, size, True, f"an empty GPU of {gib:g} GiB, as asked")


def this_machine() -> Machine:
    """The GPU of this process, or the main memory where there is none. BadInput where neither can be read."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return Machine(free, total, True, torch.cuda.get_device_name())
    try:
        import psutil  # ComfyUI brings it; the core does not need it

        memory = psutil.virtual_memory()
        free, total = memory.available, memory.total
    except ImportError:
        try:
            page = os.sysconf("SC_PAGE_SIZE")
            free, total = (page * os.sysconf(name) for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        except (AttributeError, ValueError, OSError) as error:
            raise BadInput("memory: this machine does not say how much it has; give it in GiB.") from error
    return Machine(free, total, False, "no CUDA device here, so this is the main memory")
