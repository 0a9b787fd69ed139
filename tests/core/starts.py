"""Refiners to go on from, of random weights and of two kinds: convolutions alone, and attention with text."""

from pathlib import Path

import torch

from tests.core.conftest import PIXELS, SHAPE
from training.config.network import UNetConfig
from training.objectives.residual.file import RefinerMeta, save_refiner
from training.objectives.residual.flow import velocity_scale
from training.objectives.residual.unet import build_unet

TEXT = {"tokens": 3, "dim": 8, "pooled": 0}
WITH_ATTENTION = {**SHAPE, "transformer_depth": [1], "middle_depth": 1}


def write_start(path: Path, *, text: dict | None = None, s: float = 0.3, rms: float = 0.3, **changes) -> Path:
    """A refiner.safetensors; with `text` its network has attention. `changes` are fields of the metadata."""
    torch.manual_seed(11)
    shape = UNetConfig(latent_channels=3, **(WITH_ATTENTION if text else SHAPE))
    net = build_unet(shape)
    torch.nn.init.normal_(net.conv_out.weight, std=0.05)  # at zero, nothing behind it would have a gradient
    meta = {
        "unet": shape, "latent": PIXELS, "noise_scale": s, "residual_rms": rms, "c_v": velocity_scale(rms, s),
        "sigmas": [1.0, 0.5, 0.0] if s else [1.0, 0.0], "context": text, "training": {"dataset": "d" * 64},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    empty = {"context": torch.zeros(1, shape.context_dim)}
    save_refiner(path, net.state_dict(), empty, RefinerMeta(**{**meta, **changes}))
    return path
