"""Attention Memory: one question, one answer, and how it is said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import BadInput
from ..errors.markdown import markdown_table
from .attention import BACKENDS, MEASURED, Peak, attention_peak
from .machine import GIB, Machine
from .models import LARGEST_SIDE, AttentionLayer, Latent, ModelShape

__all__ = [
    "CUSTOM",
    "DTYPES",
    "MOST_TOKENS",
    "SIZES",
    "AttentionEstimate",
    "estimate_attention",
    "in_words",
    "last_that_fits",
]

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
SIZES = {
    f"{width}x{height}": (width, height)
    for width, height in (
        (768, 768), (1344, 768), (768, 1344), (1366, 768), (1024, 1024), (512, 512), (832, 480), (1280, 720)
    )
}  # fmt: skip
CUSTOM = "custom"  # a size that is none of them
MIB = 2**20
MOST_TOKENS = 100_000


def last_that_fits(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n between `low` and `high`, both left out, that fits; `low`: none. It is looked for from above in
    steps of 2 %, so what fits in between alone may be missed."""
    beyond, n = high, high - 1
    while n > low and not fits(n):
        beyond, n = n, min(n - 1, n * 49 // 50)
    n = max(n, low)
    while beyond - n > 1:
        middle = (n + beyond) // 2
        n, beyond = (middle, beyond) if fits(middle) else (n, middle)
    return n


def in_words(size: int) -> str:
    """Bytes as a person reads them: 2.53 GiB."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.{0 if size >= 100 * unit else 1 if size >= 10 * unit else 2}f} {name}"
    return f"{size} B"


@dataclass(frozen=True)
class AttentionEstimate:
    """What `estimate_attention` was asked, and what follows from it. weights: bytes of the network's weights."""

    shape: ModelShape
    width: int
    height: int
    batch: int
    frames: int
    dtype: str
    cfg: bool
    text: int
    backend: str
    chosen: str
    weights: int
    machine: Machine
    half_math: bool = True

    @cached_property
    def latent(self) -> Latent:
        return self.shape.latent(self.width, self.height, self.batch, self.frames)

    @property
    def latent_bytes(self) -> int:
        """Without CFG's second half: what the graph hands on."""
        return self.latent.elements * DTYPES[self.dtype]

    @cached_property
    def layers(self) -> list[AttentionLayer]:
        # Split and sub-quadratic cut by what is free while the network runs. The host offloads weights as it sees fit,
        # so the most that can be free is taken: less would mean smaller chunks, and less memory than we say.
        options = {"gpu": self.machine.gpu, "free": self.machine.believed, "half_math": self.half_math}
        return list(self.shape.layers(self.latent, DTYPES[self.dtype], cfg=self.cfg, text=self.text, **options))

    def peaks(self, backend: str | None = None) -> list[Peak]:
        """One for each of `layers`."""
        return [attention_peak(layer.call, backend or self.backend) for layer in self.layers]

    def peak_layer(self, backend: str | None = None) -> tuple[AttentionLayer, Peak]:
        """The layer that needs most, and what it needs. Layers run one after another, so this is attention's peak."""
        return max(zip(self.layers, self.peaks(backend), strict=True), key=lambda pair: pair[1].total)

    @cached_property
    def attention(self) -> Peak:
        return self.peak_layer()[1]

    @property
    def refused(self) -> str | None:
        return next((peak.refused for peak in self.peaks() if peak.refused), None)

    @cached_property
    def tokens(self) -> int:
        """Tokens of the largest level, the text not counted."""
        return max(self.shape.tokens(level, self.latent) for level in self.shape.levels)

    @property
    def need(self) -> int:
        """Weights, latent and attention's peak; nothing else."""
        return self.weights + self.latent_bytes * (2 if self.cfg else 1) + self.attention.total

    @property
    def short(self) -> int:
        """Bytes that are missing; negative: bytes to spare."""
        return self.need - self.machine.free

    @property
    def fits(self) -> bool:
        """On a GPU at least with all weights offloaded; main memory has nowhere to offload them to."""
        return self.refused is None and self.short <= (self.weights if self.machine.gpu else 0)

    @cached_property
    def fitting(self) -> tuple[int, int]:
        """(width, height): what the host makes of the size asked, or the largest like it that fits; (0, 0): none."""
        cell = self.shape.vae
        if self.fits:
            return self.width // cell * cell, self.height // cell * cell
        step, ratio = self.shape.step, self.width / self.height

        def at(n: int) -> tuple[int, int]:
            return round(ratio * n) * step, n * step

        def fits(n: int) -> bool:
            width, height = at(n)
            return min(width, height) >= cell and replace(self, width=width, height=height).fits

        # from the largest there is, not from the one asked about: the answer is the same for all that do not fit
        return at(last_that_fits(fits, 0, int(LARGEST_SIDE / max(1.0, ratio)) // step + 1))

    @property
    def verdict(self) -> str:
        """One of three kinds of sentence, against the free memory."""
        counted = "weights, latent and the largest attention layer: "
        counted += f"{in_words(self.need)} of {in_words(self.machine.free)} free"
        if self.fits and self.short <= 0:
            return f"fits with {in_words(-self.short)} to spare ({counted})"
        if self.fits:
            return f"fits if the host offloads {in_words(self.short)} of weights ({counted})"
        why = f"{self.refused}; " if self.refused else ""
        width, height = self.fitting
        if not width:
            return f"does not fit, nor does any smaller size ({why}{counted})"
        like = _ratio(self.width, self.height)
        return f"does not fit; {width}x{height} is the largest {like} that does ({why}{counted})"

    def report(self) -> str:
        """The whole answer in Markdown."""
        latent, width, height = self.latent, *self.latent_pixels
        words = f"{self.shape.name}, {width}x{height}"
        if (width, height) != (self.width, self.height):
            words += f" (from {self.width}x{self.height}: the VAE works in steps of {self.shape.vae})"
        words += f", batch {self.batch}" + (f", {self.frames} frames" if self.frames > 1 else "")
        words += f", {self.dtype}" + (", CFG in one batch" if self.cfg else ", without CFG")
        sides = f"{latent.channels} x " + (f"{latent.frames} x " if self.shape.frame_ratio else "")
        layer, peak = self.peak_layer()
        lines = [
            words,
            f"Verdict: {self.verdict}.",
            f"Memory: {in_words(self.machine.free)} free of {in_words(self.machine.total)}: {self.machine.where}.",
            f"Weights: {in_words(self.weights)} ({self.weights:,} bytes).",
            f"Latent: {latent.batch} x {sides}{latent.height} x {latent.width} = {self.latent_bytes:,} bytes.",
            f"Backend: {self.chosen}, {MEASURED[self.backend]}.",
            "",
        ]
        rows = []
        for each, its in zip(self.layers, self.peaks(), strict=True):
            call, mark = each.call, "peak" if each is layer else ""
            scores = call.scores(call.q_tokens, call.k_tokens, call.element_bytes)
            heads = f"{call.heads} x {call.head_dim}"
            counts = [str(count) for count in (each.count, call.q_tokens, call.k_tokens)]
            rows.append([each.name, *counts, heads, in_words(its.total), in_words(scores), mark])
        head = ["attention layer", "layers", "queries", "keys", "heads", "one layer", "scores", ""]
        lines += markdown_table(head, rows)
        columns = [self.peaks(backend) for backend in BACKENDS]
        rows = [
            [each.name, *(in_words(its.total) for its in row)]
            for each, row in zip(self.layers, zip(*columns, strict=True), strict=True)
        ]
        lines += ["", *markdown_table(["one layer on", *BACKENDS], rows)]
        rows = [[term, f"{size:,}"] for term, size in (*peak.terms.items(), ("total", peak.total))]
        lines += ["", *markdown_table([f"the peak layer on {peak.runs}", "bytes"], rows), ""]
        rows = []
        for backend in BACKENDS:
            other = self.peak_layer(backend)[1]
            remarks = [MEASURED[backend], *([f"runs {other.runs}"] if other.runs != backend else []), *other.notes]
            if refused := next((p.refused for p in self.peaks(backend) if p.refused), None):
                remarks.append(refused)
            mark = "chosen" if backend == self.backend else ""
            rows.append([backend, mark, "; ".join(remarks), in_words(other.total)])
        lines += [
            *markdown_table(["backend", "", "remarks", "peak"], rows, left=3),
            "",
            "Not counted: activations outside attention (convolutions, feed-forward, skip connections), text encoder,",
            "VAE, attention masks, the allocator's rounding and the device's own context. Leave room for them.",
        ]
        return "\n".join(lines)

    @property
    def latent_pixels(self) -> tuple[int, int]:
        """(width, height) that the VAE gives back."""
        return self.latent.width * self.shape.vae, self.latent.height * self.shape.vae


def _ratio(width: int, height: int) -> str:
    """16:9, 1:1, 7:4; the nearest of the usual names, within 2 %."""
    for a, b in ((1, 1), (16, 9), (9, 16), (7, 4), (4, 7), (4, 3), (3, 4), (3, 2), (2, 3), (21, 9), (9, 21)):
        if abs(width * b / (height * a) - 1) < 0.02:
            return f"{a}:{b}"
    common = math.gcd(width, height)
    return f"{width // common}:{height // common}"


def estimate_attention(
    shape: ModelShape,
    width: int,
    height: int,
    machine: Machine,
    *,
    batch: int = 1,
    frames: int = 1,
    dtype: str = "bf16",
    cfg: bool = True,
    text: int = 0,
    backend: str = "auto",
    auto: str = "pytorch",
    weights: int | None = None,
    half_math: bool = True,
) -> AttentionEstimate:
    """Answer one question. auto: what "auto" stands for. weights: bytes; None: the parameters in `dtype`.

    BadInput for a dtype or backend of another name, and for sizes that no latent has.
    """
    if dtype not in DTYPES:
        raise BadInput(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}.")
    chosen = f"{auto} (auto)" if backend == "auto" else backend
    backend = auto if backend == "auto" else backend
    if backend not in BACKENDS:
        raise BadInput(f"backend: expected auto or one of {', '.join(BACKENDS)}, got {backend!r}.")
    if not 0 <= text <= MOST_TOKENS:
        raise BadInput(f"text: expected 0 (the usual number of tokens) to {MOST_TOKENS}, got {text}.")
    if weights is None:
        weights = shape.parameters * DTYPES[dtype]
    made = AttentionEstimate(
        shape, width, height, batch, frames, dtype, cfg, text, backend, chosen, weights, machine, half_math
    )
    shape.latent(width, height, batch, frames)  # refuses what cannot be, before anything is computed
    return made
