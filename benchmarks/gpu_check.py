"""What a CPU cannot show, in one go on a machine with a CUDA GPU, in less than five minutes.

    python -m benchmarks.gpu_check [--write]

Needs torch, diffusers, safetensors, pydantic, pillow, numpy and tensorboard; neither the host nor the network.
Exit status: 0 every check holds, 1 one does not, 2 there is no GPU or a package is missing.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

RESULTS = Path(__file__).with_name("GPU_RESULTS.md")
PACKAGES = ("torch", "diffusers", "safetensors", "pydantic", "PIL", "numpy", "tensorboard")
TINY = {"data": {"batch_size": 16, "crop": 64}, "optimizer": {"learning_rate": 0.002}, "ema_decay": 0.9}


class Row(NamedTuple):
    check: str
    found: str
    holds: bool | None  # None: a figure, nothing to hold


class Bench:
    """The checks, on one device, with their datasets in a scratch folder."""

    def __init__(self, device: str, scratch: Path, *, pairs: int = 64, preset: str = "sd15-half", side: int = 96):
        from benchmarks.problem import make_latents, make_pictures

        self.device, self.scratch, self.preset = device, scratch, preset
        self.pictures = make_pictures(scratch / "drawn", pairs, 128)
        self.latents = make_latents(scratch / "latents", 4, side)
        self.side, self.runs = side, 0

    # ---- running the real loop ---------------------------------------------------------------------------------

    def config(self, dataset: Path, settings: dict[str, Any], run: str = "", **changes: Any):
        from benchmarks.problem import NO_VALIDATION, configure

        self.runs += 1
        return configure(
            dataset, self.scratch / (run or f"run-{self.runs}"), settings,
            device=self.device, validation=NO_VALIDATION, epochs=100, **changes,
        )

    def train_until(self, config, *stops: int) -> list[float]:
        """Stop and take up the run at each of `stops` steps; the losses of all its steps."""
        from training.run.train import train

        class Watch:
            pictures, step = False, 0

            def on_step(self, step, total, loss, eta):
                self.step = step

            def on_picture(self, picture): ...

            def on_measure(self, done, total): ...

            def on_message(self, text): ...

        for stop in stops:
            watch = Watch()
            train(config, watch, lambda watch=watch, stop=stop: watch.step >= stop)
        lines = (config.run / "metrics.jsonl").read_text().splitlines()
        return [line["loss"] for line in map(json.loads, lines) if "loss" in line]

    def newest(self, config) -> dict[str, Any]:
        """The newest checkpoint's tensors and state."""
        from training.run.checkpoints.checkpoint import load_newest

        found, _ = load_newest(config.run / ".checkpoints")
        parts = {"weights": found.weights, "ema": found.ema, "optimizer": found.optimizer}
        tensors = {f"{part}/{name}": value for part, values in parts.items() for name, value in values.items()}
        return {"tensors": tensors, "state": found.state}

    def time_steps(self, precision: str, batch: int, steps: int = 8, warm_up: int = 4) -> tuple[float, float]:
        """(seconds of a step, peak GiB of the device) of the real loop on the big preset."""
        import torch

        from benchmarks.step_clock import StepClock
        from training.run.train import train

        class Enough(Exception):
            """Ends a run without the checkpoint that stopping it writes: 3 GB for nothing."""

        taken: list[float] = []

        def between(durations: list[float]) -> bool:
            self.wait()
            taken.append(time.perf_counter())
            if len(taken) > steps + warm_up:
                raise Enough
            return True

        config = self.config(
            self.latents, {"refiner": {"preset": self.preset}}, precision=precision,
            data={"batch_size": batch, "repeats": 1000},
        )
        gc.collect()  # the run before it ended with an exception, whose frames may still hold its network
        if self.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            clock = StepClock(1, between)
            train(config, clock, clock.should_stop)
        except Enough:
            pass
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device != "cpu" else math.nan
        return (taken[-1] - taken[warm_up]) / steps, peak

    def wait(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()

    # ---- the checks --------------------------------------------------------------------------------------------

    def falls(self, precision: str, steps: int = 60) -> list[Row]:
        losses = self.train_until(self.config(self.pictures, TINY, precision=precision), steps)
        first, last = sum(losses[:5]) / 5, sum(losses[-10:]) / 10
        finite = all(map(math.isfinite, losses))
        found = f"{first:.3f} -> {last:.3f} in {len(losses)} steps"
        return [Row(f"training runs and its loss falls, {precision}", found, finite and last < 0.8 * first)]

    def scaler(self, steps: int = 40) -> list[Row]:
        config = self.config(self.pictures, TINY, precision="fp16")
        self.train_until(config, steps)
        checkpoint = self.newest(config)
        scale = checkpoint["state"]["scaler"].get("scale", 0.0)
        updates = max(float(v) for name, v in checkpoint["tensors"].items() if name.endswith("/step"))
        found = f"scale {scale:g} after {steps} steps, {steps - updates:.0f} of them skipped"
        return [Row("fp16 goes through the GradScaler", found, scale >= 1 and updates >= 0.8 * steps)]

    def resume(self, precision: str, deterministic: bool, half: int = 10) -> list[Row]:
        """A run stopped half-way and taken up, against one that was not, bit by bit; and that one against its twin."""
        import torch

        # not warn_only: with it, memory-efficient attention keeps its random order of sums and merely says so
        torch.use_deterministic_algorithms(deterministic)
        try:
            whole, twin, resumed = (self.config(self.pictures, TINY, precision=precision) for _ in range(3))
            for config, stops in ((whole, (2 * half,)), (twin, (2 * half,)), (resumed, (half, 2 * half))):
                self.train_until(config, *stops)
        finally:
            torch.use_deterministic_algorithms(False)
        a, b, c = (self.newest(config)["tensors"] for config in (whole, twin, resumed))
        how = "deterministic algorithms" if deterministic else "torch's own settings"
        same = _differing(a, c)
        return [
            # without them the same run twice may differ already; the claim is about the loop, not about the kernels
            Row(f"resumed = uninterrupted, {precision}, {how}", _words(same), not same if deterministic else None),
            Row(f"the same run twice, {precision}, {how}", _words(_differing(a, b)), None),
        ]

    def refine(self) -> list[Row]:
        """The same refiner, base and noise on CPU and device, 8 steps."""
        import torch

        from training.config.network import preset
        from training.objectives.residual import flow
        from training.objectives.residual.model import Refiner
        from training.objectives.residual.unet import build_unet

        torch.manual_seed(0)
        net = build_unet(preset("pixel-small", 3)).eval()
        torch.nn.init.normal_(net.conv_out.weight, std=0.05)  # it starts at zero, and then there is nothing to compare
        b, e = torch.randn(2, 2, 3, 85, 97)
        context = {"context": torch.zeros(2, 1, net.config.cross_attention_dim)}
        expected = Refiner(net, 0.1, 0.15).refine(b, e, context, flow.sigmas(8))
        net.to(self.device)
        on_device = [x.to(self.device) for x in (b, e)]
        context = {name: x.to(self.device) for name, x in context.items()}
        rows = []
        for name, tf32, precision, limit in (
            ("fp32", False, None, 1e-4),
            ("fp32 with TF32 convolutions (torch's default)", True, None, 1e-2),
            ("bf16 autocast", True, torch.bfloat16, 5e-2),
        ):
            torch.backends.cudnn.allow_tf32 = tf32
            refined = Refiner(net, 0.1, 0.15, precision).refine(*on_device, context, flow.sigmas(8)).cpu()
            error = float((refined - expected).norm() / (expected - b).norm())
            found = f"relative difference {error:.1e} of what was refined (limit {limit:g})"
            rows.append(Row(f"refined as on the CPU in fp32, {name}", found, error <= limit))
        torch.backends.cudnn.allow_tf32 = True
        return rows

    def speed_and_memory(self, repetitions: int = 3) -> list[Row]:
        """Steps/s of bf16 and fp16 over fp32 in turns, and the peak of each at batches 1 and 4."""
        peaks: dict[tuple[str, int], float] = {}
        seconds: dict[str, list[float]] = {"fp32": [], "bf16": [], "fp16": []}
        for _ in range(repetitions):
            for precision, taken in seconds.items():
                found, peaks[precision, 4] = self.time_steps(precision, 4)
                taken.append(found)
        for precision in seconds:
            _, peaks[precision, 1] = self.time_steps(precision, 1, steps=1)
        what = f"{self.preset}, {self.side}x{self.side} latents"
        rows = []
        for precision in ("bf16", "fp16"):
            ratios = [a / b for a, b in zip(seconds["fp32"], seconds[precision], strict=True)]
            found = f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            rows.append(Row(f"steps/s of {precision} over fp32 (TF32 convolutions), {what}, batch 4", found, None))
        for (precision, batch), peak in sorted(peaks.items()):
            rows.append(Row(f"peak of a training step, {what}, {precision}, batch {batch}", f"{peak:.2f} GiB", None))
        return rows

    def memory_estimates(self) -> list[Row]:
        """What was estimated against what was allocated: never under with the assumed overhead, at most 15 % over."""
        from benchmarks.gpu_memory import memory_checks
        from training.memory.machine import Machine, overhead

        gpu, rows = Machine(0, 0, True, ""), []
        for what, said, got in memory_checks():
            holds = got <= said + sum(overhead(gpu, said).values()) and said <= 1.15 * got
            found = f"{said / max(1, got):.3f} of {got / 2**20:.1f} MiB"
            rows.append(Row(f"estimated / allocated, {what}", found, holds))
        return rows

    def checks(self) -> dict[str, Callable[[], list[Row]]]:
        precisions = ("fp32", "bf16", "fp16")
        found: dict[str, Callable[[], list[Row]]] = {f"falls, {p}": partial(self.falls, p) for p in precisions}
        found["GradScaler"] = self.scaler
        for p in precisions:
            found[f"resume, {p}, deterministic algorithms"] = partial(self.resume, p, True)
            found[f"resume, {p}"] = partial(self.resume, p, False)
        found |= {"refine": self.refine, "speed and memory": self.speed_and_memory}
        return found | {"memory estimates": self.memory_estimates}


def _differing(a: dict, b: dict) -> list[str]:
    import torch

    common = a.keys() & b.keys()
    return sorted((a.keys() ^ b.keys()) | {name for name in common if not torch.equal(a[name], b[name])})


def _words(differing: list[str]) -> str:
    return f"{len(differing)} tensors differ, such as {differing[0]}" if differing else "every bit the same"


def run_checks(checks: dict[str, Callable[[], list[Row]]]) -> list[Row]:
    """A check that raises is a row too, so that the others still run."""
    rows = []
    for name, check in checks.items():
        began = time.perf_counter()
        try:
            new = check()
        except Exception as error:  # whatever it is belongs into the table
            new = [Row(name, " ".join(f"{type(error).__name__}: {error}".split())[:300], False)]
        for row in new:
            print(f"{time.perf_counter() - began:6.1f} s  {row.check}: {row.found}  {_verdict(row)}", flush=True)
        rows += new
    return rows


def _verdict(row: Row) -> str:
    return {True: "holds", False: "**fails**", None: ""}[row.holds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"These packages are missing here: {', '.join(missing)}.")
        return 2
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products; read at first use
    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA GPU that torch can use here, so there is nothing to check.")
        return 2
    from benchmarks.results import report, table

    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ref2v-gpu-") as scratch:
        rows = run_checks(Bench("cuda", Path(scratch)).checks())
    properties = torch.cuda.get_device_properties(0)
    body = "\n".join(
        [
            "# What a GPU shows",
            "",
            "`python -m benchmarks.gpu_check`",
            "",
            table(["check", "found", ""], [[row.check, row.found, _verdict(row)] for row in rows]),
            "",
            f"Machine: {properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, "
            f"{os.cpu_count()} cores, {datetime.date.today().isoformat()}; "
            f"{time.perf_counter() - began:.0f} s in all.",
        ]
    )
    report("gpu_check", body, write=options.write, path=RESULTS)
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
