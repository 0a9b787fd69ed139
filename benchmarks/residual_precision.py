"""What a refiner gains in each precision mode, and whether its gradients need bfloat16's range.

The demo's data and settings. The demo's own network in float32, under bfloat16 autocast and with bfloat16 weights; a
tiny network, several seeds, also under float16 autocast with the loss scaler (on a CPU float16 is too slow for more).
The range: of the demo network's float32 gradients without loss scaling, before and after training, how many would be
lost in float16, in weights and in activations. (In the tiny one each channel has a norm of its own, so that many
gradients are zero but for rounding.)

    python -m benchmarks.residual_precision --dataset FOLDER [--write]

Runs lie in .dev/benchmarks/residual_precision: a stopped one goes on, a finished one is read. All of them take an hour
on a quiet core, most of it in float16 and with the demo's network (`--demo fp32 bf16` leaves one out).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.epochs import Progress, gains
from benchmarks.problem import NO_VALIDATION, configure, demo_settings
from benchmarks.results import machine, report, table
from training.config.train_config import TrainConfig
from training.data.batches import BatchSource
from training.data.shards import RefinerDataset
from training.objectives.residual.file import load_refiner
from training.objectives.residual.model import Refiner
from training.objectives.residual.objective import batch_loss
from training.objectives.residual.unet import build_unet
from training.run.plan import make_plan
from training.run.train import train

RUNS = Path(__file__).resolve().parent.parent / ".dev" / "benchmarks" / "residual_precision"
LOSS = "held-out loss"
MODES = ("fp32", "bf16", "pure_bf16", "fp16")
TINY = {
    "refiner": {"preset": "auto", "shape": {
        "block_channels": [32], "layers_per_block": 1, "transformer_depth": [0], "middle_depth": 0, "heads": [1],
        "context_dim": 8,
    }},
    "data": {"batch_size": 4, "repeats": 2, "crop": 16},
    "validation": {"pictures": 0, "crop": 32},  # float16 again: whole crops of 128 would take an hour
}  # fmt: skip
SMALLEST, LARGEST = 2.0**-24, 65504.0  # of float16, the smallest with its last bit alone


def run_of(dataset: Path, runs: Path, mode: str, seed: int, *, tiny: bool) -> TrainConfig:
    name = f"{'tiny' if tiny else 'demo'}-{mode}-{seed}"
    return configure(
        dataset, runs / name, demo_settings(), precision=mode, seed=seed,
        **(TINY if tiny else {"validation": NO_VALIDATION}),
    )  # fmt: skip


def trained(config: TrainConfig) -> dict[str, Any]:
    """The report of that run, trained now or before."""
    result = train(config, Progress(config.run.name))
    evaluation = result.report["evaluation"]
    loss = mean(evaluation["loss_per_sigma"].values())
    return {LOSS: loss, **gains(evaluation["measures"]), "scaler": result.report["watched"]["loss_scale"]}


def rows_of(results: dict[str, list[dict[str, Any]]]) -> list[list[object]]:
    """One row a mode: each gain, and its difference to float32's in the same seed."""
    rows = []
    for mode, found in results.items():
        row: list[object] = [mode]
        for name in (name for name in found[0] if name != "scaler"):
            values = [each[name] for each in found]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            row.append(f"{mean(values):.3f}{spread}")
        apart = [each[LOSS] / whole[LOSS] - 1 for each, whole in zip(found, results["fp32"], strict=False)]
        row.append(f"{mean(apart):+.1%}")
        rows.append(row)
    return rows


