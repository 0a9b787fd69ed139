"""python -m training train --config run.json | estimate attention --model SDXL --size 1344x768"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from .errors import BadInput, TrainingFailed


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 done, 1 a sentence on stderr, 130 stopped by the user."""
    parser = argparse.ArgumentParser(prog="python -m training", description="The Ref2V training core, without ComfyUI.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a refiner from a dataset folder")
    train.add_argument("--config", type=Path, required=True, help="JSON of training.config.TrainConfig")
    train.add_argument("--dataset", type=Path, help="replaces the configuration's dataset folder")
    train.add_argument("--run", type=Path, help="replaces the configuration's run folder")
    _declare_estimate(commands.add_parser("estimate", help="memory needed, before anything runs"))
    options = parser.parse_args(arguments)
    try:
        return _train(options) if options.command == "train" else _estimate_attention(options)
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
    attention.add_argument("--size", default="768x768", help="WIDTHxHEIGHT in pixels (default 768x768)")
    attention.add_argument("--batch", type=int, default=1, help="pictures or clips at once (default 1)")
    attention.add_argument("--frames", type=int, default=1, help="frames of a clip (default 1)")
    attention.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of the computation (default bf16)")
    choices = ["auto", *BACKENDS]
    attention.add_argument("--backend", choices=choices, default="auto", help="auto: pytorch, as on most GPUs")
    attention.add_argument("--no-cfg", action="store_true", help="positive and negative are not in one batch")
    attention.add_argument("--text", type=int, default=0, help="tokens of the prompt (default: the usual number)")
    attention.add_argument("--memory", type=float, help="plan for an empty GPU of so many GiB (default: this machine)")
    attention.add_argument("--chart", type=Path, help="write the chart to this PNG file as well")


def _estimate_attention(options: argparse.Namespace) -> int:
    from .memory.estimate import estimate_attention
    from .memory.machine import planned_machine, this_machine
    from .memory.models import PRESETS

    width, _, height = options.size.partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise BadInput(f"--size: expected WIDTHxHEIGHT, such as 768x768, got {options.size!r}.")
    if options.memory is not None and not 0 < options.memory < 2**20:
        raise BadInput(f"--memory: expected GiB above 0 and below {2**20}, got {options.memory:g}.")
    estimate = estimate_attention(
        PRESETS[options.model],
        int(width),
        int(height),
        this_machine() if options.memory is None else planned_machine(options.memory),
        batch=options.batch,
        frames=options.frames,
        dtype=options.dtype,
        cfg=not options.no_cfg,
        text=options.text,
        backend=options.backend,
    )
    print(estimate.report())
    if options.chart is not None:
        _write_chart(estimate, options.chart)
    return 0


def _write_chart(estimate, path: Path) -> None:
    import os

    from .memory.chart import attention_chart

    beside = path.with_name(f"{path.name}.partial")
    try:
        with open(beside, "wb") as file:
            attention_chart(estimate).save(file, format="PNG")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise BadInput(f"--chart: expected a file that can be written, got {path} ({error.strerror}).") from error


def _train(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from .config import TrainConfig
    from .run import train

    try:
        values = json.loads(options.config.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--config: expected a JSON file, cannot read {options.config} ({error.strerror}).") from error
    except ValueError as error:
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

        def on_message(self, text: str) -> None:
            tqdm.write(text)

    stop = []
    # the first Ctrl-C ends the run after its step, with a whole checkpoint; a second one falls back to Python's own
    previous = signal.signal(signal.SIGINT, lambda *_: (stop.append(True), signal.signal(signal.SIGINT, previous)))
    terminal = Terminal()
    try:
        result = train(config, terminal, lambda: bool(stop))
    finally:
        signal.signal(signal.SIGINT, previous)
        if terminal.bar is not None:
            terminal.bar.close()
    print(result.refiner if result.status != "stopped" else result.message)
    return 130 if result.status == "stopped" else 0


if __name__ == "__main__":
    sys.exit(main())
