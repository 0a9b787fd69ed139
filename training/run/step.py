"""One optimizer step: accumulate, clip, judge, update. The same for one process and for many."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.world import World
from ..errors import BadInput
from ..objectives.base import Objective
from ..objectives.trainables import trainables
from ..precision.guard import FirstBadLayer
from .watch.health import StepHealth
from .watch.nan_origin import find_origin, refuse_without_gradient
from .watch.speed import count_flops

__all__ = ["StepResult", "TrainStep", "local_share"]

Batch = dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    loss: float  # mean over the micro-batches of all ranks
    norm: float  # of the gradient, before it was clipped
    updated: bool  # False where the loss scaler skipped the step


def local_share(accumulation: int, world: World) -> int:
    """Micro-batches of a global step that fall to one rank; BadInput where the ranks do not divide them."""
    if accumulation % world.size:
        ranks = [str(n) for n in range(1, accumulation + 1) if accumulation % n == 0]
        raise BadInput(
            f"data.accumulation: expected a number of micro-batches that {world.size} ranks divide, such as "
            f"{world.size} or {2 * world.size}, got {accumulation}, which {_list(ranks)} would divide."
        )
    return accumulation // world.size


def _list(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


class TrainStep:
    """Takes a run's optimizer steps.

    `accumulation` micro-batches make a global step, whatever the number of ranks: rank r takes those numbered r,
    r + size, ... and the gradients are added up over all ranks, so that each has the mean over all micro-batches.
    Loss, norm and what is not finite come off the device in one fetch a step.
    """

    def __init__(
        self,
        objective: Objective,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        health: StepHealth,
        *,
        accumulation: int,
        clip_norm: float,
        histogram: Any = None,
        world: World | None = None,
        compiled: nn.Module | None = None,
        accumulating: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        """
        Args:
            compiled: what is called in the place of `net`, over the same weights. What is wrong with a step is looked
                for in `net`, for the compiler hides the layers.
            accumulating: gives what forward and backward passes are to run in.
        """
        self.called, self.accumulating = net if compiled is None else compiled, accumulating
        self.world = world or World()
        self.objective, self.net, self.parameters = objective, net, trainables(net)
        self.optimizer, self.scaler, self.health, self.histogram = optimizer, scaler, health, histogram
        self.accumulation, self.clip_norm = accumulation, clip_norm
        self.share = local_share(accumulation, self.world)
        self._looked_at = False  # whether each parameter has a gradient
        self.flops = 0.0  # of this rank in the last step; what is counted of the first micro-batch goes by latent cells
        self._flops_of_a_cell: float | None = None

    def __call__(
        self,
        number: int,
        batches: Iterator[Batch],
        learning_rate: float,
        *,
        while_computing: Callable[[], None] = lambda: None,
        before_update: Callable[[], None] = lambda: None,
        batches_again: Callable[[], Generator[Batch, None, None]] | None = None,
        which_checkpoint: Callable[[], str] = lambda: "no checkpoint had been kept yet",
    ) -> StepResult:
        """The step `number` (from 1).

        Args:
            batches: gives this rank's micro-batches, in their order.
            while_computing: called while the device is busy, before the one fetch.
            before_update: called before the weights change.
            batches_again: this step's micro-batches once more, for the origin of a number that is not finite.
            which_checkpoint: for the sentence of a run that ends here.

        Raises TrainingFailed as StepHealth says, on all ranks or none; the weights are then as they were before.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        losses, failure = self._accumulate(number, batches)
        reports = self._reduce(losses, failure)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip_norm)
        while_computing()
        # the one fetch
        *values, norm = torch.cat([reports, norm.detach().to(reports).reshape(1)]).tolist()
        loss = sum(values[: self.accumulation])
        bad = self._bad_rank(values, failure)
        before_update()
        updated = self.health.update(
            number, loss, norm, lambda scale: self._origin(scale, batches_again), which_checkpoint, bad
        )
        self.optimizer.zero_grad()
        return StepResult(loss, norm, updated)

    # ---- the parts of it --------------------------------------------------------------------------------------------

    def _accumulate(self, number: int, batches: Iterator[Batch]) -> tuple[list[Tensor], Exception | None]:
        """(this rank's part of the loss, by micro-batch; what it failed with). Alone it fails at once."""
        losses: list[Tensor] = []
        self.flops = 0.0
        try:
            for _ in range(self.share):
                batch = next(batches)
                with self.accumulating():
                    losses.append(self._counted(batch))
            if not self._looked_at:
                refuse_without_gradient(self.net, self.parameters, number)
                self._looked_at = True
        except Exception as error:
            if self.world.size == 1:
                raise
            return losses, error  # the others wait for this rank's gradients: they must learn of it there
        return losses, None

    def _counted(self, batch: Batch) -> Tensor:
        def backward() -> Tensor:
            return self._backward(self.called, batch, self.scaler.scale, self.histogram)

        if self.called is not self.net:  # what is compiled cannot be counted without being taken apart
            return backward()
        cells = batch["z"].numel()
        if self._flops_of_a_cell is None:
            loss, flops = count_flops(backward)
            self._flops_of_a_cell = flops / cells
        else:
            loss = backward()
        self.flops += self._flops_of_a_cell * cells
        return loss

    def _backward(
        self, net: nn.Module, batch: Batch, scale: Callable[[Tensor], Tensor], histogram: Any = None
    ) -> Tensor:
        weighted, loss = self.objective.loss(net, batch, histogram)
        scale(weighted / self.accumulation).backward()
        return loss / self.accumulation

    def _reduce(self, losses: list[Tensor], failure: Exception | None) -> Tensor:
        """Add up the gradients over all ranks; returns what each has to report, on the device.

        [loss of each micro-batch of the global step, ..., and with several ranks for each: not finite, failed]
        """
        world = self.world
        if world.size == 1:
            return torch.stack(losses)
        gradients = [self._gradient(parameter) for parameter in self.parameters.values()]
        # before they are mixed: afterwards it could be anyone's
        finite = torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
        wide = torch.promote_types(losses[0].dtype if losses else torch.float32, torch.float32)
        reports = torch.zeros(self.accumulation + 2 * world.size, dtype=wide, device=world.device)
        mine = self.accumulation + world.rank
        if losses:
            reports[world.rank : len(losses) * world.size : world.size] = torch.stack(losses).to(reports)
        reports[mine] = (~finite).to(reports)
        reports[mine + world.size] = failure is not None
        world.sum_all(gradients)
        return world.sum(reports)

    @staticmethod
    def _gradient(parameter: nn.Parameter) -> Tensor:
        """Zeros where this rank came to none: all ranks add up the same list."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _bad_rank(self, values: list[float], failure: Exception | None) -> int | None:
        """The first rank whose numbers are not finite; where a rank has failed, all of them end."""
        size = self.world.size
        if size == 1:
            return None
        losses, rest = values[: self.accumulation], values[self.accumulation :]
        not_finite, failed = rest[:size], rest[size:]
        if any(failed):
            self.optimizer.zero_grad()
            self.world.fail(failed.index(1.0), failure)
        bad = [k % size for k, loss in enumerate(losses) if not abs(loss) < float("inf")]
        return min([*bad, *(rank for rank in range(size) if not_finite[rank])], default=None)

    def _origin(self, scale: float, batches_again: Callable[[], Generator[Batch, None, None]] | None) -> str:
        """What went wrong first on this rank, by taking the step once more."""
        if batches_again is None:
            return ""
        return find_origin(self.net, lambda: self._replay(scale, batches_again()), FirstBadLayer)

    def _replay(self, scale: float, batches: Generator[Batch, None, None]) -> None:
        with closing(batches):
            for _ in range(self.share):
                self._backward(self.net, next(batches), lambda loss: loss * scale)
