"""The processes of one run as the loop sees them: `World` for one, which asks nobody, and `GroupWorld` for many.

A rank is one process; all of them call the same methods in the same order. Words: "rank", "size" and "device" as in
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingFailed

__all__ = ["GroupWorld", "World"]

BUCKET = 2**24  # elements that are summed in one message: as many are copied, too


class World:
    """One process: every sum is what it was given. device: where tensors that are summed lie."""

    rank, size = 0, 1

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)

    # ---- what many processes do otherwise ---------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all ranks, in place; the same on each of them, to the bit."""
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Over all ranks, in place."""
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """In place what the rank `source` has."""
        return tensor

    def barrier(self) -> None:
        """Return when all ranks have come here."""

    # ---- what follows from it ---------------------------------------------------------------------------------------

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """Each of them over all ranks, in place, a few at once. bfloat16 and float16 are added up in float32."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = self.sum(torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket]))
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def any(self, flag: bool) -> bool:
        """Whether it is so on at least one rank."""
        return flag if self.size == 1 else bool(self.max(torch.tensor(int(flag), device=self.device)))

    def tell(self, text: str, source: int = 0) -> str:
        """The text of the rank `source`, on all of them."""
        if self.size == 1:
            return text
        said = text.encode()
        length = self.broadcast(torch.tensor(len(said), device=self.device), source)
        letters = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            letters.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else letters)
        return bytes(self.broadcast(letters, source).tolist()).decode(errors="replace")

    def agree(self, stop: bool, failure: Exception | None = None) -> bool:
        """Whether any rank is to stop; where none is and one has failed, all of them raise (`fail`)."""
        if self.size == 1:
            if failure is not None and not stop:
                raise failure
            return stop
        # the first rank that failed has the largest number
        flags = torch.tensor([int(stop), self.size - self.rank if failure else 0], device=self.device)
        stops, failed = self.max(flags).tolist()
        if failed and not stops:
            self.fail(self.size - failed, failure)
        return bool(stops)

    def fail(self, rank: int, failure: Exception | None) -> None:
        """All ranks end: the one that failed with its own exception, the others with a sentence that names it."""
        said = self.tell(str(failure) or type(failure).__name__, rank)
        if failure is not None:
            raise failure
        raise TrainingFailed(f"Rank {rank} of {self.size} failed: {said}")


class GroupWorld(World):
    """The processes of a torch.distributed process group, of any backend; None = the default one, which must be there.

    device: of this rank, on which its backend can add up: the CPU for gloo, a GPU for NCCL.
    """

    def __init__(self, device: torch.device | str = "cpu", group: Any = None):
        import torch.distributed as dist

        super().__init__(device)
        self._dist, self._group = dist, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Tensor:
        self._dist.all_reduce(tensor, self._dist.ReduceOp.SUM, group=self._group)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        self._dist.all_reduce(tensor, self._dist.ReduceOp.MAX, group=self._group)
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        self._dist.broadcast(tensor, group=self._group, group_src=source)
        return tensor

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one dtype together, up to BUCKET elements or a larger one alone; in an order that all ranks share."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(tensor.dtype, []).append(tensor)
    for those in alike.values():
        bucket: list[Tensor] = []
        for tensor in those:
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
