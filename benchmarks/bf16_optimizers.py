"""AdamW for bfloat16 weights against AdamW for float32 ones: time, memory, accuracy, and whether it learns alike.

Step time: the parameters of a UNet of 18 M, each variant in turn with torch's plain multi-tensor AdamW and its
fused one on float32 weights. Accuracy: how far the weights end from those of float32 AdamW after noisy steps towards a
target, over the way they went. Fit: a UNet of 0.14 M on drawn pictures, the same batches for all; the loss is measured
in float32 on batches that it was not trained on.

    python -m benchmarks.bf16_optimizers [--write]
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import torch
from torch import nn

from benchmarks.problem import configure, demo_settings, make_pictures
from benchmarks.results import machine, report, spread, table
from training.config.network import UNetConfig
from training.data.batches import BatchSource
from training.data.shards import RefinerDataset
from training.objectives.residual.model import Refiner
from training.objectives.residual.objective import batch_loss
from training.objectives.residual.unet import build_unet
from training.run.optim.bf16_adamw import BF16AdamW
from training.run.optim.build import exact_weights
from training.run.optim.ema import EMA
from training.run.optim.schedule import warmup_schedule
from training.run.plan import make_plan

TIME_GOAL, FIT_GOAL = 1.5, 1.03
BETAS = (0.9, 0.999)
FULL, PLAIN = "float32 AdamW", "bfloat16 weights, torch's AdamW"
OURS = {
    f"bfloat16, {rounding}, moments {moments}": {"rounding": rounding, "moments": moments}
    for rounding in ("stochastic", "kahan", "master") for moments in ("fp32", "bf16")
}
FITTED = [name for name, with_ in OURS.items() if with_["moments"] == "fp32" or with_["rounding"] == "stochastic"]
SMALL = {
    "block_channels": [32], "layers_per_block": 1, "transformer_depth": [0], "middle_depth": 0, "heads": [1],
    "context_dim": 8,
}


def make(name: str, parameters: dict[str, nn.Parameter], *, lr: float, compiled: bool = False, **options):
    """The optimizer of that name over named parameters that have its dtype already."""
    if name in (FULL, PLAIN):
        return torch.optim.AdamW(parameters.values(), lr, BETAS, foreach=True, **options)
    names = {parameter: key for key, parameter in parameters.items()}
    groups = [{"params": list(parameters.values())}]
    return BF16AdamW(groups, names, lr=lr, betas=BETAS, compiled=compiled, **OURS[name], **options)


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == FULL else torch.bfloat16


# ---- time and memory ------------------------------------------------------------------------------------------------


def unet_parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    shape = UNetConfig(
        latent_channels=4, block_channels=(64, 128, 256), layers_per_block=1, transformer_depth=(0, 1, 1),
        middle_depth=1, heads=(4, 4, 4),
    )
    torch.manual_seed(0)
    parameters = dict(nn.Module.to(build_unet(shape), dtype).named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    return parameters


def seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def step_times(repetitions: int, compiled: bool) -> list[list[object]]:
    """Rows of the table: each variant's time over the two rivals', and its bytes a parameter."""
    full = unet_parameters(torch.float32)
    plain = make(FULL, full, lr=1e-4)
    fused = torch.optim.AdamW(copy.deepcopy(list(full.values())), 1e-4, BETAS, fused=True)
    for theirs, parameter in zip(fused.param_groups[0]["params"], full.values(), strict=True):
        theirs.grad = parameter.grad
    rows = []
    for name in (PLAIN, *OURS):
        for fuse in (False, True) if compiled and name in OURS else (False,):
            if fuse:
                torch._dynamo.reset()  # every variant is the same function; together they pass the limit of versions
            parameters = unet_parameters(torch.bfloat16)
            optimizer = make(name, parameters, lr=1e-4, compiled=fuse)
            taken = []
            for repetition in range(repetitions + 2):
                measured = [seconds(o.step) for o in (optimizer, plain, fused)]
                if repetition >= 2:  # the first ones allocate, or compile
                    taken.append(measured)
            ours, against, best = (list(column) for column in zip(*taken, strict=True))
            size = sum(t.nbytes for s in optimizer.state.values() for k, t in s.items() if k != "step")
            count = sum(parameter.numel() for parameter in parameters.values())
            rows.append([
                name + (", compiled" if fuse else ""),
                spread([a / b for a, b in zip(ours, against, strict=True)], 2),
                spread([a / b for a, b in zip(ours, best, strict=True)], 2),
                f"{2 + size / count:.0f}",
            ])  # fmt: skip
            print(*rows[-1], sep=" | ", flush=True)
    return rows


# ---- accuracy of the update -----------------------------------------------------------------------------------------


def walk(name: str, steps: int, lr: float, weight_decay: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(start, end) of `steps` noisy steps towards a target; the end with what is kept beside the weights."""
    generator = torch.Generator().manual_seed(0)
    start, target = (torch.randn(16384, generator=generator).bfloat16() for _ in range(2))
    parameters = {"w": nn.Parameter(start.clone().to(dtype_of(name)))}
    optimizer = make(name, parameters, lr=lr, weight_decay=weight_decay)
    w = parameters["w"]
    for _ in range(steps):
        noise = torch.randn(len(start), generator=generator)
        w.grad = (w.detach().float() - target + noise).bfloat16().to(w.dtype)
        optimizer.step()
    return start.double(), exact_weights(optimizer)(w).double()


