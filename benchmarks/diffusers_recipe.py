"""training.run.train.train against the step of a text-to-image recipe as one writes it with diffusers and accelerate.

The recipe is our own re-creation: in every step the VAE encodes the pictures and the text encoder the captions, noise
is added by a scheduler, accelerate prepares and accumulates, AdamW works in FP32. VAE and text encoder have the shapes
of SD1.5's with random weights; the trained UNet (sd15-half), the batch and the captions' length are the same in both.
In the recipe's favour: its pictures are decoded and in memory, and it averages no weights; ours does.

Then one thing at a time is changed in the recipe, to see where the difference comes from. Each variant lives in a
process of its own (so its peak memory is its own too), and the two of a pair take turns, block after block.

Two tables: small pictures, where the networks' weights weigh most, and SD1.5's own 512 px, where activations do.

    python -m benchmarks.diffusers_recipe [--side 128] [--side 512] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.problem import NO_VALIDATION, configure, make_latents
from benchmarks.recipe_loop import RecipeLoop, Sizes, Variant
from benchmarks.results import machine, report, spread, table
from benchmarks.step_clock import StepClock
from training.run.train import train

FASTER, SMALLER = 1.2, 0.6  # steps per second at least, peak memory at most

RECIPE = Variant()
RECIPE_BF16 = replace(RECIPE, precision="bf16")
OURS, OURS_BF16 = Variant(ours=True), Variant(ours=True, precision="bf16")
LEAN = Variant(ours=True, precision="pure_bf16", checkpointing=True)  # the least memory that ours can do with
LEAN_NAME = "training.run.train.train in pure_bf16, moments in bf16, gradient checkpointing; recipe in fp32"


@dataclass(frozen=True)
class Pair:
    name: str
    reference: Variant  # the one that counts as 1
    variant: Variant  # the one compared with it
    faster: float | None = None  # goals
    smaller: float | None = None


PAIRS = {
    128: [
        Pair("**training.run.train.train, both in fp32**", RECIPE, OURS, FASTER),
        Pair("recipe + latents cached", RECIPE, replace(RECIPE, cached_latents=True)),
        Pair("recipe + text cached", RECIPE, replace(RECIPE, cached_text=True)),
        Pair("recipe + fused AdamW", RECIPE, replace(RECIPE, fused=True)),
        Pair("recipe + bf16 (autocast; frozen encoders in bf16)", RECIPE, RECIPE_BF16),
        Pair("recipe without accelerate", RECIPE, replace(RECIPE, accelerate=False)),
        Pair(
            "recipe + all five",
            RECIPE,
            replace(RECIPE_BF16, cached_latents=True, cached_text=True, fused=True, accelerate=False),
        ),
        Pair("training.run.train.train in bf16, recipe in fp32", RECIPE, OURS_BF16),
        Pair("**training.run.train.train, both in bf16**", RECIPE_BF16, OURS_BF16, FASTER),
        Pair(LEAN_NAME, RECIPE, LEAN),
    ],
    512: [
        Pair("**training.run.train.train, both in fp32**", RECIPE, OURS, FASTER),
        Pair("recipe + latents and text cached", RECIPE, replace(RECIPE, cached_latents=True, cached_text=True)),
        Pair("recipe + gradient checkpointing", RECIPE, replace(RECIPE, checkpointing=True)),
        Pair(
            "recipe + latents and text cached, gradient checkpointing",
            RECIPE,
            replace(RECIPE, cached_latents=True, cached_text=True, checkpointing=True),
        ),
        Pair(f"our leanest against its plainest: {LEAN_NAME}", RECIPE, LEAN, FASTER, SMALLER),
    ],
}


# ---- one process a variant ----------------------------------------------------------------------------------------


def work(pipe, variant: Variant, sizes: Sizes, steps: int) -> None:
    """In the child: for each True that comes, train a block and send its seconds; at False send the peak memory."""
    from diffusers.utils import logging

    logging.set_verbosity_error()  # casting the VAE warns about an empty list of modules
    if sizes.threads:
        torch.set_num_threads(sizes.threads)
    with contextlib.suppress(EOFError, KeyboardInterrupt):  # the parent is gone
        (run_ours if variant.ours else run_recipe)(pipe, variant, sizes, steps)


def run_recipe(pipe, variant: Variant, sizes: Sizes, steps: int) -> None:
    loop = RecipeLoop(variant, sizes)
    while pipe.recv():
        began = time.perf_counter()
        for _ in range(steps):
            loop.step()
        pipe.send(time.perf_counter() - began)
    pipe.send(peak_memory())


def run_ours(pipe, variant: Variant, sizes: Sizes, steps: int) -> None:
    def between(durations: list[float]) -> bool:
        pipe.send(sum(durations))
        return pipe.recv()

    with tempfile.TemporaryDirectory(prefix="ref2v-bench-") as scratch:
        dataset = make_latents(Path(scratch) / "latents", 2 * sizes.batch, sizes.side // 8)
        shape = sizes.unet.model_dump(include={
            "block_channels", "layers_per_block", "transformer_depth", "middle_depth", "heads",
        })
        settings = {
            "refiner": {"shape": shape}, "data": {"batch_size": sizes.batch}, "precision": variant.precision,
            "optimizer": {"moments": "bf16" if variant.precision == "pure_bf16" else "fp32"},
            "gradient_checkpointing": variant.checkpointing,
        }
        config = configure(
            dataset, Path(scratch) / "run", settings, validation=NO_VALIDATION, epochs=100_000, device="cpu",
            data={"repeats": 10_000},  # the one checkpoint, in the peak memory too, is the one that stopping writes
        )
        if not pipe.recv():
            return
        clock = StepClock(steps, between)
        train(config, clock, clock.should_stop)
        pipe.send(peak_memory())


def peak_memory() -> float:
    """Peak resident memory of this process in GiB; NaN where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return kib / 2**20


