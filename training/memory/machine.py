"""The device that an estimate is for, and what the container leaves of the main memory."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import BadInput

__all__ = ["GIB", "MOST_GIB", "Container", "Machine", "container", "overhead", "planned_machine", "this_machine"]

GIB = 2**30
MIB = 2**20
MOST_GIB = 2**20  # more is a slip of the keyboard
CONTEXT = 800 * MIB  # what CUDA, its libraries and kernels take of an empty GPU: 0.3 to 0.8 GiB are usual


@dataclass(frozen=True)
class Machine:
    """free, total: bytes. gpu: whether the kernels of CUDA run there. where: said in the report.

    context: bytes that the device's driver will take first; 0 where `free` was read after it had.
    seen: what a program that does not know of a container's limit takes for free, and cuts its work by; None: `free`.
    """

    free: int
    total: int
    gpu: bool
    where: str
    context: int = 0
    seen: int | None = None

    @property
    def believed(self) -> int:
        return self.free if self.seen is None else self.seen

    def with_more(self, size: int) -> Machine:
        """`size` more bytes free."""
        return replace(self, free=self.free + size, seen=None if self.seen is None else self.seen + size)

    def inside(self, limits: Container | None) -> Machine:
        """Main memory as far as the container leaves it."""
        if limits is None or limits.free >= self.free:
            return self
        where = f"{self.where}, of which this container may use {limits.limit / GIB:.3g} GiB"
        return replace(self, free=limits.free, total=min(self.total, limits.limit), where=where, seen=self.free)


def planned_machine(gib: float) -> Machine:
    """A GPU of `gib` GiB with nothing on it. BadInput for what is no amount of memory."""
    if not 0 < gib <= MOST_GIB:  # NaN is refused too
        got = f"{gib:g}" if abs(gib) < MOST_GIB**2 or gib != gib else "far more" if gib > 0 else "far less"
        raise BadInput(f"memory_gib: expected GiB above 0 and up to {MOST_GIB}, got {got}.")
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
    return Machine(free, total, False, "no CUDA device here, so this is the main memory").inside(container())


@dataclass(frozen=True)
class Container:
    """What the control groups of this process allow. limit, free: bytes, of the group that leaves least."""

    limit: int
    free: int


def container(groups: Path = Path("/proc/self/cgroup"), tree: Path = Path("/sys/fs/cgroup")) -> Container | None:
    """The memory limit that this process is under (Docker, Kubernetes, systemd, Slurm), None: none, or not Linux.

    Both kinds of control groups are read. Groups lie in each other, and a limit holds for all inside; seen from a
    container its own group is often the root of the tree, whatever `groups` calls it. Pages of files that nobody has
    looked at lately count as free: the kernel gives them up before it lets a process die.
    """
    try:
        lines = groups.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    limits = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, names = tree, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = tree / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        inner = root / path.strip("/")
        while inner.is_relative_to(root):
            limits.append(_limits(inner, *names))
            inner = inner.parent
    return min((each for each in limits if each), key=lambda each: each.free, default=None)


def _limits(group: Path, limit: str, used: str, idle: str) -> Container | None:
    try:
        most = (group / limit).read_text().strip()
        if most == "max" or int(most) >= 2**60:  # version 1 writes a number near 2**63 for none
            return None
        use = int((group / used).read_text())
        rows = dict(line.split(None, 1) for line in (group / "memory.stat").read_text().splitlines() if " " in line)
        return Container(int(most), max(0, int(most) - max(0, use - int(rows.get(idle, 0)))))
    except (OSError, ValueError):
        return None
