"""Names of the UNet's weights: diffusers' own, and those of the original checkpoint, which the host reads.

One map serves for reading and for writing, so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "model.diffusion_model."  # in a checkpoint that holds more than the UNet

_OUTSIDE = {
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
}
_RESNET = {
    "norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "norm2": "out_layers.0",
    "conv2": "out_layers.3", "conv_shortcut": "skip_connection",
}


def original_names(names: Iterable[str], layers: int) -> dict[str, str]:
    """{diffusers' name: the original's, without PREFIX} for every weight of a UNet2DConditionModel.

    names: of all weights. layers: residual blocks per level on the way down (layers_per_block).
    """
    names = list(names)
    attended = {name.partition(".attentions.")[0] for name in names if ".attentions." in name}
    return {name: _original(name, layers, attended) for name in names}


def _original(name: str, layers: int, attended: set[str]) -> str:
    parts = name.split(".")
    if parts[0] == "mid_block":
        kind, number, rest = parts[1], int(parts[2]), ".".join(parts[3:])
        return f"middle_block.{2 * number}.{_inside(rest)}" if kind == "resnets" else f"middle_block.1.{rest}"
    if parts[0] not in ("down_blocks", "up_blocks"):
        module, _, leaf = name.rpartition(".")
        return f"{_OUTSIDE[module]}.{leaf}"
    level, kind, number, rest = int(parts[1]), parts[2], int(parts[3]), ".".join(parts[4:])
    down = parts[0] == "down_blocks"
    # A level has its residual blocks and, on the way down, one further entry for the convolution that halves; on the
    # way up one block more, whose entry also holds the convolution that doubles.
    entry = level * (layers + 1) + number + down
    block = f"{'input' if down else 'output'}_blocks.{entry}"
    if kind == "resnets":
        return f"{block}.0.{_inside(rest)}"
    if kind == "attentions":
        return f"{block}.1.{rest}"
    if down:
        return f"input_blocks.{(level + 1) * (layers + 1)}.0.{rest.replace('conv', 'op', 1)}"
    place = 2 if f"up_blocks.{level}" in attended else 1
    return f"output_blocks.{level * (layers + 1) + layers}.{place}.{rest}"


def _inside(rest: str) -> str:
    """A name inside a residual block."""
    module, _, leaf = rest.rpartition(".")
    return f"{_RESNET[module]}.{leaf}"
