"""Know a model of the host again by its weights, without reading all of them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["hash_value", "hash_weights"]

_SAMPLES = 64  # elements looked at per tensor, evenly spread


def hash_weights(digest: Any, patcher: Any) -> None:
    """Feed a hashlib digest with the patcher's weights: names, shapes, dtypes and 64 spread elements of each.

    It is the same whether the model is loaded or not (a loaded LoRA is undone in the host's own backup), and a
    patch (LoRA) counts with its strength and its weights. Two fine-tunes of one model differ in every tensor, so
    the spread elements tell them apart; an edit of a few single numbers may go unseen.
    """
    for key, chain in sorted(patcher.get_key_patches().items()):
        base, *patches = chain
        digest.update(key.encode())
        hash_value(digest, base[0] if isinstance(base, tuple) else base)
        for patch in patches:
            hash_value(digest, patch)


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
    try:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "dequantize"):
            tensor = tensor.dequantize()
        flat = tensor.detach().reshape(-1).contiguous()
        # As bytes: not every dtype (float8) can be indexed or turned into numpy.
        elements = flat.view(torch.uint8).reshape(flat.numel(), -1)
    except Exception:  # a packed format of another node pack: its shape has to do
        return
    if not whole:
        places = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64)
        elements = elements[places.round().long().to(elements.device)]
    digest.update(elements.cpu().numpy().tobytes())
