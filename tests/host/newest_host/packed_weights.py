"""Weights that are not the numbers that they store, as two kinds of files bring them into the newest host.

`Scaled`: the host's own quantized tensors. One looks like a tensor of the dtype that it stands for; `.to(dtype)` only
changes that label, and only `dequantize()` gives numbers. It cannot be deep-copied.

`Blocks`: as GGUF packs bring them. Bytes under another shape than they say; no `dequantize`; the layer unpacks them in
its own forward. The layer's state dict is a fake for the host's reckoning of memory: on the meta device, with a key
that no weight has.
"""

from __future__ import annotations

from typing import Any

import comfy.ops
import torch

__all__ = ["Blocks", "BlockLinear", "Scaled", "pack_blocks", "quantize"]

_ATEN = torch.ops.aten
_LARGE = 4096  # numbers in a matrix, from which on it is packed


class Scaled(torch.Tensor):
    """Whole numbers of 8 bits with one scale. `dtype`: what it says it is."""

    is_quantized_by_the_host = True

    @staticmethod
    def __new__(cls, packed: torch.Tensor, scale: float, dtype: torch.dtype) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=dtype, device=packed.device)

    def __init__(self, packed: torch.Tensor, scale: float, dtype: torch.dtype) -> None:
        self.packed, self.scale = packed, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Scaled:
        scale = float(weight.abs().amax()) / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def dequantize(self) -> torch.Tensor:
        return (self.packed.float() * self.scale).to(self.dtype)

    def __deepcopy__(self, _memo: dict) -> Any:
        raise RuntimeError("a quantized tensor was deep-copied")

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if function in (_ATEN.detach.default, _ATEN.alias.default):
            return cls(first.packed, first.scale, first.dtype)
        if function is _ATEN.clone.default:
            return cls(first.packed.clone(), first.scale, first.dtype)
        if function is _ATEN._to_copy.default:
            return cls(first.packed.clone(), first.scale, kwargs.get("dtype") or first.dtype)
        plain = [each.dequantize() if isinstance(each, cls) else each for each in args]
        return function(*plain, **kwargs)


def quantize(root: torch.nn.Module) -> int:
    """Give the large Linear layers of a model quantized weights in place; how many there were."""
    changed = 0
    for layer in root.modules():
        if isinstance(layer, torch.nn.Linear) and layer.weight.numel() >= _LARGE:
            layer.weight = torch.nn.Parameter(Scaled.of(layer.weight.detach().float()), requires_grad=False)
            changed += 1
    return changed


class Blocks(torch.Tensor):
    """Bytes of a packed matrix: per row whole numbers of 8 bits, and the row's scale. `shape` is the matrix's."""

    @staticmethod
    def of(weight: torch.Tensor) -> Blocks:
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).half()
        numbers = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
        return Blocks._over(torch.cat([numbers.view(torch.uint8), scale.view(torch.uint8)], 1), weight.shape)

    @staticmethod
    def _over(packed: torch.Tensor, shape: torch.Size) -> Blocks:
        made = torch.Tensor._make_subclass(Blocks, packed)
        made.matrix = torch.Size(shape)
        return made

    @property
    def shape(self) -> torch.Size:
        return self.matrix

    def _bytes(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def detach(self) -> Blocks:
        return Blocks._over(self._bytes().detach(), self.matrix)

    def to(self, *args: Any, **kwargs: Any) -> Blocks:  # to a device, never to a dtype
        return Blocks._over(self._bytes().clone(), self.matrix)

    def unpack(self, dtype: torch.dtype) -> torch.Tensor:
        packed = self._bytes()
        numbers, scale = packed[:, : self.matrix[1]].contiguous(), packed[:, self.matrix[1] :].contiguous()
        return (numbers.view(torch.int8).float() * scale.view(torch.float16).float()).to(dtype)


class BlockLinear(comfy.ops.manual_cast.Linear):
    """The layer of such a weight: it unpacks it in the dtype of its input."""

    def forward_comfy_cast_weights(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.unpack(input.dtype)
        for function in self.weight_function:
            weight = function(weight)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return torch.nn.functional.linear(input, weight, bias)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = torch.empty(self.weight.shape, device="meta")
        if self.bias is not None:
            destination[prefix + "bias"] = torch.empty_like(self.bias, device="meta")
        destination[prefix + "temp.weight"] = torch.empty(1, device="meta")


def pack_blocks(root: torch.nn.Module) -> int:
    """Turn the large Linear layers of a model into such ones, in place; how many there were."""
    every = [layer for layer in root.modules() if isinstance(layer, torch.nn.Linear)]
    layers = [layer for layer in every if layer.weight.numel() >= _LARGE]
    for layer in layers:
        layer.__class__ = BlockLinear
        layer.weight = torch.nn.Parameter(Blocks.of(layer.weight.detach()), requires_grad=False)
    return len(layers)
