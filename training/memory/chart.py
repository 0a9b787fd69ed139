"""The picture of an estimate: all backends side by side, and the layers of the chosen one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .attention import BACKENDS, MEASURED, TERMS
from .estimate import GIB, MIB, AttentionEstimate, in_words

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["attention_chart", "columns_chart"]

_COLOURS = dict(zip(TERMS, ("#4c78a8", "#9ecae9", "#b279a2", "#e45756", "#f58518", "#54a24b", "#bab0ac"), strict=True))


def attention_chart(estimate: AttentionEstimate) -> Image:
    """RGB picture of 1280 x 720 pixels."""
    # the object interface: pyplot keeps every figure in a process-wide registry, which a long-lived host would leak
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(12.8, 7.2), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    width, height = estimate.latent_pixels
    outcome = estimate.verdict.split(" (")[0]
    figure.suptitle(
        f"{estimate.shape.name}, {width} x {height}, batch {estimate.batch}"
        + (f", {estimate.frames} frames" if estimate.frames > 1 else "")
        + f", {estimate.dtype}{', CFG' if estimate.cfg else ''}, {estimate.backend}: {outcome}",
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
    canvas.draw()
    shape = canvas.get_width_height()
    return Image.frombytes("RGBA", shape, bytes(canvas.buffer_rgba())).convert("RGB")


_LABELS = {
    "weights": "#4c78a8", "parameters": "#4c78a8", "latents and text": "#9ecae9", "gradients": "#9ecae9",
    "activations": "#f58518", "attention": "#e45756", "moments": "#54a24b", "master weights": "#88d27a",
    "compensation": "#b79a20", "moving average": "#72b7b2", "temporaries": "#ff9da6", "gradient buckets": "#b279a2",
    "gathered blocks": "#9d755d", "allocator, workspaces": "#bab0ac", "device context": "#79706e",
}  # fmt: skip


def columns_chart(title: str, columns: dict[str, dict[str, int]], free: int) -> Image:
    """One bar for each entry of {name: {label: bytes}}, and a line at the free memory. RGB, 1280 x 720 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(12.8, 7.2), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.suptitle(title, fontsize=14)
    totals = [sum(terms.values()) for terms in columns.values()]
    unit, name = _unit(max(totals))
    left = [0.0] * len(totals)
    for label, colour in _LABELS.items():
        sizes = [terms.get(label, 0) / unit for terms in columns.values()]
        if any(sizes):
            axes.barh(list(columns), sizes, left=left, color=colour, label=label, height=0.7)
            left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, total in enumerate(totals):
        axes.text(left[row] + 0.01 * max(totals) / unit, row, in_words(total), va="center", fontsize=12)
    widest = 1.18 * max(totals) / unit
    if free / unit < 1.6 * widest:
        axes.axvline(free / unit, color="black", linestyle="--", linewidth=1.2, label=f"free: {in_words(free)}")
        widest = max(widest, 1.04 * free / unit)
    axes.set_xlim(0, widest)
    axes.set_xlabel(f"{name}" + ("" if free / unit < widest else f"     (free: {in_words(free)})"))
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    canvas.draw()
    return Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")


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
