"""From a configuration and a dataset to every number of the run, each choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..config.choices import Precision
from ..config.train_config import TrainConfig
from ..data.shards import RefinerDataset
from ..errors import BadInput
from ..objectives.base import Compute, ObjectivePlan
from ..objectives.choose import plan_objective
from ..precision.advice import automatic_precision, training_advice
from ..precision.speed import channels_last_sentence, compile_sentence, tf32_sentence
from .cadence import ValidationCadence, validation_cadence
from .optim.schedule import Schedule, schedule_of

LARGE_FOR_A_CPU = 20_000_000  # parameters; pixel-small, which is meant for CPUs too, has one million
LONG = 3600  # seconds of a run from which on a CPU's pace is remarked on

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "pure_bf16": None}


@dataclass(frozen=True)
class Plan:
    objective: ObjectivePlan  # the numbers of what is trained for
    compute: Compute
    micro_per_epoch: int
    total_steps: int
    epochs: float  # of the whole run; with max_steps it may end within one
    schedule: Schedule  # of the learning rate
    validation: ValidationCadence
    precision: Precision  # what "auto" came to
    choices: list[str] = field(default_factory=list)  # what was chosen and why, for people

    def epoch_of(self, step: int, accumulation: int) -> int:
        """How many epochs are complete after `step` optimizer steps."""
        return step * accumulation // self.micro_per_epoch


def make_plan(config: TrainConfig, data: RefinerDataset, micro_per_epoch: int) -> Plan:
    """Every number of the run; BadInput where configuration and dataset do not fit together."""
    choices: list[str] = []
    objective = plan_objective(config, data, choices)
    size = objective.size
    device = choose_device(config, choices)
    if config.precision == "auto":
        precision, why = automatic_precision(device)
        config = config.model_copy(update={"precision": precision})
        choices.append(f"precision {precision}: {why}")
    else:
        precision = config.precision
    choices.append(_precision_sentence(config))
    autocast = AUTOCAST[config.precision]
    weights = torch.bfloat16 if config.precision == "pure_bf16" else torch.float32
    choices += _speed_sentences(config, device, autocast or weights)
    adapters = objective.adapters
    choices.append(training_advice(device, size.parameters, adapters.parameters if adapters else 0))
    if config.gradient_checkpointing:
        choices.append("gradient checkpointing, non-reentrant: less memory, each forward pass computed twice")
    choices += _crop_remark(config.data.crop, data)
    if device.type == "cpu" and size.parameters > LARGE_FOR_A_CPU:
        choices.append(
            f"a network of {size.parameters / 1e6:,.0f} million parameters is made for a GPU; on a CPU every step "
            "takes long, and how long is said after the first one"
        )
    drawn, there = micro_per_epoch * config.data.batch_size, len(data.train) * config.data.repeats
    if drawn >= 2 * there:
        choices.append(
            f"batch_size {config.data.batch_size} is large for this dataset: its batches are filled up with repeats, "
            f"so an epoch draws {drawn} samples where {there} would do; a smaller batch makes more steps of the same "
            "work"
        )
    total_steps = config.total_steps(micro_per_epoch)
    epochs: float = config.epochs
    if config.max_steps is not None:
        epochs = round(total_steps * config.data.accumulation / micro_per_epoch, 2)
        choices.append(f"max_steps {total_steps:,} in the place of epochs: {epochs:,g} of them")
    if any(length >= total_steps for length in config.optimizer.extended_from):
        raise BadInput(
            f"optimizer.extended_from: expected lengths below the {total_steps} steps of the run, got "
            f"{list(config.optimizer.extended_from)}."
        )
    schedule = schedule_of(config.optimizer, total_steps)
    choices += schedule.sentences(total_steps)
    choices += _warmup_remark(config, total_steps, schedule)
    validation = validation_cadence(
        config, data, micro_per_epoch=micro_per_epoch, total=total_steps, walk=len(objective.sigmas) - 1
    )
    choices += [validation.why] if validation.why else []
    return Plan(
        objective=objective,
        compute=Compute(device, autocast, weights),
        micro_per_epoch=micro_per_epoch,
        total_steps=total_steps,
        epochs=epochs,
        schedule=schedule,
        validation=validation,
        precision=precision,
        choices=choices,
    )


def _crop_remark(crop: int | None, data: RefinerDataset) -> list[str]:
    """What becomes of pairs that are smaller than the crop."""
    sizes = [(data.pairs[index].height, data.pairs[index].width) for index in data.train]
    if crop is None or not any(min(size) < crop for size in sizes):
        return []
    whole = sum(max(size) <= crop for size in sizes)
    if whole == len(sizes):
        height, width = max(sizes, key=lambda size: size[0] * size[1])
        return [f"crop {crop} is larger than every picture (the largest has {height} x {width} cells): they are whole"]
    short = sum(min(size) < crop for size in sizes)
    return [f"crop {crop}: {short} of {len(sizes)} pairs are shorter on a side, and whole there"]


def _warmup_remark(config: TrainConfig, total: int, schedule: Schedule) -> list[str]:
    """What becomes of the learning rate where the run ends before its warm-up does."""
    warmup, constant = config.optimizer.warmup_steps, schedule.kind == "constant"
    last = total if constant else min(total, schedule.horizon)
    if warmup < last:
        return []
    over = "the run ends" if constant else "the rate is to fall"
    return [
        f"optimizer.warmup_steps {warmup} is not over when {over}, after {last} steps: the learning rate "
        f"comes to {schedule.factor(last - 1):.1%} of {config.optimizer.learning_rate:g} at most; take a shorter "
        "warm-up or more steps"
    ]


def _speed_sentences(config: TrainConfig, device: torch.device, compute: torch.dtype) -> list[str]:
    """What the options that make a step faster do here; BadInput where one cannot work."""
    said = [tf32_sentence(device)] if config.tf32 else []
    said += [channels_last_sentence(device, compute)] if config.channels_last else []
    return [*said, compile_sentence(device)] if config.compile else said


def pace_remark(plan: Plan, first: float, step: int) -> str:
    """What the first step of this session, `first` seconds long, lets one expect on a CPU; "" for a short run."""
    left = first * (plan.total_steps - step)
    if plan.compute.device.type != "cpu" or left < LONG:
        return ""
    took = f"{first:.0f} s" if first < 120 else f"{first / 60:.0f} min"
    steps = f"the other {plan.total_steps - step:,} take {left / 3600:,.1f} hours"
    return f"The first step took {took}: at this pace {steps}."


def _precision_sentence(config: TrainConfig) -> str:
    if config.precision == "pure_bf16":
        optimizer = config.optimizer
        return (
            "pure_bf16: weights, gradients and activations in bfloat16; AdamW computes in float32 and rounds once "
            f"({optimizer.chosen_rounding}, moments {optimizer.moments}: {_WHY_ROUNDING[optimizer.chosen_rounding]}); "
            "the averaged weights are float32"
        )
    return {
        "fp32": "fp32: every operation in float32 (on an NVIDIA GPU torch lets convolutions use TF32)",
        "bf16": "bf16 autocast: convolutions and matrices in bfloat16, weights, norms and loss in float32; "
        "its range is float32's, so no loss scaling",
        "fp16": "fp16 autocast with loss scaling: float16 gradients below 6e-8 would vanish without it",
    }[config.precision]


_WHY_ROUNDING = {
    "kahan": "what rounding drops is kept, so the weights are those of float32 AdamW, for 2 bytes a parameter",
    "master": "the weights are kept in float32 as well, for 4 bytes a parameter",
    "stochastic": "the least memory, for a fit up to 3 % above that of float32 AdamW",
}


def find_device(name: str) -> torch.device | None:
    """The device of that name, None where this machine has none."""
    try:
        probe = torch.zeros(1, device=name)
        probe.item()  # the device "meta" holds no numbers
    except (RuntimeError, AssertionError, ImportError, AttributeError, TypeError, ValueError):
        return None  # each backend that is not there says so in its own way; "hpu" by an ImportError
    return probe.device


def choose_device(config: TrainConfig, choices: list[str]) -> torch.device:
    if config.device != "auto":
        device = find_device(config.device)
        if device is None:
            raise BadInput(f"device: expected a device of this machine or auto, got {config.device!r}.")
        return device
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choices.append(f"device {device}: {'the first GPU' if device.type == 'cuda' else 'no GPU found'}")
    return device
