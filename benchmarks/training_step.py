"""Steps per second of training.run.train.train against a loop that one would write by hand.

The same network, batches, dtype and AdamW. The hand-written loop has its batches in memory, no journal, no
checkpoints; once without and once with gradient clipping and averaged weights, which belong to the method.
All loops run in one process and take turns, block after block: ours, bare, bare with both, ours, ...

    python -m benchmarks.training_step [--write]
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch
from torch import autocast
from torch.nn import functional

from benchmarks.problem import NO_VALIDATION, configure, demo_settings, make_pictures
from benchmarks.results import machine, median_interval, report, table
from benchmarks.step_clock import StepClock
from training.config.train_config import TrainConfig
from training.data.batches import BatchSource
from training.data.shards import RefinerDataset
from training.objectives.residual.unet import build_unet
from training.run.plan import Plan, make_plan
from training.run.train import train

GOAL = 0.98


class BareLoop:
    """Forward, backward, AdamW: nothing else, unless `clip_and_average`."""

    def __init__(self, config: TrainConfig, plan: Plan, batches: list[dict], *, clip_and_average: bool):
        torch.manual_seed(0)
        self.plan, self.batches = plan, cycle(batches)
        self.net = build_unet(plan.objective.unet).to(plan.compute.device).train()
        options = config.optimizer
        # fused, as ours: what is measured is the loop, not the choice of a kernel
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), options.learning_rate, options.betas, weight_decay=options.weight_decay, fused=True
        )
        self.average = copy.deepcopy(self.net) if clip_and_average else None

    def block(self, steps: int) -> list[float]:
        """Seconds of each of `steps` steps."""
        marks = [time.perf_counter()]
        for batch in islice(self.batches, steps):
            self.step(batch["z"], batch["b"])
            marks.append(time.perf_counter())
        return [after - before for before, after in zip(marks, marks[1:], strict=False)]

    def step(self, z: torch.Tensor, b: torch.Tensor) -> None:
        s, c_v = self.plan.objective.s, self.plan.objective.c_v
        source = b + s * torch.randn_like(b)
        t = torch.rand(len(z), 1, 1, 1)
        x = (1 - t) * z + t * source
        context = torch.zeros(len(z), 1, self.plan.objective.unet.context_dim)
        low = self.plan.compute.autocast
        with autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            output = self.net(torch.cat([x, b], 1), 1000 * t.flatten(), encoder_hidden_states=context).sample
        loss = functional.mse_loss(output.float(), (source - z) / c_v)
        self.optimizer.zero_grad()
        loss.backward()
        if self.average is not None:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        if self.average is not None:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 0.01)


def measure(config: TrainConfig, blocks: int) -> tuple[int, dict[str, list[list[float]]]]:
    """(steps of a block, loop -> blocks -> seconds of each step). A block is an epoch: one checkpoint falls in it."""
    source = BatchSource(
        config.dataset, batch_size=config.data.batch_size, repeats=config.data.repeats, seed=config.seed,
        crop=config.data.crop, flip=config.data.mirror,
    )
    steps = source.per_epoch
    plan = make_plan(config, RefinerDataset.open(config.dataset), steps)
    batches = [source[index] for index in range(min(steps, 16))]
    rivals = {
        "bare": BareLoop(config, plan, batches, clip_and_average=False),
        "bare, clip, EMA": BareLoop(config, plan, batches, clip_and_average=True),
    }
    taken: dict[str, list[list[float]]] = {"ours": [], **{name: [] for name in rivals}}

    def between(durations: list[float]) -> bool:
        taken["ours"].append(durations)
        for name, loop in rivals.items():
            taken[name].append(loop.block(steps))
        done = len(taken["ours"]) - 1
        print(f"block {done} of {blocks}" if done else "warmed up", flush=True)
        return done < blocks

    clock = StepClock(steps, between)
    train(config, clock, clock.should_stop)
    return steps, {name: found[1:] for name, found in taken.items()}  # the first of each warmed up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a dataset folder, such as the demo's; default: drawn pictures")
    parser.add_argument("--blocks", type=int, default=41, help="repetitions")
    parser.add_argument("--steps", type=int, default=24, help="steps of a block, about")
    settings = demo_settings()
    parser.add_argument("--batch", type=int, default=settings["data"]["batch_size"])
    parser.add_argument("--crop", type=int, default=settings["data"]["crop"])
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--write", action="store_true", help="replace this section of RESULTS.md")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="ref2v-bench-") as scratch:
        dataset = options.dataset or make_pictures(Path(scratch) / "drawn", options.batch)
        pairs = len(RefinerDataset.open(dataset).train)
        repeats = max(1, round(options.steps * options.batch / pairs))
        data = {"batch_size": options.batch, "crop": options.crop, "repeats": repeats}
        config = configure(
            dataset, Path(scratch) / "run", settings,
            data=data, validation=NO_VALIDATION, epochs=options.blocks + 2, device="cpu",
        )
        steps, taken = measure(config, options.blocks)

    def faster(rival: str, first: int) -> list[str]:
        """Our steps/s over the rival's, a block each, from step `first` of the block on: median, interval, range."""
        pairs = zip(taken["ours"], taken[rival], strict=True)
        ratios = [sum(theirs[first:]) / sum(ours[first:]) for ours, theirs in pairs]
        low, high = median_interval(ratios)
        return [f"{median(ratios):.3f}", f"{low:.3f}..{high:.3f}", f"{min(ratios):.3f}..{max(ratios):.3f}"]

    rows = [
        # Like for like comes first: it does the same work. A checkpoint written at the end of an epoch is timed with
        # the first step after it.
        ["**the loop with gradient clipping and EMA, as ours**", *faster("bare, clip, EMA", 1), f">= {GOAL}"],
        ["the bare loop: forward, backward, AdamW", *faster("bare", 1), ""],
        [f"the bare loop, our checkpoint after each {steps} steps counted", *faster("bare", 0), ""],
    ]
    body = "\n".join(
        [
            "### Training step against a hand-written loop",
            "",
            f"The demo's problem: pixel-small, batch {config.data.batch_size}, crop {config.data.crop}, "
            f"{config.precision}. Steps per second of `training.run.train.train` over those of the other loop, "
            f"pair by pair in {options.blocks} interleaved blocks of {steps} steps. 1 = as fast; more is better. The "
            "goal is met where the whole interval of the first row is above it.",
            "",
            table(["against", "ours / theirs, median", "95 % interval of the median", "min..max", "goal"], rows),
            "",
            machine(),
        ]
    )
    report("training_step", body, write=options.write)


if __name__ == "__main__":
    main()
