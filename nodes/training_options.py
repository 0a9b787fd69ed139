"""The settings that Train Refiner takes as JSON, as widgets."""

from __future__ import annotations

from typing import Any, get_args

from ..training.config.choices import Extension, Loss, Moments, RoundingChoice, Schedule
from ..training.config.options import build_options, default_of
from ..training.config.sections import MOST_RANK
from .host.api import io
from .host.schema import Node, declare, node_schema

__all__ = ["NODES"]

_MOST = 1_000_000  # of an input that has no upper limit of its own


def _input(kind: Any, name: str, tooltip: str, **limits: Any) -> Any:
    """An input whose default is the configuration's."""
    return declare(kind, name, default=default_of(name), tooltip=tooltip, **limits)


def _later_inputs() -> list[Any]:
    """Inputs that came after `more`: optional, so that earlier graphs go on without them."""
    integer, number, switch = io.Int.Input, io.Float.Input, io.Boolean.Input

    def later(kind: Any, name: str, tooltip: str, **limits: Any) -> Any:
        return _input(kind, name, tooltip, optional=True, **limits)

    def choice(name: str, options: Any, tooltip: str) -> Any:
        return later(io.Combo.Input, name, tooltip, options=list(get_args(options)))

    return [
        later(
            integer, "max_steps", "Length of the run in steps of training, in the place of epochs; 0 = by epochs.",
            min=0, max=10**9,
        ),
        later(
            integer, "checkpoint_every",
            "Steps between two checkpoints; 0 = at an epoch's end, or 30 minutes after the last one, and no more than "
            "a twentieth of the time.",
            min=0, max=_MOST,
        ),
        later(
            number, "checkpoint_minutes", "A checkpoint also when so many minutes have passed since the last; 0 = off.",
            min=0.0, max=10_000.0, step=1.0,
        ),
        choice("schedule", Schedule, "How the learning rate falls after its warm-up; constant = it stays at its peak."),
        later(
            number, "floor", "Share of the peak that the learning rate ends at; belongs to cosine and linear.",
            min=0.0, max=0.99, step=0.01,
        ),
        choice(
            "extension", Extension,
            "What the learning rate does when a finished run is queued again with more epochs or steps. constant: it "
            "stays at its last value. stretch: it goes on as that of a run of the whole length. refuse: such a run is "
            "refused, unless its rate does not depend on the length.",
        ),
        choice("loss", Loss, "mse: the square of each error. huber: the square up to huber_delta, a line beyond."),
        later(
            number, "huber_delta", "Belongs to loss huber: an error of 1 is as large as what the network predicts.",
            min=0.001, max=float(_MOST), step=0.05,
        ),
        later(switch, "tf32", "Let float32 matrices use TF32 in training: faster on NVIDIA GPUs from Ampere on."),
        later(
            switch, "compile",
            "The network through torch.compile: faster steps, after minutes at the first one and at each other size of "
            "a batch.",
        ),
        later(
            switch, "channels_last",
            "Convolutions with the channels last in memory: faster on GPUs with tensor cores.",
        ),
    ]


