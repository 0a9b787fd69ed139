"""The names and shapes of a refiner's weights, from its configuration alone.

A refiner file says in its metadata which network it holds. To build that network is to allocate it, so what the file
says is compared with what is in it first. Written out, since diffusers takes seconds to import; a test holds it to
diffusers' own network.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...config.network import UNetConfig

__all__ = ["what_does_not_fit", "weight_shapes"]

Shape = tuple[int, ...]


def weight_shapes(config: UNetConfig) -> dict[str, Shape]:
    """{name in diffusers' UNet2DConditionModel: shape} of all weights of the network."""
    return dict(_weights(config))


def what_does_not_fit(config: UNetConfig, found: dict[str, Shape]) -> str | None:
    """What sets these weights apart from those of the network, in a few words; None where they are the same."""
    wanted = weight_shapes(config)
    other = [name for name in wanted if name in found and found[name] != wanted[name]]
    if other:
        first = other[0]
        return (
            f"its weights do not have the shapes that its metadata says ({len(other)} differ; the first, {first}, is "
            f"{list(found[first])} instead of {list(wanted[first])})"
        )
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        return (
            f"its weights are not those of the network that its metadata says ({len(missing)} missing, {len(unknown)} "
            f"too many, the first one {[*missing, *unknown][0]})"
        )
    return None


def _weights(config: UNetConfig) -> Iterator[tuple[str, Shape]]:
    widths, first = config.block_channels, config.block_channels[0]
    last = len(widths) - 1
    yield from _layer("conv_in", first, 2 * config.latent_channels, 3, 3)
    yield from _layer("time_embedding.linear_1", 4 * first, first)
    yield from _layer("time_embedding.linear_2", 4 * first, 4 * first)
    if config.pooled_dim:
        yield from _layer("add_embedding.linear_1", 4 * first, config.adm_dim)
        yield from _layer("add_embedding.linear_2", 4 * first, 4 * first)

    skips, before = [first], first  # widths of what the way down leaves for the way up
    for level, (width, depth) in enumerate(zip(widths, config.transformer_depth, strict=True)):
        block = f"down_blocks.{level}"
        for layer in range(config.layers_per_block):
            yield from _residual(f"{block}.resnets.{layer}", before, width, first)
            yield from _transformer(f"{block}.attentions.{layer}", width, depth, config)
            before = width
            skips.append(width)
        if level < last:
            yield from _layer(f"{block}.downsamplers.0.conv", width, width, 3, 3)
            skips.append(width)

    for layer in range(2 if config.middle_depth else 1):
        yield from _residual(f"mid_block.resnets.{layer}", before, before, first)
    yield from _transformer("mid_block.attentions.0", before, config.middle_depth, config)

    for level, (width, depth) in enumerate(zip(widths[::-1], config.transformer_depth[::-1], strict=True)):
        block = f"up_blocks.{level}"
        for layer in range(config.layers_per_block + 1):
            yield from _residual(f"{block}.resnets.{layer}", before + skips.pop(), width, first)
            yield from _transformer(f"{block}.attentions.{layer}", width, depth, config)
            before = width
        if level < last:
            yield from _layer(f"{block}.upsamplers.0.conv", width, width, 3, 3)
    yield from _norm("conv_norm_out", first)
    yield from _layer("conv_out", config.latent_channels, first, 3, 3)


def _residual(name: str, inside: int, outside: int, first: int) -> Iterator[tuple[str, Shape]]:
    yield from _norm(f"{name}.norm1", inside)
    yield from _layer(f"{name}.conv1", outside, inside, 3, 3)
    yield from _layer(f"{name}.time_emb_proj", outside, 4 * first)
    yield from _norm(f"{name}.norm2", outside)
    yield from _layer(f"{name}.conv2", outside, outside, 3, 3)
    if inside != outside:
        yield from _layer(f"{name}.conv_shortcut", outside, inside, 1, 1)


def _transformer(name: str, width: int, depth: int, config: UNetConfig) -> Iterator[tuple[str, Shape]]:
    if not depth:
        return
    kernel = () if config.linear_projection else (1, 1)
    yield from _norm(f"{name}.norm", width)
    yield from _layer(f"{name}.proj_in", width, width, *kernel)
    for number in range(depth):
        block = f"{name}.transformer_blocks.{number}"
        for norm in ("norm1", "norm2", "norm3"):
            yield from _norm(f"{block}.{norm}", width)
        for attention, context in (("attn1", width), ("attn2", config.context_dim)):
            for letter, seen in (("q", width), ("k", context), ("v", context)):
                yield f"{block}.{attention}.to_{letter}.weight", (width, seen)
            yield from _layer(f"{block}.{attention}.to_out.0", width, width)
        yield from _layer(f"{block}.ff.net.0.proj", 8 * width, width)  # GEGLU: 4 times the width, and its gates
        yield from _layer(f"{block}.ff.net.2", width, 4 * width)
    yield from _layer(f"{name}.proj_out", width, width, *kernel)


def _layer(name: str, outside: int, *rest: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outside, *rest)
    yield f"{name}.bias", (outside,)


def _norm(name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
