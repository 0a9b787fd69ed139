"""The device that an estimate is for."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import BadInput

__all__ = ["GIB", "Machine", "overhead", "planned_machine", "this_machine"]

GIB = 2**30
MIB = 2**20
CONTEXT = 800 * MIB  # what CUDA, its libraries and kernels take of an empty GPU: 0.3 to 0.8 GiB are usual


@dataclass(frozen=True)
class Machine:
    """free, total: bytes. gpu: whether the kernels of CUDA run there. where: said in the report.

    context: bytes that the device's driver will take first; 0 where `free` was read after it had.
    """

    free: int
    total: int
    gpu: bool
    where: str
    context: int = 0


def planned_machine(gib: float) -> Machine:
    """A GPU of `gib` GiB with nothing on it."""
    size = int(gib * GIB)
    return Machine(size, size, True, f"an empty GPU of {gib:g} GiB, as asked", CONTEXT)


def overhead(machine: Machine, working: int) -> dict[str, int]:
    """What is needed beside `working` bytes of tensors: label -> bytes. Assumed, not computed.

    On a GPU the caching allocator rounds (512 bytes, blocks of 2 MiB) and fragments, and cuBLAS and cuDNN keep
    workspaces: 10 % and 64 MiB; not measured. In main memory: pages of code, oneDNN's scratch and the C allocator's
    holes, 5 % and 256 MiB; measured in benchmarks/memory_estimate.py.
    """
    if machine.gpu:
        return {"allocator, workspaces": working // 10 + 64 * MIB, "device context": machine.context}
    return {"allocator, workspaces": working // 20 + 256 * MIB}


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