class Worker:
    """A variant in its process, stopped on leaving the `with`."""

    def __init__(self, variant: Variant, sizes: Sizes, steps: int):
        context = multiprocessing.get_context("spawn")  # a forked child would start with the parent's memory
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, variant, sizes, steps), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self.pipe.close()
        self.process.join(30)
        self.process.terminate()
        self.process.join()

    def block(self) -> float:
        """Seconds of one more block."""
        self.pipe.send(True)
        return self.pipe.recv()

    def finish(self) -> float:
        """End it; peak memory in GiB."""
        self.pipe.send(False)
        return self.pipe.recv()


def compare(pair: Pair, sizes: Sizes, *, blocks: int, steps: int) -> tuple[list[float], float]:
    """(the reference's seconds over the variant's, block by block; the variant's peak memory over the reference's)."""
    with Worker(pair.reference, sizes, steps) as a, Worker(pair.variant, sizes, steps) as b:
        a.block(), b.block()  # warm up
        faster = [a.block() / b.block() for _ in range(blocks)]
        return faster, b.finish() / a.finish()


# ---- the tables ---------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=3, help="repetitions of each pair")
    parser.add_argument("--steps", type=int, default=1, help="steps of a block")
    parser.add_argument("--side", type=int, action="append", choices=PAIRS, help="pictures of one table; default: both")
    parser.add_argument("--batch", type=int, default=Sizes.batch)
    parser.add_argument("--threads", type=int, default=0, help="default: torch's own choice")
    parser.add_argument("--tiny", action="store_true", help="small networks: does the script work? Never written")
    parser.add_argument("--write", action="store_true", help="replace the sections of RESULTS.md")
    options = parser.parse_args()
    if options.tiny and options.write:
        parser.error("--tiny measures nothing worth writing")
    if options.threads:
        torch.set_num_threads(options.threads)
    for side in options.side or PAIRS:
        sizes = Sizes(side, options.batch, options.threads, options.tiny)
        body = measure(sizes, options.blocks, options.steps)
        report(f"diffusers_recipe_{side}", body, write=options.write)


def measure(sizes: Sizes, blocks: int, steps: int) -> str:
    """The section about pictures of one size."""
    rows = []
    for pair in PAIRS[sizes.side]:
        print(f"{pair.name} ...", end=" ", flush=True)
        faster, memory = compare(pair, sizes, blocks=blocks, steps=steps)
        print(f"{median(faster):.2f}, memory {memory:.2f}", flush=True)
        goals = [f">= {pair.faster}" if pair.faster else "", f"<= {pair.smaller}" if pair.smaller else ""]
        rows.append([pair.name, spread(faster, 2), goals[0], f"{memory:.2f}", goals[1]])
    network = "Tiny networks, of no meaning" if sizes.tiny else "sd15-half"
    return "\n".join(
        [
            f"### Training step against a diffusers recipe, {sizes.side} px",
            "",
            f"{network}, batch {sizes.batch}. Steps per second over the recipe's of the same row, median (min..max) of "
            f"{blocks} interleaved blocks of {steps} steps; peak resident memory over the recipe's. Ours also averages "
            "the weights and writes a checkpoint; the recipe does neither.",
            "",
            table(["variant", "steps/s over the recipe's", "goal", "peak memory", "goal"], rows),
            "",
            *_how_far(sizes),
            machine(),
        ]
    )


def _how_far(sizes: Sizes) -> list[str]:
    """What a table of small pictures says of large ones."""
    if sizes.side >= 512:
        return []
    return [
        "How far this holds: the work of VAE and UNet grows about alike with the pictures' area, so the gain of "
        "cached latents carries over to larger pictures. The text encoder's and AdamW's does not grow with it: at 768 "
        f"px they weigh {(768 / sizes.side) ** 2:.0f} times less against the rest than here.",
        "",
    ]


if __name__ == "__main__":
    main()
