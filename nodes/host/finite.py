"""Where a NaN came from: the first layer of a network that gave one."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FirstBadLayer"]


class FirstBadLayer:
    """Within the block, `name` becomes the first innermost module whose output holds NaN or infinity."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.name = ""
        self._module = module
        self._handles: list[Any] = []

    def __enter__(self) -> FirstBadLayer:
        for name, layer in self._module.named_modules():
            if name and not any(True for _ in layer.children()):
                self._handles.append(layer.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str):
        def look(_module, _inputs, output):
            if not self.name and torch.is_tensor(output) and not torch.isfinite(output).all():
                self.name = name

        return look
