"""What the builder is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from .sources import BaseSource

__all__ = ["BuildRequest", "BuildResult"]


@dataclass(frozen=True)
class BuildRequest:
    """What the node was asked for. Exactly one of `folder`, `images` or latents (as `base`) brings the targets.

    vae, clip: the host's objects. max_pixels: area of a picture after scaling down. held_out: pictures wanted for
    validation. crop: "center" or "random". Text that no caption file gives is `caption`. images: IMAGE batches, of one
    size each. captions: one for each picture of `images`, instead of `caption`. dtype: of latents and text on the disk.
    masks: the opacity of a picture, or a file beside it, says how much each of its latent cells counts.
    subset_weights: an epoch draws the pictures below a folder such as 10_fox ten times.
    """

    base: BaseSource
    name: str
    vae: Any = None
    clip: Any = None
    folder: Path | None = None
    images: list[torch.Tensor] | None = None
    caption: str = ""
    captions: tuple[str, ...] = ()
    max_pixels: int = 768 * 768
    mirror: bool = False
    crop: str = "center"
    held_out: int = 0
    seed: int = 0
    plan_only: bool = False
    dtype: str = "float32"
    masks: bool = False
    subset_weights: bool = False


@dataclass(frozen=True)
class BuildResult:
    """`folder` (an absolute path) and `content_hash` are empty after a plan."""

    folder: str
    content_hash: str
    sheet: Image.Image
    report: str
