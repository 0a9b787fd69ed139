"""Training Memory: one step of a network in numbers, on one GPU or several, and what to change first."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..config.sections import MOST_RANK
from ..errors import BadInput
from ..errors.markdown import markdown_table
from .estimate import in_words
from .machine import Machine, overhead
from .optimizers import EMA, GRADIENTS, LAYOUTS, OPTIMIZERS, PARAMETERS, Optimizer, Sizes, in_layout
from .phases import table_of
from .training_trace import ATTENTION, NETWORKS, StepTrace, TracedTraining, cells

__all__ = ["PRECISIONS", "TrainingEstimate", "TrainingQuestion", "estimate_training"]

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FORWARD, STEP, AVERAGE = "forward, backward", "optimizer step", "average"


@dataclass(frozen=True)
class TrainingQuestion:
    """precision: autocast over FP32 weights, as in a run's configuration; BF16 optimizers keep the weights in BF16.
    lora_rank: of adapters on all convolutions and linear layers; 0: the whole network is trained."""

    network: str = "sd15-half"
    width: int = 768
    height: int = 768
    batch: int = 1
    accumulation: int = 1
    precision: str = "bf16"
    optimizer: str = "AdamW"
    ema: bool = True
    checkpointing: bool = False
    attention: str = "pytorch"
    layout: str = "one GPU"
    gpus: int = 8
    lora_rank: int = 0

    def check(self) -> None:
        """BadInput for what cannot be."""
        for name, options in (
            ("network", NETWORKS), ("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("attention", ATTENTION),
            ("layout", LAYOUTS),
        ):  # fmt: skip
            if getattr(self, name) not in options:
                raise BadInput(f"{name}: expected one of {', '.join(options)}, got {getattr(self, name)!r}.")
        for name in ("batch", "accumulation", "gpus"):
            if not 1 <= getattr(self, name) <= 100_000:
                raise BadInput(f"{name}: expected 1 to 100000, got {getattr(self, name)}.")
        if not 0 <= self.lora_rank <= MOST_RANK:
            raise BadInput(f"lora_rank: expected 0 (the whole network) to {MOST_RANK}, got {self.lora_rank}.")
        if self.bf16_weights and self.precision != "bf16":
            raise BadInput(
                f"precision: {self.optimizer} keeps the weights in bf16 and computes in it, so expected bf16, got "
                f"{self.precision}."
            )
        cells(NETWORKS[self.network], self.width, self.height)

    @property
    def bf16_weights(self) -> bool:
        return OPTIMIZERS[self.optimizer].parameters == 2


@dataclass(frozen=True)
class TrainingEstimate:
    """counts: elements of each parameter that learns. asked: forward and backward as asked; other: with gradient
    checkpointing the other way round, or None."""

    question: TrainingQuestion
    machine: Machine
    sizes: Sizes
    counts: tuple[int, ...]
    asked: StepTrace
    other: StepTrace | None = field(default=None)

    @property
    def optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.question.optimizer]

    def _states(self) -> dict[str, int]:
        kept = {label: size * self.sizes.trained for label, size in self.optimizer.states.items()}
        return {**kept, **({EMA: 4 * self.sizes.trained} if self.question.ema else {})}

    def moments(self, trace: StepTrace | None = None) -> dict[str, dict[str, int]]:
        """moment -> label -> bytes on one GPU, overhead not included; the peak of training is the largest."""
        trace, states = trace or self.asked, self._states()
        parameters = trace.terms[PARAMETERS]
        step = self.optimizer.step_bytes(self.counts, gpu=self.machine.gpu)
        gradients = self.optimizer.gradients * self.sizes.trained
        moments = {
            FORWARD: {**trace.terms, **states},
            STEP: {PARAMETERS: parameters, GRADIENTS: gradients, **states, **({"temporaries": step} if step else {})},
        }
        if self.question.ema and self.question.bf16_weights:  # the average is FP32: each weight is cast for it in turn
            moments[AVERAGE] = {PARAMETERS: parameters, **states, "temporaries": 4 * max(self.counts)}
        return moments

    def peak_terms(self, trace: StepTrace | None = None) -> dict[str, int]:
        return max(self.moments(trace).values(), key=lambda terms: sum(terms.values()))

    def terms(self, layout: str | None = None) -> dict[str, int]:
        """label -> bytes on each GPU, the overhead included; they sum to the total."""
        layout = layout or self.question.layout
        if layout == "one GPU":
            terms = self.peak_terms()
        else:
            micro = self.question.accumulation
            terms = in_layout(layout, self.question.gpus, micro, self.optimizer, self.sizes, self.question.ema)
        return {**terms, **overhead(self.machine, sum(terms.values()))}

    @cached_property
    def total(self) -> int:
        return sum(self.terms().values())

    def _fits(self, total: int) -> bool:
        return total <= self.machine.free

    @property
    def verdict(self) -> str:
        counted = f"{in_words(self.total)} of {in_words(self.machine.free)} free"
        if self._fits(self.total):
            return f"fits with {in_words(self.machine.free - self.total)} to spare ({counted})"
        return f"does not fit; {in_words(self.total - self.machine.free)} are missing ({counted})"

    @cached_property
    def largest_batch(self) -> int:
        """Pictures at once that fit, 0: not one. All activations are taken to grow with the batch."""
        low, high = 0, 1
        while high <= 2**20 and self._fits(self._at_batch(high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(self._at_batch(middle)) else (low, middle)
        return low

    def _at_batch(self, batch: int) -> int:
        terms = {label: size for label, size in self.terms().items() if label not in overhead(self.machine, 0)}
        kept = sum(terms.values()) - terms.get("activations", 0)
        most = self.asked.most * batch / self.question.batch
        if self.question.layout == "one GPU":
            # more activations move the peak to where there are more of them and fewer gradients: all of both is more
            gradients = self.optimizer.gradients * self.sizes.trained
            kept += gradients - terms.get(GRADIENTS, 0)
        else:
            most *= terms["activations"] / max(1, self.sizes.activations)
        working = -int(-(kept + most) // 1)
        return working + sum(overhead(self.machine, working).values())

    # ---- what to change ----------------------------------------------------------------------------------------

    def changes(self) -> list[tuple[str, int, str]]:
        """(change, bytes then on each GPU, its price), the cheapest change first; those that save nothing left out."""
        asked = self.question
        changes: list[tuple[str, int, str]] = []

        def after(working: int) -> int:
            return working + sum(overhead(self.machine, working).values())

        if self.other is not None and not asked.checkpointing and asked.layout == "one GPU":
            other = sum(self.peak_terms(self.other).values())
            changes.append(("gradient checkpointing", after(other), "a second forward pass: about a third more time"))
        if asked.batch > 1:
            half = -(-asked.batch // 2)
            words = f"batch {half}, twice the accumulation"
            changes.append((words, self._at_batch(half), "nothing but some speed"))
        if asked.precision == "fp32":
            saved = self.asked.most // 2 if asked.layout == "one GPU" else self.terms()["activations"] // 2
            changes.append(("bf16 autocast (about)", self.total - saved, "on a CPU without bf16, time"))
        elif not asked.bf16_weights:
            share = 1 if asked.layout in ("one GPU", "DDP") else 1 / asked.gpus
            for words, name, price in (
                # what the precision pure_bf16 takes of itself, and what has to be asked for
                ("pure_bf16 (rounding kahan)", "AdamW, bf16 Kahan", "weights and layers in bf16"),
                ("pure_bf16, rounding stochastic", "AdamW, bf16 stochastic rounding", "a fit up to 3 % worse"),
            ):
                saved = self.optimizer.kept(self.sizes) - OPTIMIZERS[name].kept(self.sizes)
                changes.append((words, self.total - int(saved * share), price))
        if asked.layout in ("one GPU", "DDP"):
            sharded = sum(self.terms("FSDP2").values())
            changes.append((f"FSDP2 on {asked.gpus} GPUs", sharded, "GPUs, and traffic between them"))
        return [change for change in changes if change[1] < self.total]

    def advice(self) -> str:
        """One sentence: what to change first."""
        changes = self.changes()
        if not changes:
            return "Nothing here would save memory: train a smaller network or smaller pictures."
        enough = next((change for change in changes if self._fits(change[1])), None)
        if self._fits(self.total):
            most = min(changes, key=lambda change: change[1])
            return f"It fits as it is. What would save most: {most[0]} ({in_words(self.total - most[1])} less)."
        if enough:
            return f"Change first: {enough[0]}, which is enough ({in_words(enough[1])}); its price: {enough[2]}."
        most = min(changes, key=lambda change: change[1])
        return f"Change first: {most[0]} ({in_words(self.total - most[1])} less), which is not enough alone."

    # ---- what is said ------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, dict[str, int]]:
        """layout -> label -> bytes on each GPU, as in the table and the chart."""
        names = {layout: layout if layout == "one GPU" else f"{layout} x {self.question.gpus}" for layout in LAYOUTS}
        return {names[layout]: self.terms(layout) for layout in LAYOUTS}

    @property
    def title(self) -> str:
        asked = self.question
        words = f"{asked.network}, {asked.width}x{asked.height}, batch {asked.batch}"
        words += f" x {asked.accumulation}" if asked.accumulation > 1 else ""
        words += f", {'bf16 weights' if asked.bf16_weights else asked.precision}, {asked.optimizer}"
        words += f", attention {asked.attention}"
        words += ", gradient checkpointing" if asked.checkpointing else ""
        words += f", LoRA of rank {asked.lora_rank}" if asked.lora_rank else ""
        return words + f", {asked.layout}" + (f" x {asked.gpus}" if asked.layout != "one GPU" else "")

    def report(self) -> str:
        asked, sizes = self.question, self.sizes
        trained = f", {sizes.trained:,} of them trained (LoRA)" if asked.lora_rank else ""
        on = "with" if asked.checkpointing else "without"
        off = "without" if asked.checkpointing else "with"
        lines = [
            self.title,
            f"Verdict: {self.verdict}.",
            self.advice(),
            f"Memory: {in_words(self.machine.free)} free of {in_words(self.machine.total)}: {self.machine.where}.",
            f"Parameters: {sizes.parameters:,}{trained}. Largest batch that fits (at least): {self.largest_batch}.",
            f"Activations at most: {in_words(self.asked.most)} {on} gradient checkpointing"
            + (f", {in_words(self.other.most)} {off}." if self.other else "."),
            "",
            "On one GPU, at each moment of a step:",
            "",
            *table_of(self.moments()),
            "",
            "On each GPU (several: an upper bound, in closed form, not measured):",
            "",
            *table_of(self.columns()),
            "",
        ]
        rows = []
        for name, each in OPTIMIZERS.items():
            average = 4 if asked.ema else 0
            total = each.per_parameter + average
            states = sum(each.states.values())
            whole = each.kept(sizes) + average * sizes.trained
            bytes_each = [str(count) for count in (each.parameters, each.gradients, states, average, total)]
            rows.append([name, "chosen" if name == asked.optimizer else "", *bytes_each, in_words(whole)])
        head = ["bytes per parameter", "", "weights", "gradients", "states", "average", "sum", "all"]
        lines += markdown_table(head, rows, left=2)
        if changes := self.changes():
            rows = [[name, price, in_words(after)] for name, after, price in changes]
            lines += ["", *markdown_table(["one change", "its price", "then"], rows, left=2)]
        lines += [
            "",
            f"Assumed, not computed: {' and '.join(overhead(self.machine, 0))}.",
            "Not counted: text encoder and VAE (the dataset holds their results), validation, loader workers, NCCL's",
            "buffers.",
        ]
        return "\n".join(lines)


def estimate_training(question: TrainingQuestion, machine: Machine, *, compare: bool = True) -> TrainingEstimate:
    """Answer one question. compare: trace gradient checkpointing the other way round as well, for the advice.

    BadInput where something asked cannot be.
    """
    question.check()
    network = NETWORKS[question.network]
    height, width = cells(network, question.width, question.height)
    weights = torch.bfloat16 if question.bf16_weights else torch.float32
    traced = TracedTraining(network, weights, question.lora_rank)
    autocast = None if question.bf16_weights else PRECISIONS[question.precision]

    def trace(checkpointing: bool) -> StepTrace:
        return traced.trace(
            height, width, question.batch, autocast=autocast, checkpointing=checkpointing,
            attention=question.attention, gpu=machine.gpu, gradients_kept=question.accumulation > 1,
        )  # fmt: skip

    asked = trace(question.checkpointing)
    other = trace(not question.checkpointing) if compare else None
    size = 4 if question.precision == "fp32" else 2
    trained = sum(traced.counts)
    sizes = Sizes(traced.parameters, trained, traced.largest_unit(), traced.split_share(), asked.most, size)
    return TrainingEstimate(question, machine, sizes, traced.counts, asked, other)
