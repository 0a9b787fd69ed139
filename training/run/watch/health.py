"""Each step judged before the optimizer takes it: what is not finite never reaches the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...distributed.world import World
from ...errors import TrainingFailed
from .scaler_health import ScalerHealth

if TYPE_CHECKING:
    import torch

    from ...config.sections import HealthConfig

__all__ = ["StepHealth"]


class StepHealth:
    """Takes a run's optimizer steps, or leaves them out, or ends the run.

    A loss or a gradient that is not finite ends it at once, except under a loss scaler, which is there to try smaller
    scales: then after `health.skips` in a row, or when the scale falls below `health.scale_floor`. Weights that are not
    finite end it at once in every case.
    """

    def __init__(
        self,
        settings: HealthConfig,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        net: torch.nn.Module | None = None,
        world: World | None = None,
    ):
        """net: whose weights are looked at after a loss that is not finite, frozen ones too; None = those trained."""
        self.world = world or World()
        self.optimizer, self.scaler, self.net = optimizer, scaler, net
        self.scale_health = ScalerHealth(settings.skips, settings.scale_floor)

    def update(
        self,
        step: int,
        loss: float,
        norm: float,
        cause: Callable[[float], str],
        which_checkpoint: Callable[[], str],
        bad_rank: int | None = None,
    ) -> bool:
        """The optimizer's step number `step` (from 1), after unscaling and clipping; False where it was skipped.

        loss, norm: of this step, the same on all ranks. bad_rank: the first whose numbers are not finite; None of one
        process. Asked only when the run ends, and then on all ranks: cause(loss scale), what went wrong first, or "",
        of which all tell what `bad_rank` says, and which_checkpoint, of which all tell what the first says. Raises
        TrainingFailed; the weights are then as they were before the step.
        """
        finite, scale = math.isfinite(loss) and math.isfinite(norm), self.scaler.get_scale()
        if finite:  # never left to the scaler: with its scale at 0 it lets NaN through
            self.scaler.step(self.optimizer)
        complaint = ""
        # an infinite loss of one batch passes like an infinite gradient; weights that are not finite never mend
        scaled = self.scaler.is_enabled() and (math.isfinite(loss) or self._weights_are_finite())
        if scaled:
            self.scaler.update()
            complaint = self.scale_health.record(step, finite, self.scaler.get_scale())
        if finite or (scaled and not complaint):
            return finite
        text = f"Step {step}: expected a finite loss and gradient, got loss {loss:g}, gradient norm {norm:g}"
        if bad_rank is not None:
            text += f", first on rank {bad_rank}"
        if complaint:
            text += f" ({complaint}; the last scales were {self.scale_health.tail()})"
        first = self.world.tell(self._ask(cause, scale), bad_rank or 0)
        text += f". First not finite: {first}" if first else ""
        raise TrainingFailed(f"{text}. The weights are as they were before; {self.world.tell(which_checkpoint())}.")

    @staticmethod
    def _ask(cause: Callable[[float], str], scale: float) -> str:
        try:
            return cause(scale)
        except RuntimeError:  # out of memory, say: what is known already must still be told
            return ""

    def _weights_are_finite(self) -> bool:
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        parameters = trained if self.net is None else self.net.parameters()
        return not self.world.any(not all(bool(parameter.detach().isfinite().all()) for parameter in parameters))

    def refuse_if_nothing_was_learnt(self, steps: int) -> None:
        """TrainingFailed at the end of a run of which every step was skipped: it would be called done."""
        if self.scale_health.skipped >= steps:
            raise TrainingFailed(
                f"All {steps} steps were skipped, for none had a finite loss and gradient in float16 (the last loss "
                f"scales were {self.scale_health.tail()}): nothing was learnt; train in bf16 or fp32."
            )

    def journalled(self) -> dict[str, float]:
        """What the journal notes of a step beside its loss."""
        history = self.scale_health.history
        return {"loss_scale": history[-1][1]} if self.scaler.is_enabled() and history else {}

    def state(self) -> dict[str, Any]:
        return self.scale_health.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.scale_health.restore(state)
