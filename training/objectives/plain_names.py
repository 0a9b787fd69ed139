"""Names of tensors without what a wrapper put before them."""

from __future__ import annotations

from typing import TypeVar

from ..errors import BadInput

Value = TypeVar("Value")
_ADAPTER = "default"  # peft's name for an adapter that was given none; it stands after each of these two
_FACTORS = ("lora_A", "lora_B")


def plain_names(tensors: dict[str, Value]) -> dict[str, Value]:
    """The same tensors under the names of the bare network: no `module.` (DDP) and no `_orig_mod.` (torch.compile).

    DDP wraps the whole network, so its prefix stands in front; torch.compile may wrap any part, so its own may stand
    anywhere. The name of the one adapter that there is goes too: conv1.lora_A.weight. BadInput where two names become
    one.
    """
    renamed: dict[str, Value] = {}
    for name, tensor in tensors.items():
        parts = [part for part in name.split(".") if part != "_orig_mod"]
        while len(parts) > 1 and parts[0] == "module":
            parts = parts[1:]
        parts = [part for k, part in enumerate(parts) if part != _ADAPTER or not k or parts[k - 1] not in _FACTORS]
        plain = ".".join(parts)
        if plain in renamed:
            raise BadInput(f"Two tensors would both be called {plain!r} without the prefixes of their wrappers.")
        renamed[plain] = tensor
    return renamed
