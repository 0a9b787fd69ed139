"""The refiner's network: diffusers' UNet2DConditionModel in the shapes that the host's own UNet can hold too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...config.network import TIME_ID_DIM, UNetConfig
from ...errors.packages import needed

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from torch import Tensor


def build_unet(
    config: UNetConfig, in_channels: int | None = None, size_numbers: int = 6
) -> UNet2DConditionModel:
    """A freshly initialised UNet2DConditionModel; put it under torch.device("meta") to count without allocating.

    in_channels: None for a refiner, which sees [x_t, b]; a base model sees x_t alone.
    size_numbers: how many numbers are embedded beside the pooled text; SDXL's own refiner has 5.

    The last convolution starts at zero, so that an untrained refiner predicts v = 0 and leaves its input as it is.
    """
    import torch

    with needed("diffusers", "The refiner's network"):
        from diffusers import UNet2DConditionModel

    def block(kind: str, depth: int) -> str:
        return f"CrossAttn{kind}Block2D" if depth else f"{kind}Block2D"

    added: dict[str, Any] = {}
    if config.pooled_dim:
        added = dict(
            addition_embed_type="text_time",
            addition_time_embed_dim=TIME_ID_DIM,
            projection_class_embeddings_input_dim=config.pooled_dim + size_numbers * TIME_ID_DIM,
        )
    net = UNet2DConditionModel(
        in_channels=in_channels or 2 * config.latent_channels,
        out_channels=config.latent_channels,
        block_out_channels=config.block_channels,
        layers_per_block=config.layers_per_block,
        down_block_types=tuple(block("Down", d) for d in config.transformer_depth),
        up_block_types=tuple(block("Up", d) for d in reversed(config.transformer_depth)),
        mid_block_type="UNetMidBlock2DCrossAttn" if config.middle_depth else "UNetMidBlock2D",
        # the last entry serves the last level and the middle block alike; 0 is not allowed, even where it is not read
        transformer_layers_per_block=[max(depth, 1) for depth in config.depths()],
        cross_attention_dim=config.context_dim,
        attention_head_dim=config.heads,  # in diffusers this parameter holds the number of heads, despite its name
        use_linear_projection=config.linear_projection,
        **added,
    )
    with torch.no_grad():
        net.conv_out.weight.zero_()
        net.conv_out.bias.zero_()
    return net


def call_unet(
    net: UNet2DConditionModel,
    x: Tensor,
    b: Tensor,
    t: Tensor,
    context: Tensor,
    pooled: Tensor | None = None,
    time_ids: Tensor | None = None,
) -> Tensor:
    """net([x_t, b], 1000 t, context) -> v / c_v, [B, C, H, W].

    x, b: [B, C, H, W]; t: [B] in (0, 1]; context: [B, T, D]; pooled: [B, P] and time_ids: [B, 6] only with pooled_dim.
    x, b and context in the dtype of the weights; times and sizes are embedded in float32 first.
    """
    import torch

    added = None if pooled is None else {"text_embeds": pooled, "time_ids": time_ids}
    return net(
        torch.cat([x, b], 1), 1000.0 * t, encoder_hidden_states=context, added_cond_kwargs=added, return_dict=False,
    )[0]
