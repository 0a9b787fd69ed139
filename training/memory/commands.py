"""The command `estimate attention | model | training`: its options, and what each prints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image

    from .machine import Machine
    from .model_estimate import ModelEstimate
    from .training_estimate import TrainingEstimate

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add it to `commands`, which `argparse.ArgumentParser.add_subparsers` gave; `execute` of the parsed options runs
    it and returns the exit status.
    """
    from .attention import BACKENDS
    from .estimate import DTYPES

    parser = commands.add_parser("estimate", help="memory needed, before anything runs")
    kinds = parser.add_subparsers(dest="kind", required=True)
    _declare_attention(kinds, list(DTYPES), list(BACKENDS))
    _declare_model(kinds, list(DTYPES), list(BACKENDS))
    _declare_training(kinds)
    for kind in kinds.choices.values():
        kind.add_argument("--size", default="768x768", help="WIDTHxHEIGHT in pixels (default 768x768)")
        kind.add_argument("--memory", type=float, help="plan for an empty GPU of so many GiB (default: this machine)")
        kind.add_argument("--chart", type=Path, help="write the chart to this PNG file as well")


def _declare_attention(kinds: Any, dtypes: list[str], backends: list[str]) -> None:
    from .models import PRESETS

    attention = kinds.add_parser("attention", help="what attention allocates, per layer and on every backend")
    attention.add_argument("--model", choices=list(PRESETS), default="SD1.5", help="the network (default SD1.5)")
    attention.add_argument("--batch", type=int, default=1, help="pictures or clips at once (default 1)")
    attention.add_argument("--frames", type=int, default=1, help="frames of a clip (default 1)")
    attention.add_argument("--dtype", choices=dtypes, default="bf16", help="of the computation (default bf16)")
    choices = ["auto", *backends]
    attention.add_argument("--backend", choices=choices, default="auto", help="auto: pytorch, as on most GPUs")
    attention.add_argument("--no-cfg", action="store_true", help="positive and negative are not in one batch")
    attention.add_argument("--text", type=int, default=0, help="tokens of the prompt (default: the usual number)")
    attention.set_defaults(execute=_estimate_attention)


def _declare_model(kinds: Any, dtypes: list[str], backends: list[str]) -> None:
    from .training_trace import NETWORKS

    model = kinds.add_parser("model", help="a whole UNet in one pass of sampling")
    model.add_argument("--model", choices=list(NETWORKS), default="SD1.5", help="the network (default SD1.5)")
    model.add_argument("--batch", type=int, default=1, help="pictures at once (default 1)")
    model.add_argument("--dtype", choices=dtypes, default="bf16", help="of weights and computation (default bf16)")
    model.add_argument("--backend", choices=backends, default="pytorch", help="of attention (default pytorch)")
    model.add_argument("--no-cfg", action="store_true", help="positive and negative are not in one batch")
    model.set_defaults(execute=_estimate_model)


def _declare_training(kinds: Any) -> None:
    from .optimizers import LAYOUTS, OPTIMIZERS
    from .training_estimate import PRECISIONS
    from .training_trace import ATTENTION, NETWORKS

    train = kinds.add_parser("training", help="a training step: weights, optimizer, activations, several GPUs")
    train.add_argument("--model", choices=list(NETWORKS), default="sd15-half", help="the network (default sd15-half)")
    train.add_argument("--batch", type=int, default=1, help="pictures at once (default 1)")
    train.add_argument("--accumulation", type=int, default=1, help="batches of one step (default 1)")
    train.add_argument("--precision", choices=list(PRECISIONS), default="bf16", help="autocast (default bf16)")
    train.add_argument("--optimizer", choices=list(OPTIMIZERS), default="AdamW", help="default AdamW")
    train.add_argument("--no-ema", action="store_true", help="without the moving average")
    train.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    train.add_argument("--lora-rank", type=int, default=0, help="of adapters (default 0: the whole network is trained)")
    train.add_argument("--attention", choices=list(ATTENTION), default="pytorch", help="default pytorch (fused)")
    train.add_argument("--layout", choices=list(LAYOUTS), default="one GPU", help="default: one GPU")
    train.add_argument("--gpus", type=int, default=8, help="for the other layouts (default 8)")
    train.set_defaults(execute=_estimate_training)


def _size(options: argparse.Namespace) -> tuple[int, int]:
    width, _, height = options.size.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise BadInput(f"--size: expected WIDTHxHEIGHT, such as 768x768, got {options.size!r}.")
    return int(width), int(height)


def _machine(options: argparse.Namespace) -> Machine:
    from .machine import planned_machine, this_machine

    if options.memory is not None and not 0 < options.memory < 2**20:
        raise BadInput(f"--memory: expected GiB above 0 and below {2**20}, got {options.memory:g}.")
    return this_machine() if options.memory is None else planned_machine(options.memory)


def _estimate_attention(options: argparse.Namespace) -> int:
    from .chart import attention_chart
    from .estimate import estimate_attention
    from .models import PRESETS

    width, height = _size(options)
    estimate = estimate_attention(
        PRESETS[options.model], width, height, _machine(options), batch=options.batch, frames=options.frames,
        dtype=options.dtype, cfg=not options.no_cfg, text=options.text, backend=options.backend,
    )  # fmt: skip
    print(estimate.report())
    if options.chart is not None:
        _write_chart(attention_chart(estimate), options.chart)
    return 0


def _estimate_model(options: argparse.Namespace) -> int:
    from .network_estimate import estimate_network

    width, height = _size(options)
    estimate = estimate_network(
        options.model, width, height, _machine(options), batch=options.batch, dtype=options.dtype,
        cfg=not options.no_cfg, backend=options.backend,
    )  # fmt: skip
    return _print_columns(estimate, options)


def _estimate_training(options: argparse.Namespace) -> int:
    from .training_estimate import TrainingQuestion, estimate_training

    width, height = _size(options)
    question = TrainingQuestion(
        network=options.model, width=width, height=height, batch=options.batch, accumulation=options.accumulation,
        precision=options.precision, optimizer=options.optimizer, ema=not options.no_ema,
        checkpointing=options.checkpointing, attention=options.attention, layout=options.layout, gpus=options.gpus,
        lora_rank=options.lora_rank,
    )  # fmt: skip
    return _print_columns(estimate_training(question, _machine(options)), options)


def _print_columns(estimate: ModelEstimate | TrainingEstimate, options: argparse.Namespace) -> int:
    from .chart import columns_chart

    print(estimate.report())
    if options.chart is not None:
        title = f"{estimate.title}:\n{estimate.verdict.split(' (')[0]}"
        _write_chart(columns_chart(title, estimate.columns(), estimate.machine.free), options.chart)
    return 0


def _write_chart(picture: Image, path: Path) -> None:
    from ..run.report.report import as_png
    from ..storage.files import write_whole

    try:
        write_whole(path, as_png(picture))
    except OSError as error:
        raise BadInput(f"--chart: expected a file that can be written, got {path} ({error.strerror}).") from error
