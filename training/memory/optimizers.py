"""Bytes that training keeps for every parameter, by optimizer and by parallel layout, in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..config.choices import Moments, Rounding
from ..errors import BadInput
from ..run.optim.bf16_adamw import CHUNK, CPU_CHUNK, LARGE

__all__ = ["EMA", "GRADIENTS", "LAYOUTS", "OPTIMIZERS", "PARAMETERS", "Optimizer", "Sizes", "in_layout"]

SCALARS = 256  # a step's own numbers: rates, the keys of the noise
PARAMETERS, GRADIENTS, EMA = "parameters", "gradients", "moving average"


@dataclass(frozen=True)
class Optimizer:
    """Bytes per parameter. states: label -> bytes, the moments among them.

    step: bytes per parameter that come and go in a step. For our own AdamW, whose step goes through the parameters in
    chunks, joined and alone: bytes per element of a chunk, where it joins several small parameters or is (a piece of)
    one large parameter; how many elements these are follows training/run/optim/bf16_adamw.py.
    rounding, moments: what a run's configuration calls this one, for weights in BF16.
    """

    parameters: int
    gradients: int
    states: Mapping[str, int]
    step: int = 0
    joined: int = 0
    alone: int = 0
    rounding: Rounding | None = None
    moments: Moments = "fp32"

    @property
    def per_parameter(self) -> int:
        """Parameters, gradients and states; no average, no activations."""
        return self.parameters + self.gradients + sum(self.states.values())

    def kept(self, sizes: Sizes) -> int:
        """Parameters, and gradients and states of those that learn."""
        return self.parameters * sizes.parameters + (self.per_parameter - self.parameters) * sizes.trained

    def step_bytes(self, counts: Sequence[int], *, gpu: bool) -> int:
        """Bytes that come and go in a step over parameters of so many elements each."""
        if self.rounding is None:
            return self.step * sum(counts)
        if not gpu:
            return SCALARS + self.joined * min(CPU_CHUNK, sum(counts))
        small = sum(count for count in counts if count < LARGE)
        large = max((count for count in counts if count >= LARGE), default=0)
        return SCALARS + max(self.joined * min(CHUNK, small), self.alone * large)


def _ours(rounding: Rounding, moments: Moments, rest: dict[str, int], joined: int, alone: int) -> Optimizer:
    states = {"moments": 8 if moments == "fp32" else 4, **rest}
    return Optimizer(2, 2, states, joined=joined, alone=alone, rounding=rounding, moments=moments)


# Loshchilov & Hutter 2019: two moments, in FP32 unless said otherwise.
OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": Optimizer(4, 4, {"moments": 8}),  # fused=True, as our loop has it: one kernel, no temporaries
    # PyTorch's default on CUDA: the square root of all second moments at once
    "AdamW, foreach": Optimizer(4, 4, {"moments": 8}, step=4),
    # the update in FP32, a chunk at a time: the weight, the update, random bits and their index
    "AdamW, bf16 stochastic rounding": _ours("stochastic", "fp32", {}, 42, 22),
    "AdamW, bf16 Kahan": _ours("kahan", "fp32", {"compensation": 2}, 39, 17),
    "AdamW, bf16 with FP32 master": _ours("master", "fp32", {"master weights": 4}, 36, 12),
    # moments in BF16, stochastically rounded: rounded to nearest, the second one would never decay
    "AdamW, bf16 stochastic rounding, bf16 moments": _ours("stochastic", "bf16", {}, 50, 34),
    "AdamW, bf16 Kahan, bf16 moments": _ours("kahan", "bf16", {"compensation": 2}, 52, 34),
    "AdamW, bf16 with FP32 master, bf16 moments": _ours("master", "bf16", {"master weights": 4}, 50, 30),
}


@dataclass(frozen=True)
class Sizes:
    """What a layout is computed from, in bytes but for the counts.

    parameters, trained: numbers of the network, and those of them that learn (fewer with LoRA). largest_unit: those of
    the largest block that FSDP gathers at once. split: the share of parameters that tensor parallelism cuts.
    activations: the most that live at once on one GPU.
    """

    parameters: int
    trained: int
    largest_unit: int
    split: float
    activations: int
    compute_bytes: int


LAYOUTS = ("one GPU", "DDP", "FSDP2", "TP", "PP")


def in_layout(
    layout: str, gpus: int, micro_batches: int, optimizer: Optimizer, sizes: Sizes, ema: bool
) -> dict[str, int]:
    """label -> bytes on each GPU, at an upper bound: all gradients beside the most activations.

    DDP (torch.nn.parallel.DistributedDataParallel): all of it on every GPU, and flat buckets as large as the gradients
    (gradient_as_bucket_view saves them). FSDP2 (torch.distributed.fsdp.fully_shard, ZeRO stage 3, Rajbhandari et al.
    2020): 1/n of everything, and whole blocks while they are used: one gathered, one being gathered ahead and its
    buffer; the gradients of one being reduced in FP32 and their buffer. TP (Megatron-LM, Shoeybi et al. 2019): the
    matrices of attention and feed-forward are cut n-fold, the rest is on every GPU; activations are not reckoned
    smaller. PP (1F1B, Narayanan et al. 2021): 1/n of the layers, if they can be cut evenly; of m micro-batches at most
    n are under way.
    """
    if layout not in LAYOUTS:
        raise BadInput(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}.")
    if not 1 <= gpus <= 100_000:
        raise BadInput(f"gpus: expected 1 to 100000, got {gpus}.")
    if not 1 <= micro_batches <= 100_000:
        raise BadInput(f"micro_batches: expected 1 to 100000, got {micro_batches}.")
    n = 1 if layout == "one GPU" else gpus
    kept = {PARAMETERS: optimizer.parameters, GRADIENTS: optimizer.gradients, **optimizer.states}
    if ema:
        kept[EMA] = 4
    share = {"FSDP2": 1 / n, "PP": 1 / n, "TP": 1 - sizes.split + sizes.split / n}.get(layout, 1.0)
    count = {label: sizes.parameters if label == PARAMETERS else sizes.trained for label in kept}
    terms = {label: -int(-count[label] * size * share // 1) for label, size in kept.items()}
    under_way = min(n, micro_batches) / (micro_batches * n) if layout == "PP" else 1
    terms["activations"] = -int(-sizes.activations * under_way // 1)
    if layout == "DDP" and n > 1:
        terms["gradient buckets"] = sizes.trained * optimizer.gradients
    if layout == "FSDP2" and n > 1:
        terms["gathered blocks"] = sizes.largest_unit * (3 * sizes.compute_bytes + 2 * 4)
    return terms