def gradient_range(config: TrainConfig, *, after: bool, batches: int = 16) -> list[object]:
    """How float16 would hold what backward makes in float32: largest numbers, and the share that it would lose."""
    data = RefinerDataset.open(config.dataset)
    source = BatchSource(
        config.dataset, batch_size=config.data.batch_size, repeats=config.data.repeats, seed=config.seed,
        crop=config.data.crop, flip=config.data.mirror, caption_dropout=config.data.caption_dropout,
    )  # fmt: skip
    plan = make_plan(config, data, source.per_epoch).objective
    torch.manual_seed(config.seed)
    net = build_unet(plan.unet).train()
    if after:
        weights, _, _ = load_refiner(config.run / "refiner.safetensors")
        net.load_state_dict(weights)
    activations, gradients = [], []
    for name, module in net.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(lambda _, given, output: activations.append(output.detach().abs().max()))
            if name != "conv_in":  # its input asks for no gradient
                module.register_full_backward_hook(lambda _, given, output: gradients.append(output[0].detach()))
    weights, seen, lost = [], Tallies(), Tallies()
    for index in range(batches):
        objective, _ = batch_loss(Refiner(net, plan.s, plan.c_v, None), plan, source[index], config.seed)
        net.zero_grad()
        objective.backward()
        for gradient in gradients:
            seen.add(gradient)
        gradients.clear()
        for parameter in net.parameters():
            if parameter.grad is not None:
                lost.add(parameter.grad)
                weights.append(float(parameter.grad.abs().max()))
    when = "after training" if after else "before training"
    return [
        when, f"{float(max(activations)):.1f}", f"{max(weights):.2g}", lost.share(), f"{seen.largest:.2g}",
        seen.share(),
    ]  # fmt: skip


class Tallies:
    """Counts the numbers that float16 rounds to zero, of those that are not zero."""

    def __init__(self) -> None:
        self.gone = self.all = 0
        self.largest = 0.0

    def add(self, tensor: Tensor) -> None:
        size = tensor.abs()
        some = size > 0
        self.all += int(some.sum())
        self.gone += int((some & (size <= SMALLEST / 2)).sum())
        self.largest = max(self.largest, float(size.max()))

    def share(self) -> str:
        return f"{self.gone / max(1, self.all):.2%}"


def describe(demo: dict, tiny: dict, parameters: int, seeds: int, ranges: list[list[object]]) -> str:
    names = [name for name in demo["fp32"][0] if name != "scaler"]
    scaler = tiny["fp16"][0]["scaler"]
    scales = " -> ".join(f"{scale:g}" for _, scale in scaler["history"])
    return "\n".join(
        [
            "### Residual training in each precision mode",
            "",
            "The demo's 8 epochs; loss on its held-out pictures (1 = nothing learnt) and gains over the base there:",
            "PSNR in dB, the spectrum's fall. Last column: the loss against fp32's with the same seed. The demo's",
            "network, one seed:",
            "",
            table(["mode", *names, "loss against fp32"], rows_of(demo)),
            "",
            f"A network of {parameters:,} parameters, crops of {TINY['data']['crop']} pixels, {seeds} seeds, mean ±",
            f"deviation. fp16 is autocast with the loss scaler (first seed: scale {scales}, {scaler['skipped']} steps",
            "skipped):",
            "",
            table(["mode", *names, "loss against fp32"], rows_of(tiny)),
            "",
            "Does it need bfloat16's range? The demo network's numbers in float32, without loss scaling (float16 ends",
            f"at {LARGEST:g} and rounds to zero below {SMALLEST / 2:.1g}):",
            "",
            table(
                ["", "largest activation", "largest weight gradient", "of them lost", "largest activation gradient",
                 "of them lost"], ranges,
            ),
            "",
            machine(),
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, help="a dataset with held-out pairs, such as the demo's")
    parser.add_argument("--seeds", type=int, default=3, help="of the tiny network (default: %(default)s)")
    modes = {"nargs": "+", "choices": MODES, "default": MODES[:-1]}
    parser.add_argument("--demo", **modes, help="modes of the demo's network, fp32 among them")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where the runs lie (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="replace this section of RESULTS.md")
    options = parser.parse_args()
    tiny = {
        mode: [trained(run_of(options.dataset, options.runs, mode, seed, tiny=True)) for seed in range(options.seeds)]
        for mode in MODES
    }
    first = run_of(options.dataset, options.runs, "fp32", 0, tiny=True)
    demo = {mode: [trained(run_of(options.dataset, options.runs, mode, 0, tiny=False))] for mode in options.demo}
    whole = run_of(options.dataset, options.runs, "fp32", 0, tiny=False)
    ranges = [gradient_range(whole, after=after) for after in (False, True)]
    parameters = train(first).report["parameters"]
    report("residual_precision", describe(demo, tiny, parameters, options.seeds, ranges), write=options.write)


if __name__ == "__main__":
    main()
