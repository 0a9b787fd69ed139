"""What of a network is trained: the part that optimizer, average and checkpoints have to do with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .plain_names import plain_names

__all__ = ["build_on", "fill", "trainables"]


def trainables(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that ask for a gradient, under their plain names: all of a network, or the adapters in it."""
    return plain_names({name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad})


@torch.no_grad()
def build_on(
    device: torch.device, build: Callable[[], nn.Module], weights_of: Callable[[], dict[str, Tensor]]
) -> nn.Module:
    """The network that `build` gives, on the device: built without memory, then placed, then filled with the weights.

    weights_of: gives all its tensors by name, on the CPU; called after `build`.
    """
    with torch.device("meta"):
        net = build()
    net.to_empty(device=device)
    weights, tensors = weights_of(), net.state_dict()
    unfilled = {name for name, _ in [*net.named_parameters(), *net.named_buffers()]} - weights.keys()
    if unfilled or weights.keys() - tensors.keys():
        raise ValueError(f"expected weights for all of the network, got none for {sorted(unfilled)[:3]}")
    for name, tensor in tensors.items():
        tensor.copy_(weights.pop(name))  # each is let go as it has arrived
    return net


@torch.no_grad()
def fill(parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    """Copy tensors into the parameters of the same names; both sides have the same ones."""
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
