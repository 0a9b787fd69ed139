"""What the builder is asked for, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ....training.errors import BadInput
from .sources import BaseSource

__all__ = ["BuildRequest", "BuildResult", "parse_resolutions"]

_SIDES = 64, 2048  # as those of width and height


def parse_resolutions(text: str) -> tuple[int, ...]:
    """"512, 768" -> (512, 768), small ones first; () of an empty text. BadInput for what is no such list."""
    sides = [side.strip() for side in text.split(",")] if text.strip() else []
    if not all(side.isdecimal() and _SIDES[0] <= int(side) <= _SIDES[1] for side in sides):
        raise BadInput(
            f"resolutions must be sides in pixels, {_SIDES[0]} to {_SIDES[1]} each, such as '512, 768'; got {text!r}."
        )
    return tuple(sorted({int(side) for side in sides}))


@dataclass(frozen=True)
class BuildRequest:
    """What the node was asked for. Exactly one of `folder`, `images` or latents (as `base`) brings the targets.

    vae, clip: the host's objects. max_pixels: area of a picture after scaling down. held_out: pictures wanted for
    validation. crop: "center" or "random". Text that no caption file gives is `caption`. images: IMAGE batches, of one
    size each. captions: one for each picture of `images`, instead of `caption`. dtype: of latents and text on the disk.
    masks: the opacity of a picture, or a file beside it, says how much each of its latent cells counts.
    subset_weights: an epoch draws the pictures below a folder such as 10_fox ten times.
    resolutions: sides of squares in pixels, whose areas stand in the place of max_pixels: each picture at each of them.
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
    resolutions: tuple[int, ...] = ()

    def areas(self) -> tuple[int, ...]:
        """Each area in pixels that a picture may have after scaling down."""
        return tuple(side * side for side in self.resolutions) or (self.max_pixels,)


@dataclass(frozen=True)
class BuildResult:
    """`folder` (an absolute path) and `content_hash` are empty after a plan."""

    folder: str
    content_hash: str
    sheet: Image.Image
    report: str
