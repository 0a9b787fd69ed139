"""What a checkpoint says beside its tensors, and what is compared with it when the run is taken up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ...errors import BadInput
from ...objectives.trainables import fill
from ..report.journal import Journal
from ..state import EXACT, ROUNDED, State
from .checkpoint import Checkpoint, optimizer_tensors, restore_optimizer

if TYPE_CHECKING:
    from ...config.train_config import TrainConfig
    from ..optim.ema import EMA
    from ..plan import Plan
    from ..step import TrainStep


def loop_state(
    *, epoch: int, micro_step: int, learning_rate: float, seed: int, journal: Journal, device: torch.device
) -> dict[str, Any]:
    """Where the run stands, as plain JSON.

    Two things that other trainers keep are functions here, so there is nothing to lose: the learning rate (of the
    step) and every random choice (of the seed and the absolute step). What they give next is written down all the same,
    and compared on resume. No state of torch's own generators is kept, for nothing in a run draws from them; a test
    moves them between the parts of a run.

    Args:
        epoch: epochs that are complete.
        micro_step: absolute index of the next batch.
        learning_rate: of the next step.
    """
    return {
        "epoch": epoch,
        "sampler": {"micro_step": micro_step},
        "schedule": {"learning_rate": learning_rate},
        "random": {"seed": seed, "generators": "none: functions of the seed and the absolute step"},
        "journal": journal.position(),
        "made_with": _made_with(device),
    }


def checkpoint_of(
    state: State, step: TrainStep, ema: EMA, journal: Journal, *, run: dict[str, Any], epoch: int, seed: int,
    micro_step: int, learning_rate: float,
) -> Checkpoint:
    """The whole run as it stands. run: its identity; the rest: as in `loop_state`."""
    names = {parameter: name for name, parameter in step.parameters.items()}
    device = step.world.device
    told = {
        "run": run, "seconds": state.seconds, "scaler": step.scaler.state_dict(), "health": step.health.state(),
        "times": step.histogram.state(), "measures": state.measured_as, "average": state.average_of,
        **loop_state(
            epoch=epoch, micro_step=micro_step, learning_rate=learning_rate, seed=seed, journal=journal, device=device
        ),
    }
    # the tensors of this moment: while they are written, a validation may have others in the parameters' place
    weights = {name: parameter.detach() for name, parameter in step.parameters.items()}
    return Checkpoint(state.step, weights, ema.state_dict(), optimizer_tensors(step.optimizer, names), told)


def restore(found: Checkpoint, step: TrainStep, ema: EMA) -> State:
    """Take the run up from a checkpoint: its tensors go into network, average and optimizer."""
    fill(step.parameters, found.weights)
    ema.load_state_dict(found.ema)
    restore_optimizer(step.optimizer, step.parameters, found.optimizer)
    told = found.state
    step.scaler.load_state_dict(told["scaler"])
    step.health.restore(told.get("health", {}))
    step.histogram.restore(told.get("times", {}))
    return State(
        step=found.step, seconds=told["seconds"], average_of=told.get("average", ROUNDED),
        measured_as=told.get("measures", 1), began_at=found.step, seconds_before=told["seconds"],
    )


def refuse_other_position(
    state: dict[str, Any], run: dict[str, Any], *, micro_step: int, learning_rate: float
) -> None:
    """BadInput where this program would not go on as the checkpoint says; only another version of it could.

    run: the one that goes on. Where it was made longer from the checkpoint's, its learning rate is another one.
    """
    if state["run"] != run:
        learning_rate = state["schedule"]["learning_rate"]
    for name, kept, now in (
        ("batch", state["sampler"]["micro_step"], micro_step),
        ("learning rate", state["schedule"]["learning_rate"], learning_rate),
    ):
        # the cosine of another libm differs in its last place
        if not math.isclose(kept, now, rel_tol=1e-9):
            raise BadInput(
                f"The checkpoint of step {state['step']} goes on with {name} {kept!r}, and this version of the program "
                f"with {now!r}: go on with the version that began the run, or start over."
            )


def average_sentence(average_of: str, config: TrainConfig) -> str:
    """What a person should know of the averaged weights of a run begun before they were made of exact ones, or ""."""
    rounding = config.optimizer.chosen_rounding
    if average_of == EXACT or config.precision != "pure_bf16" or rounding == "stochastic":
        return ""  # there the optimizer has no more than the rounded weight
    return (
        f"This run was begun by an earlier version: its averaged weights go on being made of weights rounded to "
        f"bfloat16, so that it ends as it would have; a new run averages what {rounding} keeps."
    )


def resumed_sentences(state: dict[str, Any], plan: Plan, config: TrainConfig, journal: Journal) -> list[str]:
    """What a person should know about a run that was taken up."""
    now, same = _made_with(plan.compute.device), "the result equals an uninterrupted run's."
    if plan.compute.device.type != "cpu" and not config.deterministic:
        same = "its last bits may differ from an uninterrupted run's, since sums on this device do (deterministic)."
    other = [f"{name} {kept} -> {now[name]}" for name, kept in state["made_with"].items() if now.get(name) != kept]
    exact = (
        f"under other conditions ({', '.join(other)}), so its last bits may differ from an uninterrupted run's."
        if other
        else same
    )
    sentences = [f"Resumed at step {state['step']} of {plan.total_steps}; {exact}"]
    missing = state["journal"]["lines"] - journal.position()["lines"]
    if missing > 0:
        sentences.append(
            f"{journal.path.name} lacks {missing} of the {state['journal']['lines']} lines up to this step: the "
            "curves of this run will have a gap."
        )
    return sentences


def _made_with(device: torch.device) -> dict[str, Any]:
    """What decides the last bits of a sum."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"torch": torch.__version__, "device": name, "threads": torch.get_num_threads()}