class Ref2VSetTrainingOptions(Node):
    """The settings of a training run beside those on Train Refiner itself. Link it to that node's options.

    What stays at its default is left out, so a run with this node at its defaults is the same as one without it.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        integer, number, switch = io.Int.Input, io.Float.Input, io.Boolean.Input
        return node_schema(
            cls,
            node_id="Ref2VSetTrainingOptions",
            display_name="Training Options",
            category="Ref2V/Refiner",
            search_aliases=["train", "options", "EMA", "accumulation", "repeats"],
            inputs=[
                _input(
                    integer, "repeats", "How often an epoch shows each pair, each time another crop.", min=1, max=10000
                ),
                _input(switch, "mirror", "Mirror half of the crops. Pixel space only."),
                _input(
                    integer,
                    "accumulation",
                    "Batches per optimizer step: as large a batch as memory would not hold at once.",
                    min=1,
                    max=4096,
                ),
                _input(
                    number,
                    "caption_dropout",
                    "Share of samples that are trained on the empty caption. Without captions it does nothing.",
                    min=0.0,
                    max=1.0,
                    step=0.01,
                ),
                _input(
                    number,
                    "ema_decay",
                    "Of the averaged weights, which are what is saved. 0.99 suits runs of some hundred steps; 0 keeps "
                    "the last weights.",
                    min=0.0,
                    max=0.99999,
                    step=0.00001,
                ),
                _input(
                    number,
                    "weight_decay",
                    "AdamW's, times the learning rate at each step; norms and biases do not decay.",
                    min=0.0,
                    max=1.0,
                    step=0.001,
                ),
                _input(
                    integer,
                    "warmup_steps",
                    "Steps over which the learning rate rises to its peak. Then it falls as schedule says.",
                    min=0,
                    max=_MOST,
                ),
                _input(
                    number,
                    "clip_norm",
                    "Gradient norm above which a gradient is scaled down to it.",
                    min=0.001,
                    max=float(_MOST),
                    step=0.001,
                ),
                _input(
                    switch,
                    "gradient_checkpointing",
                    "Less memory: activations are computed twice instead of being kept. The result is the same.",
                ),
                _input(
                    io.String.Input,
                    "noise_scale",
                    "Noise at the start of the path. auto: as large as the residual, measured on the pairs. A number "
                    "sets it; 0 trains for a single step.",
                ),
                _input(
                    integer, "steps", "Sampling steps that the refiner is made for, not steps of training.",
                    min=1, max=1000,
                ),
                _input(
                    number,
                    "on_grid",
                    "Share of the training times that lie on the sampler's own sigmas; the rest lie anywhere, so that "
                    "other numbers of sampling steps work too.",
                    min=0.0,
                    max=1.0,
                    step=0.05,
                ),
                _input(
                    number,
                    "min_snr_gamma",
                    "Min-SNR weighting of the loss, with this gamma (5 is usual); 0 = off.",
                    min=0.0,
                    max=float(_MOST),
                    step=0.5,
                ),
                _input(
                    integer,
                    "validation_every",
                    "Steps of training between two looks at the held-out pairs; 0 = once an epoch, and no more than a "
                    "twentieth of the work.",
                    min=0,
                    max=_MOST,
                ),
                _input(
                    integer,
                    "validation_pictures",
                    "Held-out pairs that are measured and shown in mid-training; 0 = none.",
                    min=0,
                    max=64,
                ),
                _input(
                    integer, "keep_checkpoints", "How many of the newest checkpoints stay. The best one stays as well.",
                    min=1, max=_MOST,
                ),
                _input(
                    io.Combo.Input,
                    "rounding",
                    "For precision pure_bf16 alone: how an update too small for bfloat16 is kept. auto: kahan, which "
                    "is exact; stochastic, which takes less memory, with moments bf16.",
                    options=list(get_args(RoundingChoice)),
                ),
                _input(
                    io.Combo.Input,
                    "moments",
                    "For precision pure_bf16 alone: what AdamW keeps its moments in. bf16 takes 4 bytes a parameter "
                    "less.",
                    options=list(get_args(Moments)),
                ),
                _input(
                    io.String.Input,
                    "start_from",
                    "A trained refiner to go on from: a name of Load Refiner's list, or a path. Empty = a new network.",
                ),
                _input(
                    integer,
                    "lora_rank",
                    "With start_from: train small adapters of this rank (LoRA) and leave its weights as they are; 16 "
                    "is usual, 0 trains all of it.",
                    min=0,
                    max=MOST_RANK,
                ),
                declare(
                    io.String.Input,
                    "more",
                    default="",
                    multiline=True,
                    optional=True,
                    dynamic_prompts=False,
                    tooltip="Everything else, as JSON; it wins over the inputs. training/config/sections.py lists the "
                    "settings.",
                ),
                *_later_inputs(),
            ],
            outputs=[
                declare(
                    io.String.Output, "options", display_name="options", tooltip="JSON, for Train Refiner's options."
                )
            ],
        )

    @classmethod
    def execute(cls, more: str = "", **inputs: Any) -> io.NodeOutput:
        return io.NodeOutput(build_options(inputs, more))


NODES = [Ref2VSetTrainingOptions]
