"""What of a network is trained: the part that optimizer, average and checkpoints have to do with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .plain_names import plain_names

__all__ = ["fill", "trainables"]


def trainables(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that ask for a gradient, under their plain names: all of a network, or the adapters in it."""
    return plain_names({name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad})


@torch.no_grad()
def fill(parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names; both sides have the same ones."""
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
