"""Where the network of a MODEL attends, read from its modules and not from its name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from comfy.ldm.flux.model import Flux
from comfy.ldm.modules.attention import BasicTransformerBlock, SpatialTransformer, SpatialVideoTransformer
from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample, UNetModel, Upsample
from comfy.ldm.wan.model import WanModel

from ....training.errors import BadInput
from ....training.memory.models import PRESETS, Level, ModelShape
from .selected import computes_in, keeps_softmax

__all__ = ["compute_dtype", "network_shape", "read_model_shape"]

_RATIOS = {"ChromaRadiance": 1, "Wan22": 16, "HunyuanImage21": 32}  # pixels a cell, where the format does not say it


def read_model_shape(model: Any) -> ModelShape:
    """The attention layers of a connected MODEL. BadInput, naming the network, for one that cannot be read."""
    latent_format = model.get_model_object("latent_format")
    kind = type(latent_format).__name__
    ratio = getattr(latent_format, "spacial_downscale_ratio", None) or _RATIOS.get(kind, 8)  # [sic]
    name = type(model.model.model_config).__name__
    shape = network_shape(model.model.diffusion_model, name, latent_format.latent_channels, int(ratio))
    if keeps_softmax(model):
        shape = replace(shape, levels=tuple(replace(level, upcast=True) for level in shape.levels))
    return shape


def network_shape(network: torch.nn.Module, name: str, channels: int, ratio: int) -> ModelShape:
    """The shape of the host's network class: UNetModel, MMDiT (SD3), Flux or WanModel."""
    more: dict[str, Any] = {}
    kind = type(network)
    if kind is UNetModel:
        levels, text = _unet_levels(network, name), PRESETS["SD1.5"].text
    elif isinstance(network, MMDiT):
        levels, text = _mmdit_levels(network), PRESETS["SD3"].text
        side = network.patch_size
        more = {"patch": (1, side, side)}
    elif kind is Flux:
        blocks = len(network.double_blocks) + len(network.single_blocks)
        levels = (Level(0, network.num_heads, network.hidden_size // network.num_heads, blocks, 0, joint=True),)
        text = PRESETS["Flux"].text
        more = {"patch": (1, network.patch_size, network.patch_size), "split_heads": True}
    elif kind is WanModel:
        heads, blocks = network.num_heads, len(network.blocks)
        levels = (Level(0, heads, network.dim // heads, blocks, blocks),)
        text = network.text_len
        more = {"patch": tuple(network.patch_size), "frame_ratio": PRESETS["Wan 14B"].frame_ratio}
    else:
        raise _unreadable(name, kind.__name__)
    if not levels:
        raise BadInput(f"model: {name} has no attention layers, so there is nothing to estimate.")
    parameters = sum(p.numel() for p in network.parameters() if p is not None)
    return ModelShape(name, levels, channels, text, parameters, vae=ratio, **more)


def compute_dtype(model: Any) -> str:
    """The dtype that the MODEL computes in: "fp32", "bf16" or "fp16". BadInput for another one."""
    dtype = computes_in(model)
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    if dtype not in names:
        raise BadInput(f"dtype: the connected model says that it computes in {dtype}; choose fp32, bf16 or fp16.")
    return names[dtype]


def _unet_levels(network: UNetModel, name: str) -> tuple[Level, ...]:
    found: Counter[tuple] = Counter()
    shrink = 0
    for block in (*network.input_blocks, network.middle_block, *network.output_blocks):
        if block is None:
            continue
        for module in block:
            if isinstance(module, SpatialVideoTransformer):
                raise _unreadable(name, "a UNet with attention over time")
            if isinstance(module, SpatialTransformer):
                for inner in module.transformer_blocks:
                    if type(inner) is not BasicTransformerBlock:
                        raise _unreadable(name, type(inner).__name__)
                    first, second = inner.attn1, inner.attn2
                    upcast = first.attn_precision == torch.float32
                    cross = int(inner.disable_self_attn) + (second is not None)
                    found[shrink, first.heads, first.dim_head, upcast, "self"] += 2 - cross if second is not None else 1
                    found[shrink, first.heads, first.dim_head, upcast, "cross"] += cross
            elif "Attention" in type(module).__name__:
                raise _unreadable(name, type(module).__name__)
            elif _resamples(module, Downsample):
                shrink += 1
            elif _resamples(module, Upsample):
                shrink -= 1
    shapes = dict.fromkeys(key[:4] for key in found)  # in the order of the network, so from large to small
    return tuple(
        Level(*shape[:3], found[(*shape, "self")], found[(*shape, "cross")], upcast=shape[3]) for shape in shapes
    )


def _resamples(module: torch.nn.Module, kind: type) -> bool:
    """A layer that halves or doubles, or a residual block with one inside."""
    return isinstance(module, kind) or isinstance(getattr(module, "h_upd", None), kind)


def _mmdit_levels(network: MMDiT) -> tuple[Level, ...]:
    found: Counter[tuple] = Counter()
    for block in network.joint_blocks:
        first = block.x_block.attn
        found[first.num_heads, first.head_dim, True] += 1
        if block.x_block.x_block_self_attn:  # SD3.5: the picture attends to itself once more
            second = block.x_block.attn2
            found[second.num_heads, second.head_dim, False] += 1
    return tuple(Level(0, heads, size, count, 0, joint=joint) for (heads, size, joint), count in found.items())


def _unreadable(name: str, what: str) -> BadInput:
    return BadInput(
        f"model: expected a UNet, SD3, Flux or Wan network whose attention can be read, got {name} ({what}); "
        "unplug it and choose the preset that is nearest."
    )
