"""The network of SDXL's refiner, as diffusers' UNet2DConditionModel, and what it is told beside the latent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config.network import UNetConfig
from ..residual.unet import build_unet

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from torch import Tensor

CONTEXT = POOLED = 1280  # CLIP-G's
BOTH_ENCODERS = 2048  # SDXL's own text conditioning: CLIP-L's 768 columns, then CLIP-G's
SIZE_NUMBERS = 5  # height, width, crop from the top, crop from the left, aesthetic score

SHAPE: dict[str, Any] = dict(
    latent_channels=4, block_channels=(384, 768, 1536, 1536), layers_per_block=2, transformer_depth=(0, 4, 4, 0),
    middle_depth=4, heads=(6, 12, 24, 24), context_dim=CONTEXT, linear_projection=True, pooled_dim=POOLED,
)
"""Of the published refiner: 64 channels a head."""


def build(shape: UNetConfig) -> UNet2DConditionModel:
    """A network of random weights; put it under torch.device("meta") to allocate nothing."""
    return build_unet(shape, in_channels=shape.latent_channels, size_numbers=SIZE_NUMBERS)


def call(
    net: UNet2DConditionModel, x: Tensor, k: Tensor, context: Tensor, pooled: Tensor, time_ids: Tensor, score: float
) -> Tensor:
    """The predicted noise, [B, C, H, W].

    Args:
        x: [B, C, H, W], scaled (diffusion.network_input); in the dtype of the weights, as is context.
        k: timesteps, [B].
        context: [B, T, D] of CLIP-G, or of SDXL's two encoders, of which CLIP-G's columns are the last.
        pooled: [B, 1280].
        time_ids: [B, 4 or more]; the first four are height, width and the crop from top and left, in pixels.
        score: aesthetic score of the pictures.
    """
    import torch

    scores = torch.full_like(time_ids[:, :1], score)
    added = {"text_embeds": pooled, "time_ids": torch.cat([time_ids[:, :4], scores], 1)}
    return net(
        x, k.float(), encoder_hidden_states=context[..., -CONTEXT:], added_cond_kwargs=added, return_dict=False,
    )[0]
