"""What a person reads after a run: report.json, the loss plot and the picture grid."""

from __future__ import annotations

import json
import math
import os
import platform
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange

from ...storage.files import write_whole

if TYPE_CHECKING:
    from PIL.Image import Image

    from ...config.train_config import TrainConfig
    from ...data.shards import RefinerDataset
    from ...objectives.evaluate import Evaluation
    from ..plan import Plan
    from .journal import Journal

COLUMNS = ("base", "refined", "target")
GAP = 4  # pixels between pictures
BETWEEN = 16  # and between columns of rows
SCREEN = (1920, 1080)
ROWS = "ref2v rows"  # PNG text: [[width, height], ...] of the pictures of each row


def write(
    folder: Path,
    config: TrainConfig,
    plan: Plan,
    data: RefinerDataset,
    journal: Journal,
    measured: Evaluation,
    *,
    seconds: float,
    steps_here: int,
    held_out: bool,
    watched: dict[str, Any],
) -> dict[str, Any]:
    """Write report.json, loss.png and grid.png into the run's folder; returns the report."""
    _, losses = journal.series("loss")
    report = {
        "refiner": "refiner.safetensors",
        "parameters": plan.objective.size.parameters,
        "base_ratio": plan.objective.size.ratio,
        "choices": plan.choices,
        **plan.objective.report(),
        "dataset": {
            "content_hash": data.content_hash,
            "train": len(data.train),
            "held_out": len(data.held_out),
            "residual_rms": data.residual_rms,
            "latent": data.latent,
            "base": data.info["base"],
        },
        "training": {
            "epochs": plan.epochs,
            "steps": plan.total_steps,
            "steps_in_this_session": steps_here,
            "seconds": round(seconds, 1),
            "seconds_per_step": round(seconds / max(plan.total_steps, 1), 4),
            "first_loss": losses[0] if losses else None,  # None where somebody deleted metrics.jsonl
            "last_loss": sum(losses[-20:]) / len(losses[-20:]) if losses else None,
        },
        # the times that it was trained on, the loss scaler's history, the memory over the steps
        "watched": watched,
        # without held-out pairs the figures are those of pairs that the refiner was trained on, and say so
        "evaluation": {
            "on": "held-out pairs" if held_out else "training pairs (none were held out)",
            "precision": config.precision,  # of the training
            "measured_in": "float32",
            **measured.as_json(),
        },
        "machine": machine_of(plan),
    }
    if measured.pictures:
        write_whole(folder / "grid.png", as_png(screen_grid(measured.pictures)))
    write_whole(folder / "loss.png", as_png(loss_picture(journal, plan.objective.loss_of_nothing)))
    write_whole(folder / "report.json", json.dumps(report, indent=1) + "\n")
    return report


