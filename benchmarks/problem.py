"""The problems that the benchmarks train on: the demo's settings, and datasets that need no files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.config.options import FIELDS, build_options
from training.config.train_config import TrainConfig
from training.data.degrade import degrade
from training.data.shards import DatasetWriter

NO_VALIDATION = {"pictures": 0}
PIXELS = {"name": "ChromaRadiance", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}
SD15 = {"name": "SD15", "channels": 4, "scale": 0.18215, "shift": 0.0, "downscale": 8}
CLIP_L = {"tokens": 77, "dim": 768, "pooled": 0, "fingerprint": "random"}


def demo_settings() -> dict[str, Any]:
    """What the demo trains with, read from the workflow that it queues."""
    path = Path(__file__).resolve().parent.parent / "workflows" / "api" / "train_refiner.json"
    nodes = json.loads(path.read_text(encoding="utf-8"))
    (inputs,) = (node["inputs"] for node in nodes.values() if node["class_type"] == "Ref2VTrainRefiner")
    said = nodes[inputs["options"][0]]["inputs"]  # those of Training Options
    settings = json.loads(build_options({name: said[name] for name in FIELDS if name in said}, said.get("more", "")))
    settings.setdefault("refiner", {})["preset"] = inputs["preset"]
    settings.setdefault("optimizer", {})["learning_rate"] = inputs["learning_rate"]
    settings.setdefault("data", {}).update(batch_size=inputs["batch_size"], crop=inputs["crop"] or None)
    return settings | {name: inputs[name] for name in ("epochs", "precision", "seed")}


def configure(dataset: Path, run: Path, settings: dict[str, Any], **changes: Any) -> TrainConfig:
    """`settings` for this dataset and run folder; a changed section keeps its other fields."""
    values = {**settings, "dataset": str(dataset), "run": str(run)}
    for name, value in changes.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return TrainConfig.build(values)


def make_pictures(folder: Path, count: int, side: int = 256, seed: int = 0) -> Path:
    """A dataset of `count` drawn pictures in pixel space; base = a third of the resolution, as in the demo."""
    generator = torch.Generator().manual_seed(seed)
    with DatasetWriter(folder, latent=PIXELS, vae=None, base={"kind": "degradation", "name": None}) as writer:
        for number in range(count):
            picture = draw_picture(side, generator)
            base = degrade(picture, "resize", 3)
            name = f"drawn-{number}"
            writer.add(picture * 2 - 1, base * 2 - 1, source=name, sha256="0" * 64, group=name, split="train")
    return folder


def draw_picture(side: int, generator: torch.Generator, shapes: int = 24) -> Tensor:
    """[3, side, side] in [0, 1]: overlapping discs of one colour and one stripe pattern each, with sharp edges."""
    axis = torch.arange(side) / side
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    picture = torch.rand(3, 1, 1, generator=generator).expand(3, side, side)
    for _ in range(shapes):
        cx, cy, radius, angle, width = torch.rand(5, generator=generator).tolist()
        colour = torch.rand(3, 1, 1, generator=generator)
        wave = torch.tensor(angle * 6.3)
        stripes = torch.sin((x * wave.cos() + y * wave.sin()) * (40 + 200 * width))
        inside = (x - cx) ** 2 + (y - cy) ** 2 < (0.05 + 0.25 * radius) ** 2
        picture = torch.where(inside, (colour + 0.15 * stripes.sign()).clamp(0, 1), picture)
    return picture


def make_latents(folder: Path, count: int, side: int, seed: int = 0) -> Path:
    """A dataset of `count` random SD1.5-shaped pairs, [4, side, side], each with a random text context [77, 768]."""
    generator = torch.Generator().manual_seed(seed)
    empty = {"context": torch.randn(CLIP_L["tokens"], CLIP_L["dim"], generator=generator)}
    writer = DatasetWriter(
        folder, latent=SD15, vae={"fingerprint": "random", "dtype": "float32"},
        base={"kind": "latents", "name": None}, context=CLIP_L, empty=empty,
    )
    with writer:
        for number in range(count):
            z = torch.randn(4, side, side, generator=generator)
            b = z + 0.3 * torch.randn(z.shape, generator=generator)
            context = torch.randn(CLIP_L["tokens"], CLIP_L["dim"], generator=generator)
            name = f"random-{number}"
            writer.add(z, b, source=name, sha256="0" * 64, group=name, split="train", context=context)
    return folder
