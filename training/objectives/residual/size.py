"""The refiner's size against its base: at most 30 % of the base's parameters, counted without allocating them."""

from __future__ import annotations

from ...config.network import UNetConfig
from ...errors import BadInput
from ..size import BASE_PARAMETERS, Size
from .unet import build_unet

__all__ = ["BASE_PARAMETERS", "LIMIT", "check_size", "count_parameters"]

LIMIT = 0.30


def count_parameters(config: UNetConfig) -> int:
    """Number of parameters of a refiner of this shape; allocates nothing."""
    import torch

    with torch.device("meta"):
        net = build_unet(config)
    return sum(p.numel() for p in net.parameters())


def check_size(config: UNetConfig, base: str | None, base_parameters: int | None, *, allow_larger: bool) -> Size:
    """The refiner's size; BadInput above LIMIT of a known base, unless `allow_larger`.

    `base` alone is enough for the names in BASE_PARAMETERS; a dataset made from a base MODEL brings the count along.
    """
    if base_parameters is None and base is not None:
        base_parameters = BASE_PARAMETERS.get(base)
        if base_parameters is None:
            raise BadInput(f"refiner.base: expected one of {', '.join(BASE_PARAMETERS)} or none, got {base!r}.")
    size = Size(count_parameters(config), base, base_parameters)
    if size.ratio is not None and size.ratio > LIMIT and not allow_larger:
        raise BadInput(
            f"refiner: expected at most {LIMIT:.0%} of the base's parameters, got {size.sentence()}; "
            "choose narrower block_channels, or set refiner.allow_larger to true."
        )
    return size
