"""The picture of an estimate: all backends side by side, and the layers of the chosen one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .attention import BACKENDS, MEASURED, TERMS
from .estimate import GIB, MIB, AttentionEstimate, in_words

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["attention_chart"]

_COLOURS = dict(zip(TERMS, ("#4c78a8", "#9ecae9", "#b279a2", "#e45756", "#f58518", "#54a24b", "#bab0ac"), strict=True))


def attention_chart(estimate: AttentionEstimate) -> Image:
    """RGB picture of 1280 x 720 pixels."""
    # the object interface: pyplot keeps every figure in a process-wide registry, which a long-lived host would leak
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(12.8, 7.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    width, height = estimate.latent_pixels
    said = estimate.verdict.split(" (")[0]
    figure.suptitle(
        f"{estimate.shape.name}, {width} x {height}, batch {estimate.batch}"
        + (f", {estimate.frames} frames" if estimate.frames > 1 else "")
        + f", {estimate.dtype}{', CFG' if estimate.cfg else ''}, {estimate.backend}: {said}",
        fontsize=14,
    )
    peaks = [estimate.peak_layer(backend)[1] for backend in BACKENDS]
    names = [f"{b}{' *' if 'not' in MEASURED[b] else ''}" for b in BACKENDS]
    _bars(left, names, peaks, chosen=BACKENDS.index(estimate.backend))
    left.set_title("Largest attention layer, on each backend")
    left.set_xlabel(f"{left.get_xlabel()}     (* not measured on a GPU)")
    room = estimate.machine.free - estimate.weights
    most = max(peak.total for peak in peaks)
    unit = _unit(most)[0]
    if 0 < room < 1.25 * most:
        left.axvline(room / unit, color="black", linestyle="--", linewidth=1.2, label="free beside the weights")
    left.legend(loc="lower right", frameon=True)

    counts = [f"{layer.name}\n{layer.call.q_tokens} queries, {layer.count} layers" for layer in estimate.layers]
    _bars(right, counts, estimate.peaks())
    right.set_title(f"Each layer on {estimate.backend}")
    canvas = figure.canvas
    canvas.draw()
    shape = canvas.get_width_height()
    return Image.frombytes("RGBA", shape, bytes(canvas.buffer_rgba())).convert("RGB")


def _unit(size: int) -> tuple[int, str]:
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def _bars(axes, names, peaks, chosen: int | None = None) -> None:
    """Horizontal bars stacked by term, the first on top, the total in words behind each."""
    most = max(peak.total for peak in peaks)
    unit, name = _unit(most)
    left = [0.0] * len(peaks)
    for term in TERMS:
        sizes = [peak.terms.get(term, 0) / unit for peak in peaks]
        if any(sizes):
            axes.barh(names, sizes, left=left, color=_COLOURS[term], label=term, height=0.7)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, peak in enumerate(peaks):
        words = "refused" if peak.refused else in_words(peak.total)
        axes.text(left[row] + 0.01 * most / unit, row, words, va="center", weight="bold" if row == chosen else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.22 * most / unit)
    axes.set_xlabel(name)
    axes.spines[["top", "right"]].set_visible(False)
    if chosen is not None:
        axes.get_yticklabels()[chosen].set_weight("bold")
