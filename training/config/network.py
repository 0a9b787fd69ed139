"""The shape of a refiner's UNet: what diffusers' UNet2DConditionModel and the host's own UNet can both hold."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["PRESETS", "TIME_ID_DIM", "UNetConfig", "preset"]

TIME_ID_DIM = 256  # width of each of the six size numbers in SDXL's added conditioning (Podell et al. 2023, 2.2)
# bounds of what a file or a person may say: wider or deeper than any network of this kind is
Width = Annotated[int, Field(ge=1, le=8192)]
Depth = Annotated[int, Field(le=32)]


class UNetConfig(BaseModel):
    """Shape of a refiner UNet. Level 0 works at full latent resolution, each further level at half of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    latent_channels: int = Field(ge=1, le=256, description="C of z and b; the network sees [x_t, b], 2 C channels")
    block_channels: tuple[Width, ...] = Field(min_length=1, max_length=6, description="width of each level")
    layers_per_block: int = Field(2, ge=1, le=8, description="residual blocks per level on the way down")
    transformer_depth: tuple[Depth, ...] = Field(description="transformer blocks per level, 0 = convolutions only")
    middle_depth: int = Field(1, ge=0, le=32, description="transformer blocks in the middle block")
    heads: tuple[int, ...] = Field(description="attention heads per level")
    context_dim: int = Field(768, ge=1, le=65536, description="width of the text conditioning")
    linear_projection: bool = Field(False, description="linear (SDXL) instead of 1x1 convolution around transformers")
    pooled_dim: int = Field(0, ge=0, le=65536, description="width of the pooled text vector (SDXL: 1280); 0 = none")

    @model_validator(mode="after")
    def _shapes_agree(self) -> UNetConfig:
        levels = len(self.block_channels)
        for name in ("transformer_depth", "heads"):
            value = getattr(self, name)
            if len(value) != levels:
                raise ValueError(f"{name} needs one entry per level ({levels}), but has {len(value)}: {list(value)}")
        first = self.block_channels[0]
        for width, heads in zip(self.block_channels, self.heads, strict=True):
            if width % 32:  # GroupNorm has 32 groups in both networks
                raise ValueError(f"block_channels must be multiples of 32, got {width}")
            if width % first:  # the host stores a level's width as a whole multiple of the first one
                raise ValueError(f"block_channels must be whole multiples of the first level ({first}), got {width}")
            if heads < 1 or width % heads:
                raise ValueError(f"heads must divide the level's width: {width} channels, {heads} heads")
        if any(depth < 0 for depth in self.transformer_depth):
            raise ValueError(f"transformer_depth must be 0 or more, got {list(self.transformer_depth)}")
        if self.transformer_depth[-1] not in (0, self.middle_depth):  # diffusers reads both from one number
            raise ValueError(
                f"middle_depth must equal the last level's transformer_depth ({self.transformer_depth[-1]}) "
                f"unless that is 0, got {self.middle_depth}"
            )
        attended = [
            (heads, width // heads)
            for width, heads, depth in zip(self.block_channels, self.heads, self.depths(), strict=True)
            if depth
        ]
        if len({h for h, _ in attended}) > 1 and len({size for _, size in attended}) > 1:
            # the host's UNet knows one number of heads or one head size for the whole network
            raise ValueError(f"heads must be the same on every level with attention, or give one head size: {attended}")
        return self

    def depths(self) -> tuple[int, ...]:
        """transformer_depth with the middle block's attention counted on the last level, where it sits."""
        return (*self.transformer_depth[:-1], max(self.transformer_depth[-1], self.middle_depth))

    @property
    def adm_dim(self) -> int:
        """Width of the added conditioning vector: pooled text + six embedded size numbers, or 0."""
        return self.pooled_dim + 6 * TIME_ID_DIM if self.pooled_dim else 0

    @property
    def size_multiple(self) -> int:
        """Latent height and width are best a multiple of this; other sizes work and are interpolated inside."""
        return 2 ** (len(self.block_channels) - 1)


PRESETS: dict[str, dict[str, Any]] = {
    # About 1 M parameters: the size that learns something on a CPU in minutes. Not narrower: with 32 channels in
    # GroupNorm's 32 groups each channel is normalised alone, so that the network cannot tell a smooth picture from a
    # rough one; at the same cost it came out 2 dB worse after 8 steps, worst on smooth pictures. No attention: its
    # cost grows with the square of the pixels (16,384 tokens in the middle block for a 256-pixel picture).
    "pixel-small": dict(
        block_channels=(64, 64), layers_per_block=1, transformer_depth=(0, 0), middle_depth=0, heads=(4, 4),
        context_dim=32,
    ),
    # SD1.5 and SDXL with every width halved. Heads are halved too, so that a head keeps its size (40 and 32..64);
    # 8 heads of 20 channels would not suit fused attention kernels.
    "sd15-half": dict(
        block_channels=(160, 320, 640, 640), layers_per_block=2, transformer_depth=(1, 1, 1, 0), middle_depth=1,
        heads=(4, 4, 4, 4), context_dim=768,
    ),
    "sdxl-half": dict(
        block_channels=(160, 320, 640), layers_per_block=2, transformer_depth=(0, 2, 10), middle_depth=10,
        heads=(5, 5, 10), context_dim=2048, linear_projection=True, pooled_dim=1280,
    ),
}
"""Named shapes; the latent channels and, where text is used, its width come from the dataset at hand."""


def preset(
    name: str, latent_channels: int, context_dim: int | None = None, pooled_dim: int | None = None
) -> UNetConfig:
    """The named preset for a latent of `latent_channels` channels, with the text width of the data if it has one."""
    shape = dict(PRESETS[name], latent_channels=latent_channels)
    if context_dim is not None:
        shape["context_dim"] = context_dim
    if pooled_dim is not None:
        shape["pooled_dim"] = pooled_dim
    return UNetConfig(**shape)
