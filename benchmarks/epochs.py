"""How much of the gain of a long training a short one has: 8 epochs against 100, on the demo's data and settings.

Each number of epochs is a run of its own with a cosine that ends with it, in a folder of its own: a stopped run goes
on where it was, a finished one is read. All are measured on the held-out pairs by their own report.json.

    python -m benchmarks.epochs --dataset FOLDER [--epochs 8 20 50 100] [--write]

Runs can be spread over processes (`--epochs 8`, `--epochs 100` at once); the last call, with all of them, makes the
table. Ctrl-C stops after the step.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
from pathlib import Path

import torch

from benchmarks.problem import configure, demo_settings
from benchmarks.results import machine, report, table
from training.run.train import train

GOAL = 0.9
RUNS = Path(__file__).resolve().parent.parent / ".dev" / "benchmarks" / "epochs"
GAINS = {  # name -> (row of the report, measure, sign: +1 where more is better)
    "PSNR at 1 step": ("1 step", "psnr", 1),
    "PSNR at 8 steps": ("8 steps", "psnr", 1),
    "spectrum at 1 step": ("1 step", "spectrum", -1),
    "spectrum at 8 steps": ("8 steps", "spectrum", -1),
    "SSIM at 1 step": ("1 step", "ssim", 1),
}


class Progress:
    """Prints a line now and then."""

    pictures = False

    def __init__(self, name: str):
        self.name = name

    def on_step(self, step: int, total: int, loss: float, eta: float) -> None:
        if step % max(1, total // 20) == 0:
            self.on_message(f"step {step} of {total}, loss {loss:.3f}, {eta / 60:.0f} min left")

    def on_picture(self, picture) -> None: ...

    def on_measure(self, done: int, total: int) -> None: ...

    def on_message(self, text: str) -> None:
        print(f"  {self.name}: {text}", flush=True)


def gains(measures: dict[str, dict[str, float]]) -> dict[str, float]:
    """What each measure gained over the base; positive is better."""
    found = {}
    for name, (row, measure, sign) in GAINS.items():
        if row in measures and measure in measures[row]:
            found[name] = sign * (measures[row][measure] - measures["base"][measure])
    return found


def reaches(fractions: dict[int, float], goal: float) -> str:
    """At how many epochs the fraction comes to `goal`, straight lines between the runs on a logarithmic axis."""
    epochs = sorted(fractions)
    if fractions[epochs[0]] >= goal:
        return f"{epochs[0]} or fewer"
    for i in range(1, len(epochs)):
        low, high = epochs[i - 1], epochs[i]
        if fractions[high] >= goal:
            along = (goal - fractions[low]) / (fractions[high] - fractions[low])
            return f"about {math.exp(math.log(low) + along * math.log(high / low)):.0f}"
    return "not reached"


def describe(results: dict[int, dict[str, float]], held_out: int) -> str:
    longest = max(results)
    rows = []
    for name in results[longest]:
        whole = results[longest][name]
        if whole <= 0:  # nothing was gained, so there is nothing to have a share of
            rows.append([name, f"{whole:.3g}", *[f"gain {found[name]:.3g}" for found in results.values()], "no gain"])
            continue
        fractions = {epochs: found[name] / whole for epochs, found in results.items()}
        cells = [f"{fraction:.0%}" for fraction in fractions.values()]
        rows.append([name, f"{whole:.3g}", *cells, reaches(fractions, GOAL)])
    each = [f"{n} epochs" for n in results]
    columns = ["gain over the base", f"after {longest}", *each, f"{GOAL:.0%} reached at, interpolated"]
    return "\n".join(
        [
            f"### How much of {longest} epochs' gain a shorter training has",
            "",
            f"Share of the gain after {longest} epochs (goal: 8 epochs have at least {GOAL:.0%}), means over "
            f"{held_out} held-out pairs, one seed. PSNR in dB; spectrum is the fall of the spectral distance. "
            "Each number of epochs is a run of its own, whose learning rate ends at zero with it.",
            "",
            table(columns, rows),
            "",
            machine(),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, help="a dataset with held-out pairs, such as the demo's")
    parser.add_argument("--epochs", type=int, nargs="+", default=[8, 20, 50, 100])
    parser.add_argument("--runs", type=Path, default=RUNS, help="where the runs lie (default: %(default)s)")
    parser.add_argument("--config", type=Path, help="JSON settings of another run, its config.json for example")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--write", action="store_true", help="replace this section of RESULTS.md")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = demo_settings()
    if options.config:
        settings = json.loads(options.config.read_text(encoding="utf-8"))
        settings = settings.get("config", settings)
    stop: list[bool] = []
    previous = signal.signal(signal.SIGINT, lambda *_: (stop.append(True), signal.signal(signal.SIGINT, previous)))
    results, held_out = {}, 0
    for epochs in sorted(set(options.epochs)):
        config = configure(
            options.dataset, options.runs / f"epochs-{epochs:03d}", settings,
            epochs=epochs, optimizer={"horizon_steps": None}, validation={"pictures": 0},
        )
        result = train(config, Progress(f"{epochs} epochs"), lambda: bool(stop))
        if result.status == "stopped":
            return
        evaluation = result.report["evaluation"]
        results[epochs], held_out = gains(evaluation["measures"]), evaluation["pairs"]
    report("epochs", describe(results, held_out), write=options.write)


if __name__ == "__main__":
    main()
