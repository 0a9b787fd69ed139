"""What a checkpoint costs a run: written at once, or by a thread while training goes on.

One run of training.run.train.train; its epochs take turns between the two ways. The stall is what the first step after
a checkpoint takes longer than the median step: the wait before its update for what is not yet written (a GPU's run
copies instead), and at once all of writing, hashing and syncing. The cost is what the whole epoch takes longer than as
many median steps, so it also has in it what the thread takes from training.

    python -m benchmarks.checkpoint_stall [--write]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

import torch

from benchmarks.problem import NO_VALIDATION, configure, demo_settings, make_pictures
from benchmarks.results import machine, report, spread, table
from benchmarks.step_clock import StepClock
from training.config.train_config import TrainConfig
from training.data.batches import BatchSource
from training.data.shards import RefinerDataset
from training.run import recorder
from training.run.checkpoints.background import BackgroundSaver
from training.run.checkpoints.checkpoint import Checkpoint
from training.run.train import train

GOAL = 5.0  # per cent of an epoch
WAYS = ("in the background", "at once")


class TakingTurns(BackgroundSaver):
    """Every second checkpoint is waited for."""

    count = 0

    def save(self, checkpoint: Checkpoint, best: int | None = None) -> None:
        super().save(checkpoint, best)
        if self.count % 2:
            self.wait()
        self.count += 1


def measure(config: TrainConfig, rounds: int) -> tuple[dict[str, list[list[float]]], int]:
    """(way -> epochs -> seconds of each step, bytes of a checkpoint). An epoch begins with the checkpoint before it."""
    epochs: list[list[float]] = []

    def between(durations: list[float]) -> bool:
        epochs.append(durations)
        print(f"epoch {len(epochs)} of {2 * rounds + 1}", flush=True)
        return len(epochs) <= 2 * rounds

    source = BatchSource(
        config.dataset, batch_size=config.data.batch_size, repeats=config.data.repeats, crop=config.data.crop
    )
    clock = StepClock(source.per_epoch, between)
    before, recorder.BackgroundSaver = recorder.BackgroundSaver, TakingTurns
    try:
        train(config, clock, clock.should_stop)
    finally:
        recorder.BackgroundSaver = before
    newest = max((config.run / ".checkpoints").glob("step-*"))
    size = sum(file.stat().st_size for file in newest.iterdir())
    return {way: epochs[1 + k :: 2] for k, way in enumerate(WAYS)}, size  # the first one warmed up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a dataset folder, such as the demo's; default: drawn pictures")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each way")
    parser.add_argument("--steps", type=int, default=45, help="steps of an epoch, about")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--write", action="store_true", help="replace this section of RESULTS.md")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = demo_settings()
    with tempfile.TemporaryDirectory(prefix="ref2v-bench-") as scratch:
        batch = settings["data"]["batch_size"]
        dataset = options.dataset or make_pictures(Path(scratch) / "drawn", batch)
        repeats = max(1, round(options.steps * batch / len(RefinerDataset.open(dataset).train)))
        config = configure(
            dataset, Path(scratch) / "run", settings,
            data={"repeats": repeats}, validation=NO_VALIDATION, epochs=2 * options.rounds + 2, device="cpu",
        )
        taken, size = measure(config, options.rounds)

    step = median(seconds for epochs in taken.values() for epoch in epochs for seconds in epoch[1:])
    steps = len(taken[WAYS[0]][0])

    def share(seconds: list[float]) -> str:
        return spread([100 * value / (steps * step) for value in seconds], 2)

    rows = []
    for way, epochs in taken.items():
        stalls = [epoch[0] - step for epoch in epochs]
        costs = [sum(epoch) - steps * step for epoch in epochs]
        rows.append([way, f"{1000 * median(stalls):.0f}", share(stalls), share(costs), f"<= {GOAL:g}"])
    body = "\n".join(
        [
            "### What a checkpoint costs",
            "",
            f"The demo's problem: pixel-small, batch {config.data.batch_size}, crop {config.data.crop}, "
            f"{config.precision}; {size / 1e6:.1f} MB a checkpoint, one after each epoch of {steps} steps of "
            f"{step:.2f} s. Median (min..max) of {options.rounds} epochs of each way, in turns, in per cent of an "
            "epoch.",
            "",
            table(["written", "stall, ms", "stall, %", "whole cost, %", "goal for the stall, %"], rows),
            "",
            machine(),
        ]
    )
    report("checkpoint_stall", body, write=options.write)


if __name__ == "__main__":
    main()