def accuracy(steps: int) -> list[list[object]]:
    rows = []
    settings = [(1e-4, 0.01), (1e-5, 0.01), (1e-3, 0.1)]
    exact = [walk(FULL, steps, *setting) for setting in settings]
    for name in (PLAIN, *OURS):
        errors = []
        for setting, (start, end) in zip(settings, exact, strict=True):
            found = walk(name, steps, *setting)[1]
            errors.append(f"{100 * float((found - end).norm() / (end - start).norm()):.2f} %")
        rows.append([name, *errors])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


# ---- a real fit -----------------------------------------------------------------------------------------------------


class Fit:
    """One small refiner on drawn pictures; `run` trains it with an optimizer and measures it."""

    def __init__(self, dataset: Path, batch: int, crop: int):
        settings = demo_settings()
        config = configure(
            dataset, dataset.parent / "none", settings, refiner={"preset": "auto", "shape": SMALL}, device="cpu",
            precision="fp32", data={"batch_size": batch, "crop": crop},
        )
        self.ema_decay = config.ema_decay
        self.source = BatchSource(dataset, batch_size=batch, repeats=64, seed=1, crop=crop)
        self.plan = make_plan(config, RefinerDataset.open(dataset), self.source.per_epoch).objective
        self.unseen = [self.source[10**6 + index] for index in range(32)]  # other crops, noise and times

    def run(self, name: str, seed: int, steps: int, lr: float = 3e-4) -> float:
        """Loss of what a run's file would have, the averaged weights, in float32, over 32 batches."""
        torch.manual_seed(seed)
        net = nn.Module.to(build_unet(self.plan.unet), dtype_of(name)).train()
        parameters = dict(net.named_parameters())
        options = {"seed": seed} if name in OURS else {}
        optimizer = make(name, parameters, lr=lr, weight_decay=0.01, **options)
        ema, exact = EMA(net, self.ema_decay), exact_weights(optimizer)
        # the float32 weights compute in bfloat16 as well: what is compared is what happens to the weights
        refiner = Refiner(net, self.plan.s, self.plan.c_v, torch.bfloat16 if name == FULL else None, dtype_of(name))
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * warmup_schedule(step, 20, steps)
            objective, _ = batch_loss(refiner, self.plan, self.source[step], seed)
            objective.backward()
            nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update(step, exact)
        measured = Refiner(net, self.plan.s, self.plan.c_v)
        with torch.no_grad(), ema.swapped(net):
            return mean(float(batch_loss(measured, self.plan, batch, 1000)[1]) for batch in self.unseen)

    @property
    def parameters(self) -> int:
        return self.plan.size.parameters


def fit(dataset: Path, steps: int, seeds: int, batch: int, crop: int) -> tuple[list[list[object]], int]:
    problem = Fit(dataset, batch, crop)
    rows, exact = [], [problem.run(FULL, seed, steps) for seed in range(seeds)]
    rows.append([FULL, f"{mean(exact):.4f}", "1", ""])
    for name in (PLAIN, *FITTED):
        found = [problem.run(name, seed, steps) for seed in range(seeds)]
        ratio = mean(found) / mean(exact)
        rows.append([name, f"{mean(found):.4f}", f"{ratio:.3f}", "yes" if ratio <= FIT_GOAL else "no"])
        print(*rows[-1], sep=" | ", flush=True)
    return rows, problem.parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="timed steps of each optimizer")
    parser.add_argument("--walk", type=int, default=2000, help="steps of the accuracy test")
    parser.add_argument("--fit", type=int, default=2000, help="steps of the fit")
    parser.add_argument("--seeds", type=int, default=3, help="repetitions of the fit")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--crop", type=int, default=8)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled variants out")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--write", action="store_true", help="replace this section of RESULTS.md")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    times = step_times(options.repetitions, not options.no_compile)
    walks = accuracy(options.walk)
    with tempfile.TemporaryDirectory(prefix="ref2v-bench-") as scratch:
        dataset = make_pictures(Path(scratch) / "drawn", 24, 64)
        fits, count = fit(dataset, options.fit, options.seeds, options.batch, options.crop)
    body = "\n".join([
        "### AdamW for bfloat16 weights",
        "",
        "Time of one optimizer step over that of torch's plain multi-tensor and of its fused AdamW on float32 weights, "
        f"median (min..max) of {options.repetitions} interleaved steps; less is better. Goal, compiled: <= {TIME_GOAL} "
        "of plain. Bytes a parameter: weights and optimizer state, without the gradient (float32 AdamW: 12).",
        "",
        table(["optimizer", "time / plain float32", "time / fused float32", "bytes a parameter"], times),
        "",
        f"Error of the update after {options.walk} noisy steps: distance from the end of float32 AdamW over the way "
        "that it went; kahan and master with what they keep beside the weights.",
        "",
        table(["optimizer", "lr 1e-4, wd 0.01", "lr 1e-5, wd 0.01", "lr 1e-3, wd 0.1"], walks),
        "",
        f"A fit: a UNet of {count / 1e6:.2f} M parameters, {options.fit} steps of batch {options.batch} on drawn "
        f"pictures, mean over {options.seeds} seeds of the loss of what the file has (the averaged weights) on other "
        "batches, in float32. Goal: at most "
        f"{round((FIT_GOAL - 1) * 100)} % above float32 AdamW, which the plain one on bfloat16 weights must fail.",
        "",
        table(["optimizer", "loss", "over float32's", "within the goal"], fits),
        "",
        machine(),
    ])  # fmt: skip
    report("bf16_optimizers", body, write=options.write)


if __name__ == "__main__":
    main()
