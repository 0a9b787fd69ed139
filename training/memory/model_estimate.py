"""Model Memory: weights and phases of a model on a machine, and the largest picture, batch or clip that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors.markdown import markdown_table
from .attention import MEASURED
from .estimate import in_words, last_that_fits
from .machine import Machine, overhead
from .models import LARGEST_SIDE, Latent, ModelShape
from .phases import Phase, Verdict, judge, table_of
from .weights import WeightRow, total_bytes

__all__ = ["DECODE", "DECODE_TILED", "ENCODE", "ENCODE_TILED", "NOT_COUNTED", "SAMPLING", "ModelEstimate"]

SAMPLING, DECODE, DECODE_TILED = "sampling", "VAE decode", "decode in tiles"
ENCODE, ENCODE_TILED = "VAE encode", "encode in tiles"
_TURNS = 24  # traces at most in looking for the largest that fits; three or four are usual

NOT_COUNTED = (
    "Not counted: the text encoder's activations (some MiB for CLIP), attention masks, what other nodes hook into the",
    "network (IP-Adapter, HyperTile, regional prompts), pictures that lie in the graph, and other programs.",
)


@dataclass(frozen=True)
class ModelEstimate:
    """The answer. parts: name -> weights, such as "MODEL"; remarks: said of them. trace_at: the phases at another size.

    latent, width, height: as asked, pixels floored to the VAE's ratio.
    """

    shape: ModelShape
    latent: Latent
    dtype: str
    cfg: bool
    backend: str
    chosen: str
    machine: Machine
    parts: dict[str, tuple[WeightRow, ...]]
    phases: tuple[Phase, ...]
    remarks: tuple[str, ...] = ()
    trace_at: Callable[[Latent], tuple[Phase, ...]] | None = None

    @property
    def weights(self) -> int:
        return sum(map(total_bytes, self.parts.values()))

    @property
    def pixels(self) -> tuple[int, int]:
        return self.latent.width * self.shape.vae, self.latent.height * self.shape.vae

    def phase(self, name: str) -> Phase | None:
        return next((phase for phase in self.phases if phase.name == name), None)

    def judged(self, phase: Phase) -> Verdict:
        return judge(phase.working, self.weights, self.machine)

    @cached_property
    def needed(self) -> tuple[Phase, ...]:
        """What a run goes through: sampling, and decoding. On a GPU the host decodes in tiles where memory runs out."""
        decode, tiled = self.phase(DECODE), self.phase(DECODE_TILED)
        if decode and tiled and self.machine.gpu and not self.judged(decode).fits:
            decode = tiled
        return tuple(phase for phase in (self.phase(SAMPLING), decode) if phase)

    @property
    def peak(self) -> Phase:
        """The phase that needs most."""
        return max(self.needed, key=lambda phase: phase.working)

    @property
    def total(self) -> int:
        """Bytes at the peak: all weights, the phase, the overhead."""
        return self.peak.needed(self.weights, self.machine)

    @property
    def verdict(self) -> str:
        outcome = self.judged(self.peak)
        counted = f"{self.peak.name} is the peak: {in_words(self.total)} of {in_words(self.machine.free)} free"
        if outcome.fits and outcome.short <= 0:
            return f"fits with {in_words(-outcome.short)} to spare ({counted})"
        if outcome.fits:
            return f"fits if the host offloads {in_words(outcome.short)} of weights ({counted})"
        width, height = self.largest_size
        if not width:
            return f"does not fit, nor does any smaller size ({counted})"
        most = "is the largest of this shape that does" if self.exact else "does, and perhaps a larger one like it"
        return f"does not fit; {width}x{height} {most} ({counted})"

    # ---- solving -----------------------------------------------------------------------------------------------

    def _area(self, latent: Latent) -> float:
        """The most by which the tokens of any level grow from the traced size to this one, per picture; or the least by
        which they shrink."""
        patch = self.shape.patch[1]
        deepest = max((level.shrink for level in self.shape.levels), default=3)  # a UNet attends in its middle
        steps = [2**shrink for shrink in range(deepest + 1)] if patch == 1 else [patch]
        ratios = [
            latent.frames * -(-latent.height // step) * -(-latent.width // step)
            / (self.latent.frames * -(-self.latent.height // step) * -(-self.latent.width // step))
            for step in steps
        ]  # fmt: skip
        return max(ratios) if max(ratios) > 1 else min(ratios)

    def _grown_fits(self, latent: Latent) -> bool:
        area, batch = self._area(latent), latent.batch / self.latent.batch
        larger = area * batch > 1
        most = max(  # tiles stay as they are, however large the picture
            phase.working if phase.name == DECODE_TILED and larger else phase.trace.grown(area, batch)
            for phase in self.needed
        )
        return judge(most, self.weights, self.machine).fits

    @property
    def fits(self) -> bool:
        return self.judged(self.peak).fits

    @property
    def exact(self) -> bool:
        """Whether what fits is monotone, so that the largest is known. Attention that is cut by what is free needs less
        where it begins to be cut smaller: there is always one more size that might fit.
        """
        return self.backend not in ("split", "sub-quadratic")

    def _resized(self, height: int) -> Latent:
        """The latent of this height in cells, in the shape asked for."""
        step = self.shape.patch[1]
        width = max(1, round(self.latent.width / self.latent.height * height / step)) * step
        return replace(self.latent, height=height, width=width)

    @cached_property
    def largest_size(self) -> tuple[int, int]:
        """(width, height) in pixels of the largest picture of this shape that fits, (0, 0): none."""
        cell, step, asked = self.shape.vae, self.shape.patch[1], self.latent
        longer = max(1.0, asked.width / asked.height)
        most = self._largest(lambda n: self._resized(n * step), int(LARGEST_SIDE / longer) // cell // step)
        if self.fits and most * step <= asked.height:
            largest = asked
        else:
            largest = self._resized(most * step)
        return (largest.width * cell, largest.height * cell) if largest.height else (0, 0)

    @cached_property
    def largest_batch(self) -> int:
        """Pictures or clips of the asked size that fit at once; 0: not one."""
        return self._most("batch", 4096)

    @cached_property
    def largest_frames(self) -> int:
        """Frames of a clip; 0: not one, or the network is for pictures."""
        ratio = self.shape.frame_ratio
        return (max(self._most("frames", 4096) - 1, -1)) * ratio + 1 if ratio else 0

    def _most(self, field: str, limit: int) -> int:
        asked = getattr(self.latent, field)
        if asked == 1 and not self.fits:
            return 0
        largest = self._largest(lambda n: replace(self.latent, **{field: n}), limit)
        return max(largest, asked) if self.fits else largest

    def _fits_grown_to(self, at: Callable[[int], Latent]) -> Callable[[int], bool]:
        return lambda n: self._grown_fits(at(n))

    def _largest(self, at: Callable[[int], Latent], limit: int) -> int:
        """The largest n of 1..limit for which `at(n)` fits, 0: none. The same whatever size was asked about, since it
        starts at the limit: one that does not fit is traced and scaled down to the largest that should, until one does.
        """
        if self.trace_at is None:
            return last_that_fits(self._fits_grown_to(at), 0, limit + 1)
        low, high, guess, above = 0, limit + 1, limit, self
        for turn in range(_TURNS):
            there = replace(self, latent=at(guess), phases=self.trace_at(at(guess)), trace_at=None)
            if there.fits:
                low = last_that_fits(there._fits_grown_to(at), guess, high)
            else:
                high, above = guess, there
            if high - low < 2:
                break
            guess = last_that_fits(above._fits_grown_to(at), low, high)
            if guess == low and (self.exact or 2 * high < 3 * low):
                break  # scaled down, what does not fit is never more than it would be
            if guess == low or turn > 8:  # what does not shrink with the picture makes small steps
                guess = (low + high) // 2 if high < 2 * low else math.isqrt(max(1, low) * high)
        return low

    # ---- what is said ------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, dict[str, int]]:
        """phase -> label -> bytes, as in the table and the chart."""
        return {phase.name: phase.terms(self.weights, self.machine) for phase in self.phases}

    @property
    def title(self) -> str:
        width, height = self.pixels
        words = f"{self.shape.name}, {width}x{height}, batch {self.latent.batch}"
        words += f", {self.latent.frames} latent frames" if self.shape.frame_ratio else ""
        return words + f", {self.dtype}" + (", CFG in one batch" if self.cfg else ", one conditioning at a time")

    def report(self) -> str:
        lines = [
            self.title,
            f"Verdict: {self.verdict}.",
            f"Memory: {in_words(self.machine.free)} free of {in_words(self.machine.total)}: {self.machine.where}.",
            f"Attention: {self.chosen}, {MEASURED[self.backend]}.",
            self._solved(),
            "",
            *table_of(self.columns()),
        ]
        host = [
            f"{phase.name} {in_words(phase.host)} (here {in_words(phase.working)})"
            for phase in self.phases
            if phase.host is not None
        ]
        lines += ["", f"ComfyUI's own figures, beside the weights: {', '.join(host)}."] if host else []
        cells = []
        for part, rows in self.parts.items():
            cells.append([part, "", "", f"{sum(row.count for row in rows):,}", f"{total_bytes(rows):,}"])
            cells += [["", row.module, row.dtype, f"{row.count:,}", f"{row.size:,}"] for row in rows]
        lines += ["", *markdown_table(["weights", "of", "dtype", "numbers", "bytes"], cells, left=3)]
        lines += ["", *self.remarks] if self.remarks else []
        assumed = " and ".join(label for label in overhead(self.machine, 0))
        lines += ["", f"Assumed, not computed: {assumed}.", *NOT_COUNTED]
        return "\n".join(lines)

    def _solved(self) -> str:
        width, height = self.largest_size
        if not width:
            return "Largest that fits: none."
        words = f"Largest that fits: {width}x{height} in this shape, or batch {self.largest_batch} at this size"
        words += f", or {self.largest_frames} frames" if self.shape.frame_ratio else ""
        return f"{words}{'' if self.exact else ' (at least)'}."
