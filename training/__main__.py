"""python ComfyUI-Ref2V/training train --config FILE | export --run FOLDER --out FILE | estimate attention --size WxH

From any folder, with any Python: a portable build's ignores the current folder and PYTHONPATH. In the pack's folder
`python -m training` is the same.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

CALLED = "python -m training"
if not __package__:
    # Run by its path, this folder stands first in sys.path, where `import times` or `import names` would find our
    # modules. The pack's own folder takes its place, as `-m` has it; processes that we start get the same list.
    # abspath, for `python ..` has no name that could be a package's.
    here = Path(os.path.abspath(__file__)).parent
    CALLED = f"python {here}"
    sys.path[:] = [str(here.parent) if os.path.abspath(entry) == str(here) else entry for entry in sys.path]
    __package__ = here.name  # of the relative imports below

from .errors import BadInput, TrainingFailed  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 a sentence on stderr, 130 stopped by the user."""
    parser = argparse.ArgumentParser(prog=CALLED, description="The Ref2V training core, without ComfyUI.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a refiner from a dataset folder")
    train.add_argument("--config", type=Path, required=True, help="JSON of training.config.train_config.TrainConfig")
    train.add_argument("--dataset", type=Path, help="replaces the configuration's dataset folder")
    train.add_argument("--run", type=Path, help="replaces the configuration's run folder")
    export = commands.add_parser("export", help="a refiner file from a checkpoint of a run, finished or not")
    export.add_argument("--run", type=Path, required=True, help="the run's folder")
    export.add_argument("--checkpoint", default="best", help="best (validation loss), last, or a step (default best)")
    export.add_argument("--out", type=Path, required=True, help="the refiner file to write, NAME.safetensors")
    export.add_argument("--dataset", type=Path, help="where the run's dataset is now, if it was moved")
    export.add_argument("--start-from", type=Path, help="where the refiner that it went on from is now")
    export.add_argument("--force", action="store_true", help="replace a file that is there")
    _declare_estimate(commands.add_parser("estimate", help="memory needed, before anything runs"))
    options = parser.parse_args(arguments)
    try:
        if options.command == "train":
            return _train(options)
        if options.command == "export":
            return _export(options)
        kinds = {"attention": _estimate_attention, "model": _estimate_model, "training": _estimate_training}
        return kinds[options.kind](options)
    except (BadInput, TrainingFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _declare_estimate(parser: argparse.ArgumentParser) -> None:
    from .memory.attention import BACKENDS
    from .memory.estimate import DTYPES
    from .memory.models import PRESETS

    kinds = parser.add_subparsers(dest="kind", required=True)
    attention = kinds.add_parser("attention", help="what attention allocates, per layer and on every backend")
    attention.add_argument("--model", choices=list(PRESETS), default="SD1.5", help="the network (default SD1.5)")
    attention.add_argument("--batch", type=int, default=1, help="pictures or clips at once (default 1)")
    attention.add_argument("--frames", type=int, default=1, help="frames of a clip (default 1)")
    attention.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of the computation (default bf16)")
    choices = ["auto", *BACKENDS]
    attention.add_argument("--backend", choices=choices, default="auto", help="auto: pytorch, as on most GPUs")
    attention.add_argument("--no-cfg", action="store_true", help="positive and negative are not in one batch")
    attention.add_argument("--text", type=int, default=0, help="tokens of the prompt (default: the usual number)")
    _declare_networks(kinds, list(DTYPES), list(BACKENDS))
    for kind in kinds.choices.values():
        kind.add_argument("--size", default="768x768", help="WIDTHxHEIGHT in pixels (default 768x768)")
        kind.add_argument("--memory", type=float, help="plan for an empty GPU of so many GiB (default: this machine)")
        kind.add_argument("--chart", type=Path, help="write the chart to this PNG file as well")


def _declare_networks(kinds, dtypes: list[str], backends: list[str]) -> None:
    from .memory.optimizers import LAYOUTS, OPTIMIZERS
    from .memory.training_estimate import PRECISIONS
    from .memory.training_trace import ATTENTION, NETWORKS

    model = kinds.add_parser("model", help="a whole UNet in one pass of sampling")
    model.add_argument("--model", choices=list(NETWORKS), default="SD1.5", help="the network (default SD1.5)")
    model.add_argument("--batch", type=int, default=1, help="pictures at once (default 1)")
    model.add_argument("--dtype", choices=dtypes, default="bf16", help="of weights and computation (default bf16)")
    model.add_argument("--backend", choices=backends, default="pytorch", help="of attention (default pytorch)")
    model.add_argument("--no-cfg", action="store_true", help="positive and negative are not in one batch")
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


def _size(options: argparse.Namespace) -> tuple[int, int]:
    width, _, height = options.size.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise BadInput(f"--size: expected WIDTHxHEIGHT, such as 768x768, got {options.size!r}.")
    return int(width), int(height)


def _machine(options: argparse.Namespace):
    from .memory.machine import planned_machine, this_machine

    if options.memory is not None and not 0 < options.memory < 2**20:
        raise BadInput(f"--memory: expected GiB above 0 and below {2**20}, got {options.memory:g}.")
    return this_machine() if options.memory is None else planned_machine(options.memory)


def _estimate_model(options: argparse.Namespace) -> int:
    from .memory.network_estimate import estimate_network

    width, height = _size(options)
    estimate = estimate_network(
        options.model, width, height, _machine(options), batch=options.batch, dtype=options.dtype,
        cfg=not options.no_cfg, backend=options.backend,
    )  # fmt: skip
    return _print_columns(estimate, options)


def _estimate_training(options: argparse.Namespace) -> int:
    from .memory.training_estimate import TrainingQuestion, estimate_training

    width, height = _size(options)
    question = TrainingQuestion(
        network=options.model, width=width, height=height, batch=options.batch, accumulation=options.accumulation,
        precision=options.precision, optimizer=options.optimizer, ema=not options.no_ema,
        checkpointing=options.checkpointing, attention=options.attention, layout=options.layout, gpus=options.gpus,
        lora_rank=options.lora_rank,
    )  # fmt: skip
    return _print_columns(estimate_training(question, _machine(options)), options)


def _print_columns(estimate, options: argparse.Namespace) -> int:
    print(estimate.report())
    if options.chart is not None:
        from .memory.chart import columns_chart

        title = f"{estimate.title}:\n{estimate.verdict.split(' (')[0]}"
        _write_chart(columns_chart(title, estimate.columns(), estimate.machine.free), options.chart)
    return 0


def _estimate_attention(options: argparse.Namespace) -> int:
    from .memory.estimate import estimate_attention
    from .memory.models import PRESETS

    width, height = _size(options)
    estimate = estimate_attention(
        PRESETS[options.model],
        width,
        height,
        _machine(options),
        batch=options.batch,
        frames=options.frames,
        dtype=options.dtype,
        cfg=not options.no_cfg,
        text=options.text,
        backend=options.backend,
    )
    print(estimate.report())
    if options.chart is not None:
        from .memory.chart import attention_chart

        _write_chart(attention_chart(estimate), options.chart)
    return 0


def _write_chart(picture, path: Path) -> None:
    import os

    from .storage.files import replace

    beside = path.with_name(f"{path.name}.partial")
    try:
        with open(beside, "wb") as file:
            picture.save(file, format="PNG")
            file.flush()
            os.fsync(file.fileno())
        replace(beside, path)
    except OSError as error:
        raise BadInput(f"--chart: expected a file that can be written, got {path} ({error.strerror}).") from error


def _export(options: argparse.Namespace) -> int:
    from .run.checkpoints.export import export_checkpoint

    moved = {"dataset": options.dataset, "start_from": options.start_from}
    for sentence in export_checkpoint(options.run, options.checkpoint, options.out, **moved, force=options.force):
        print(sentence)
    return 0


def _train(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from .config.train_config import TrainConfig
    from .run.train import train
    from .storage.plain_json import RepeatedKey, parse_json

    try:
        values = parse_json(options.config.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadInput(f"--config: expected a JSON file, cannot read {options.config} ({error.strerror}).") from error
    except RepeatedKey as error:
        raise BadInput(f"--config: {options.config}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--config: expected JSON in {options.config}, got text that is none ({error}).") from error
    if isinstance(values, dict):
        kept = values.get("config")  # a run folder's own config.json can be given as it stands
        values = kept if isinstance(kept, dict) else values
        values |= {name: str(value) for name in ("dataset", "run") if (value := getattr(options, name))}
    config = TrainConfig.build(values)

    class Terminal:
        pictures = False

        def __init__(self) -> None:
            self.bar: tqdm | None = None

        def on_step(self, step: int, total: int, loss: float, eta: float) -> None:
            if self.bar is None:
                self.bar = tqdm(total=total, initial=step - 1, unit="step", dynamic_ncols=True)
            self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self.bar.update(step - self.bar.n)

        def on_picture(self, picture) -> None: ...

        def on_measure(self, done: int, total: int) -> None:
            if done == 0:
                self.close()
                self.bar = tqdm(total=total, desc="measuring", unit="pair", dynamic_ncols=True)
            self.bar.update(done - self.bar.n)

        def on_message(self, text: str) -> None:
            tqdm.write(text)

        def close(self) -> None:
            if self.bar is not None:
                self.bar.close()

    stop = []
    # the first Ctrl-C ends the run after its step, with a whole checkpoint; a second one falls back to Python's own
    previous = signal.signal(signal.SIGINT, lambda *_: (stop.append(True), signal.signal(signal.SIGINT, previous)))
    terminal = Terminal()
    try:
        result = train(config, terminal, lambda: bool(stop))
    finally:
        signal.signal(signal.SIGINT, previous)
        terminal.close()
    print(result.refiner if result.status != "stopped" else "Run the command again to go on from there.")
    return 130 if result.status == "stopped" else 0


if __name__ == "__main__":
    sys.exit(main())
