"""The pictures of an audit: errors and ranges along the network, and differences that an eye alone would miss."""

from __future__ import annotations

import math
from io import BytesIO
from typing import TYPE_CHECKING

import numpy
import torch
from einops import rearrange
from torch import Tensor

from .audit_report import AuditPart
from .measures import FP16_LARGEST

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["amplification", "chart", "difference_picture"]

_COLOURS = {"bf16": "tab:orange", "fp16": "tab:blue"}
_LEAST = 1e-8  # what is drawn for an error of 0
_LABEL, _WIDTH = 28, 512  # pixels: height of a label; least width of a difference picture
_MOST = 2**14


def chart(parts: list[AuditPart]) -> Image:
    """A row for each part: on the left the relative errors of its layers in the order in which they ran, on the right
    their largest values against FP16's limit.
    """
    # the object interface: pyplot keeps every figure in a process-wide registry, which a long-lived host would leak
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    rows = max(len(parts), 1)
    figure = Figure(figsize=(12, 3.4 * rows), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, part in zip(figure.subplots(rows, 2, squeeze=False), parts, strict=False):
        _draw_errors(axes[0], part)
        _draw_range(axes[1], part)
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")


def _draw_errors(axes, part: AuditPart) -> None:
    layers, worst = part.layers, 0.0
    for name in part.audit.names:
        colour = _COLOURS.get(name, "tab:green")
        so_far = [(k, x.so_far[name].relative) for k, x in enumerate(layers) if name in x.so_far]
        own = [(k, x.own[name].relative) for k, x in enumerate(layers) if name in x.own]
        for points, style, label in ((so_far, "-", "so far"), (own, ".", "own")):
            good = [(k, max(value, _LEAST)) for k, value in points if math.isfinite(value)]
            axes.plot(*_columns(good), style, color=colour, markersize=4, linewidth=1.2, label=f"{name} {label}")
            worst = max([worst, *(value for _, value in good)])
        bad = [k for k, value in [*so_far, *own] if not math.isfinite(value)]
        if bad:
            label = f"{name}: NaN or infinity"
            axes.plot(bad, [1.0] * len(bad), "x", color=colour, markersize=7, markeredgewidth=2, label=label)
    smallest = min((torch.finfo(_dtype(name)).eps for name in part.audit.names), default=1.0)
    axes.set(yscale="log", title=part.name, ylabel="relative error", ylim=(smallest / 50, max(2.0, 2 * worst)))
    axes.set_xlabel("module, in the order of the run")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right", ncols=2)


def _draw_range(axes, part: AuditPart) -> None:
    largest = [max(layer.largest, 1e-6) for layer in part.layers]
    axes.plot(range(len(largest)), largest, color="tab:green", linewidth=1.2, label="largest value, FP32 run")
    over = [k for k, layer in enumerate(part.layers) if layer.over]
    axes.plot(over, [largest[k] for k in over], "x", color="tab:red", markersize=7, label="overflows in fp16")
    axes.axhline(FP16_LARGEST, color="tab:red", linestyle="--", linewidth=1, label="fp16 ends here: 65504")
    axes.set(yscale="log", title=f"{part.name}: range", ylabel="magnitude", xlabel="module, in the order of the run")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="best")


def _columns(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [k for k, _ in points], [value for _, value in points]


def _dtype(name: str) -> torch.dtype:
    from .dtypes import DTYPES

    return DTYPES[name]


# ---------------------------------------------------------------------------------------------------- the differences


def amplification(difference: Tensor) -> int:
    """The power of two that brings the 99.9th percentile of |difference| near to 0.5: full contrast around mid-grey."""
    sizes = difference.abs().float().flatten()
    if sizes.numel() > 2**20:  # torch's quantile takes no more than 16 million values
        sizes = sizes[:: sizes.numel() // 2**20]
    high = float(torch.quantile(sizes, 0.999)) or float(difference.abs().max())
    return 1 if not high else min(max(2 ** math.floor(math.log2(0.5 / high)), 1), _MOST)


def difference_picture(difference: Tensor, what: str) -> Tensor:
    """[3, H, W] difference of two pictures in [0, 1] -> [H', W', 3] in [0, 1]: mid-grey where there is none, amplified,
    with a line below that says by how much. Small ones are enlarged by a whole number, to be seen.
    """
    from PIL import Image, ImageDraw, ImageFont

    difference = difference.float().cpu()
    finite = bool(torch.isfinite(difference).all())
    factor = amplification(difference) if finite else 1
    shown = (0.5 + factor * torch.nan_to_num(difference, 0.5, 0.5, -0.5)).clamp(0, 1)
    scale = max(1, -(-_WIDTH // shown.shape[-1]))
    shown = shown.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    height, width = shown.shape[-2:]
    label = Image.new("RGB", (width, _LABEL), "black")
    text = f"{what}, difference x {factor}" if finite else f"{what}: NaN or infinity"
    ImageDraw.Draw(label).text((6, 5), text, fill="white", font=ImageFont.load_default(size=15))
    strip = torch.from_numpy(numpy.array(label)) / 255
    return torch.cat([rearrange(shown, "channels height width -> height width channels"), strip])
