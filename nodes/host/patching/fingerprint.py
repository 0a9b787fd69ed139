"""Know a model of the host again by its weights, without reading all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....training.errors import BadInput
from .private_copy import is_dynamic, is_quantized

__all__ = ["hash_value", "hash_weights"]

_SAMPLES = 64  # elements looked at per tensor, evenly spread


def hash_weights(digest: Any, patcher: Any) -> None:
    """Feed a hashlib digest with the patcher's weights: names, shapes, dtypes and 64 spread elements of each.

    It is the same whether the model is loaded or not (a loaded LoRA is undone in the host's own backup), and a
    patch (LoRA) counts with its strength and its weights. Two fine-tunes of one model differ in every tensor, so
    the spread elements tell them apart; an edit of a few single numbers may go unseen. Raises BadInput for weights
    whose numbers cannot be read: they could not be told from others.
    """
    for key, weight in sorted(_weights_of(patcher).items()):
        digest.update(key.encode())
        if weight.is_meta and not is_dynamic(patcher):
            raise BadInput(
                f"The weight {key} is not in memory, so this model cannot be known again; load it with a node of "
                f"ComfyUI itself."
            )
        try:
            hash_value(digest, weight)
            for patch in patcher.patches.get(key, ()):
                hash_value(digest, patch)
        except _Unreadable as packed:
            raise BadInput(
                f"The weight {key} is in a packed format ({type(weight).__name__}) that cannot be read here, so this "
                f"model cannot be known again; load an unquantized file."
            ) from packed


def _weights_of(patcher: Any) -> dict[str, torch.Tensor]:
    """The unpatched weights by name. What is in a state dict under a name that no part of the model has (the loaders
    of packed files count memory by such) is no weight.
    """
    weights = {}
    hooked = getattr(patcher, "hook_backup", {})
    buffers = getattr(patcher, "backup_buffers", {})
    for key in patcher.model_state_dict():
        weight = patcher.model
        for name in key.split("."):
            weight = getattr(weight, name, None)
        if key in buffers:
            weight = buffers[key]
        if key in patcher.backup:
            weight = patcher.backup[key].weight
        if key in hooked:
            weight = hooked[key][0]
        if torch.is_tensor(weight):
            weights[key] = weight
    return weights


class _Unreadable(Exception):
    """A tensor whose numbers are out of reach."""


def hash_value(digest: Any, value: Any, *, whole: bool = False) -> None:
    """Feed a hashlib digest with tensors, numbers, texts and containers of them; of other objects only the class.

    `whole`: every element of a tensor counts, not 64 of them.
    """
    if torch.is_tensor(value):
        _hash_tensor(digest, value, whole)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(f"{key}=".encode())
            hash_value(digest, value[key], whole=whole)
    elif isinstance(value, (tuple, list)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            hash_value(digest, item, whole=whole)
    elif isinstance(value, (str, int, float, bool, type(None))):
        digest.update(repr(value).encode())
    elif hasattr(value, "weights"):  # the host's LoRA adapters
        digest.update(type(value).__name__.encode())
        hash_value(digest, value.weights, whole=whole)
    else:
        digest.update(type(value).__name__.encode())


def _hash_tensor(digest: Any, tensor: torch.Tensor, whole: bool) -> None:
    digest.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
    if tensor.is_meta or tensor.numel() == 0:
        return
    elements = _bytes_of(tensor)
    if not whole:
        places = torch.linspace(0, len(elements) - 1, min(_SAMPLES, len(elements)), dtype=torch.float64)
        elements = elements[places.round().long().to(elements.device)]
    digest.update(elements.cpu().numpy().tobytes())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[elements, bytes of one]. As bytes: not every dtype (float8) can be indexed or turned into numpy.

    A packed format is unpacked where it says how, else taken as it is stored.
    """
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda x: x]
    if is_quantized(tensor):
        ways = [lambda x: x.dequantize(), lambda x: x.detach().as_subclass(torch.Tensor)]
    for way in ways:
        try:
            flat = way(tensor).detach().reshape(-1).contiguous()
            return flat.view(torch.uint8).reshape(flat.numel(), -1)
        except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
            continue
    raise _Unreadable
