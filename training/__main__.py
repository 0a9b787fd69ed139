"""python -m training train --config run.json"""

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
    options = parser.parse_args(arguments)
    try:
        return _train(options)
    except (BadInput, TrainingFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


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
