"""Where networks attend: tokens, heads, head size and number of layers per level, at any size of picture.

Sizes are treated as ComfyUI treats them: pixels floored to the VAE's ratio, UNet levels halved rounding up (a stride-2
convolution with padding 1), transformers padded up to their patch. The presets are compared with the host's own classes
in tests/host/test_attention_memory.py, parameter counts included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import BadInput
from .attention_call import AttentionCall

__all__ = ["LARGEST_SIDE", "PRESETS", "Latent", "AttentionLayer", "Level", "ModelShape"]

LARGEST_SIDE = 2**17  # pixels; more is a slip of the keyboard, and its figures would say nothing


@dataclass(frozen=True)
class Level:
    """Attention layers of one shape. shrink: the latent is halved so often here (0 in transformers).

    self_layers attend to the level's own tokens (and the text, where the model is joint), cross_layers to the text.
    """

    shrink: int
    heads: int
    head_dim: int
    self_layers: int
    cross_layers: int
    joint: bool = False
    upcast: bool = False


@dataclass(frozen=True)
class Latent:
    """batch: as the host puts it together, frames of a picture model included. frames, height, width: cells."""

    batch: int
    channels: int
    frames: int
    height: int
    width: int

    @property
    def elements(self) -> int:
        return self.batch * self.channels * self.frames * self.height * self.width


@dataclass(frozen=True)
class AttentionLayer:
    """One kind of attention layer at one level, at one size. count: how many of them the network has."""

    level: Level
    kind: str  # "self", "joint" or "cross"
    count: int
    call: AttentionCall

    @property
    def name(self) -> str:
        place = f"1/{2**self.level.shrink}" if self.level.shrink else "full"
        return f"{self.kind}, {place}"


@dataclass(frozen=True)
class ModelShape:
    """A diffusion network as far as attention knows it.

    patch: (frames, height, width) cells that make one token. text: tokens of the usual prompt. vae: pixels of one
    latent cell. frame_ratio: frames of one latent frame, for video; None: frames are pictures of the batch.
    """

    name: str
    levels: tuple[Level, ...]
    channels: int
    text: int
    parameters: int
    vae: int = 8
    frame_ratio: int | None = None
    patch: tuple[int, int, int] = (1, 1, 1)
    split_heads: bool = False

    @property
    def step(self) -> int:
        """Pixels between two sizes that the network treats differently."""
        return self.vae * self.patch[2]

    def latent(self, width: int, height: int, batch: int = 1, frames: int = 1) -> Latent:
        """The latent of pictures of width x height pixels. BadInput for sizes that no latent has."""
        for name, side in (("width", width), ("height", height)):
            if not self.vae <= side <= LARGEST_SIDE:
                raise BadInput(
                    f"{name}: expected {self.vae} to {LARGEST_SIDE} pixels (one latent cell of {self.name} is "
                    f"{self.vae} pixels wide), got {side}."
                )
        for name, count in (("batch", batch), ("frames", frames)):
            if not 1 <= count <= 100_000:
                raise BadInput(f"{name}: expected 1 to 100000, got {count}.")
        if self.frame_ratio is None:
            batch, frames = batch * frames, 1
        else:
            frames = (frames - 1) // self.frame_ratio + 1
        return Latent(batch, self.channels, frames, height // self.vae, width // self.vae)

    def tokens(self, level: Level, latent: Latent) -> int:
        """Tokens of one picture or clip at a level, without the text."""
        sides = [latent.frames, latent.height, latent.width]
        if level.shrink:
            sides[1:] = (-(-side // 2**level.shrink) for side in sides[1:])  # ceil of ceil is one ceil
        return math.prod(-(-side // patch) for side, patch in zip(sides, self.patch, strict=True))

    def layers(
        self, latent: Latent, element_bytes: int, *, cfg: bool = True, text: int = 0, **more: Any
    ) -> Iterator[AttentionLayer]:
        """Every kind of attention layer with its call. cfg: conditional and unconditional in one batch. text: tokens of
        the prompt, 0 for the usual number. more: fields of AttentionCall."""
        words, batch = text or self.text, latent.batch * (2 if cfg else 1)
        for level in self.levels:
            own = self.tokens(level, latent)
            joint = own + words if level.joint else own
            for kind, count, queries, keys in (
                ("joint" if level.joint else "self", level.self_layers, joint, joint),
                ("cross", level.cross_layers, own, words),
            ):
                if count:
                    shape = (batch, level.heads, queries, keys, level.head_dim, element_bytes)
                    upcast = level.upcast and element_bytes == 2
                    call = AttentionCall(*shape, upcast=upcast, split_heads=self.split_heads, **more)
                    yield AttentionLayer(level, kind, count, call)


def _unet(*levels: tuple[int, int, int, int]) -> tuple[Level, ...]:
    """(shrink, heads, head size, transformer blocks): each block attends to itself once and to the text once."""
    return tuple(Level(shrink, heads, size, blocks, blocks) for shrink, heads, size, blocks in levels)


def _wan(heads: int, blocks: int, parameters: int) -> dict:
    return {
        "levels": (Level(0, heads, 128, blocks, blocks),),
        "channels": 16,
        "text": 512,
        "parameters": parameters,
        "frame_ratio": 4,
        "patch": (1, 2, 2),
    }


PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # 2 blocks down and 3 up at each level, 1 in the middle
        ModelShape(
            "SD1.5",
            _unet((0, 8, 40, 5), (1, 8, 80, 5), (2, 8, 160, 5), (3, 8, 160, 1)),
            channels=4, text=77, parameters=859_520_964,
        ),
        # no attention at full size; depth 2 and 10, the middle at 1/4
        ModelShape("SDXL", _unet((1, 10, 64, 10), (2, 20, 64, 60)), channels=4, text=77, parameters=2_567_463_684),
        ModelShape(
            "SDXL refiner",
            _unet((1, 12, 64, 20), (2, 24, 64, 20), (3, 24, 64, 4)),
            channels=4, text=77, parameters=2_259_526_660,
        ),
        # text and picture attend together; 77 tokens of CLIP and 77 of T5
        ModelShape(
            "SD3", (Level(0, 24, 64, 24, 0, joint=True),),
            channels=16, text=154, parameters=2_028_328_000, patch=(1, 2, 2),
        ),
        # 19 double and 38 single blocks, all joint
        ModelShape(
            "Flux", (Level(0, 24, 128, 57, 0, joint=True),),
            channels=16, text=256, parameters=11_901_408_320, patch=(1, 2, 2), split_heads=True,
        ),
        ModelShape("Wan 1.3B", **_wan(12, 30, 1_418_996_800)),
        ModelShape("Wan 14B", **_wan(40, 40, 14_288_491_584)),
    )
}  # fmt: skip