def machine_of(plan: Plan) -> dict[str, Any]:
    """Where a run trains."""
    gpu = {"gpu": torch.cuda.get_device_name(plan.compute.device)} if plan.compute.device.type == "cuda" else {}
    return {
        "device": str(plan.compute.device),
        **gpu,
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def read_report(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def grid_picture(pictures: list[dict[str, torch.Tensor]], columns: tuple[str, ...] = COLUMNS) -> Image:
    """One row a pair, base | refined | target from left to right. Values: [3, h, w] in [0, 1]."""
    from PIL import Image

    rows = [[to_pil(row[name]) for name in columns] for row in pictures]
    width = max(sum(p.width for p in row) for row in rows) + GAP * (len(columns) - 1)
    height = sum(row[0].height for row in rows) + GAP * (len(rows) - 1)
    grid = Image.new("RGB", (width, height), "white")
    top = 0
    for row in rows:
        left = 0
        for picture in row:
            grid.paste(picture, (left, top))
            left += picture.width + GAP
        top += row[0].height + GAP
    return grid


def screen_grid(pictures: list[dict[str, torch.Tensor]]) -> Image:
    """`grid_picture` in as many columns side by side as give it the shape of a screen."""
    from PIL import Image

    def columns(count: int) -> list[list[dict[str, torch.Tensor]]]:
        height = math.ceil(len(pictures) / count)
        return [pictures[start : start + height] for start in range(0, len(pictures), height)]

    def size(column: list[dict[str, torch.Tensor]]) -> tuple[int, int]:
        shapes = [row[COLUMNS[0]].shape[-2:] for row in column]
        width = len(COLUMNS) * max(w for _, w in shapes) + GAP * (len(COLUMNS) - 1)
        return width, sum(h for h, _ in shapes) + GAP * (len(shapes) - 1)

    def whole(count: int) -> tuple[int, int]:
        sizes = [size(column) for column in columns(count)]
        return sum(w for w, _ in sizes) + BETWEEN * (len(sizes) - 1), max(h for _, h in sizes)

    def too_large(count: int) -> float:
        return max(side / of for side, of in zip(whole(count), SCREEN, strict=True))

    best = min(range(1, len(pictures) + 1), key=too_large)
    grid = Image.new("RGB", whole(best), "white")
    left = 0
    for column in columns(best):
        grid.paste(grid_picture(column), (left, 0))
        left += size(column)[0] + BETWEEN
    return grid


def save_grid(pictures: list[dict[str, torch.Tensor]], path: Path) -> Image:
    """Write `grid_picture` as PNG, in which the rows' sizes are kept so that `read_grid` can take it apart."""
    from PIL.PngImagePlugin import PngInfo

    sizes = [[row[COLUMNS[0]].shape[-1], row[COLUMNS[0]].shape[-2]] for row in pictures]
    info = PngInfo()
    info.add_text(ROWS, json.dumps(sizes))
    grid = grid_picture(pictures)
    write_whole(path, as_png(grid, pnginfo=info))
    return grid


def as_png(picture: Image, **options: Any) -> bytes:
    """The bytes of a PNG file."""
    buffer = BytesIO()
    picture.save(buffer, format="png", **options)
    return buffer.getvalue()


def read_grid(path: Path) -> list[dict[str, Image]]:
    """The pictures that `save_grid` wrote, row by row; [] where the file does not say how to take it apart."""
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as file:
            sizes, grid = json.loads(file.text.get(ROWS, "[]")), file.convert("RGB")
    except (OSError, ValueError, AttributeError, SyntaxError):  # PIL says SyntaxError of some broken files
        return []
    rows, top = [], 0
    for width, height in sizes:
        lefts = [column * (width + GAP) for column in range(len(COLUMNS))]
        boxes = [(left, top, left + width, top + height) for left in lefts]
        rows.append({name: grid.crop(box) for name, box in zip(COLUMNS, boxes, strict=True)})
        top += height + GAP
    return rows


def loss_picture(journal: Journal, nothing: float = 1.0) -> Image:
    """Loss over steps, each step faint, a running mean on top, validation as dots. nothing: the loss of no answer."""
    # the object interface: pyplot keeps every figure in a process-wide registry, which a long-lived host would leak
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(6.4, 4.0), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, losses = journal.series("loss")
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="each step")
    axes.plot(steps, running_mean(losses), color="tab:blue", label="running mean")
    steps, losses = journal.series("validation/loss")
    if steps:
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="held-out")
    axes.set(xlabel="step", ylabel=f"loss ({nothing:.3g} = predicts nothing)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")


def running_mean(values: list[float], decay: float = 0.95) -> list[float]:
    """Bias-corrected exponential mean (Kingma & Ba 2015, section 3)."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        means.append(total / weight)
    return means


def to_pil(picture: torch.Tensor) -> Image:
    from PIL import Image

    pixels = (picture.clamp(0, 1) * 255).round().byte()
    return Image.fromarray(rearrange(pixels, "channels height width -> height width channels").numpy())
