"""The commands `train` and `export`: their options, and what each does."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput

if TYPE_CHECKING:
    from PIL.Image import Image
    from tqdm import tqdm

    from ..config.train_config import TrainConfig

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Add both to `commands`, which `argparse.ArgumentParser.add_subparsers` gave; `execute` of the parsed options runs
    the one that was named and returns the exit status.
    """
    train = commands.add_parser("train", help="train a refiner from a dataset folder")
    train.add_argument("--config", type=Path, required=True, help="JSON of training.config.train_config.TrainConfig")
    train.add_argument("--dataset", type=Path, help="replaces the configuration's dataset folder")
    train.add_argument("--run", type=Path, help="replaces the configuration's run folder")
    train.set_defaults(execute=_train)
    export = commands.add_parser("export", help="a refiner file from a checkpoint of a run, finished or not")
    export.add_argument("--run", type=Path, required=True, help="the run's folder")
    export.add_argument("--checkpoint", default="best", help="best (validation loss), last, or a step (default best)")
    export.add_argument("--out", type=Path, required=True, help="the refiner file to write, NAME.safetensors")
    export.add_argument("--dataset", type=Path, help="where the run's dataset is now, if it was moved")
    export.add_argument("--start-from", type=Path, help="where the refiner that it went on from is now")
    export.add_argument("--force", action="store_true", help="replace a file that is there")
    export.set_defaults(execute=_export)


def _export(options: argparse.Namespace) -> int:
    from .checkpoints.export import export_checkpoint

    moved = {"dataset": options.dataset, "start_from": options.start_from}
    for sentence in export_checkpoint(options.run, options.checkpoint, options.out, **moved, force=options.force):
        print(sentence)
    return 0


def _train(options: argparse.Namespace) -> int:
    from .train import train

    config = _read_config(options)
    stop: list[bool] = []

    def stop_after_this_step(*_: object) -> None:
        stop.append(True)
        signal.signal(signal.SIGINT, previous)

    # the first Ctrl-C ends the run after its step, with a whole checkpoint; a second one falls back to Python's own
    previous = signal.signal(signal.SIGINT, stop_after_this_step)
    terminal = _Terminal()
    try:
        result = train(config, terminal, lambda: bool(stop))
    finally:
        signal.signal(signal.SIGINT, previous)
        terminal.close()
    print(result.refiner if result.status != "stopped" else "Run the command again to go on from there.")
    return 130 if result.status == "stopped" else 0


def _read_config(options: argparse.Namespace) -> TrainConfig:
    """The file of --config with what --dataset and --run replace. BadInput where it is none."""
    from ..config.train_config import TrainConfig
    from ..storage.plain_json import RepeatedKey, parse_json

    try:
        values = parse_json(options.config.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadInput(f"--config: expected a JSON file, cannot read {options.config} ({error.strerror}).") from error
    except RepeatedKey as error:
        raise BadInput(f"--config: {options.config}: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"--config: expected JSON in {options.config}, got text that is none ({error}).") from error
    if isinstance(values, dict):
        inner = values.get("config")  # a run folder's own config.json can be given as it stands
        values = inner if isinstance(inner, dict) else values
        values |= {name: str(value) for name in ("dataset", "run") if (value := getattr(options, name))}
    return TrainConfig.build(values)


class _Terminal:
    """An Observer that draws progress bars."""

    pictures = False

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def on_step(self, step: int, total: int, loss: float, eta: float) -> None:
        bar = self._bar or self._open(total=total, initial=step - 1, unit="step")
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        bar.update(step - bar.n)

    def on_picture(self, picture: Image) -> None: ...

    def on_measure(self, done: int, total: int) -> None:
        if done == 0 or self._bar is None:
            self.close()
            self._bar = None
        bar = self._bar or self._open(total=total, desc="measuring", unit="pair")
        bar.update(done - bar.n)

    def on_message(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _open(self, **options: Any) -> tqdm:
        from tqdm import tqdm

        self._bar = tqdm(dynamic_ncols=True, **options)
        return self._bar
