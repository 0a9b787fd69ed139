"""Operations on fake tensors that came before: their results are made anew from what is known of their shapes.

FakeTensorMode has a memo of its own, but asking it costs most of a trace: it takes every argument apart, in Python, to
be right for all of PyTorch. A trace of a network is the same few hundred operations again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

__all__ = ["OpMemo"]

_Layout = tuple[Any, ...]  # size, stride, dtype, device, and for a view: which argument's storage, and where in it


class OpMemo:
    """`memo(func, args, kwargs)` is `func(*args, **kwargs)`: for fake tensors of known layouts without asking again.

    Only for operations that change nothing and give one tensor: a new one, or a view of one of their arguments.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Layout | None] = {}
        self._changes: dict[Any, bool] = {}

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors: list[FakeTensor] = []
        key = None if self._changes_something(func) else _key(func, args, kwargs, tensors)
        if key is None or not tensors:
            return func(*args, **kwargs)
        if key in self._known:
            layout = self._known[key]
            return func(*args, **kwargs) if layout is None else _made(layout, tensors)
        result = func(*args, **kwargs)
        self._known[key] = _layout(result, tensors)
        return result

    def _changes_something(self, func: Any) -> bool:
        if func not in self._changes:
            schema = getattr(func, "_schema", None)
            self._changes[func] = schema is None or schema.is_mutable or len(schema.returns) != 1
        return self._changes[func]


def _key(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[FakeTensor]) -> Any:
    """What the result's layout follows from; None where that is not known. Collects the fake tensors on the way."""
    parts: list[Any] = [func, torch.is_inference_mode_enabled()]
    for value in (*args, *kwargs, *kwargs.values()):
        if isinstance(value, FakeTensor):
            tensors.append(value)
            parts.append((value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device))
        elif isinstance(value, torch.Tensor):
            return None
        elif isinstance(value, (list, tuple)):
            if any(isinstance(each, torch.Tensor) for each in value):
                return None
            parts.append(tuple(value))
        else:
            parts.append((type(value), value))  # 1, 1.0 and True are three arguments
    try:
        hash(key := tuple(parts))
    except TypeError:  # lists in lists
        return None
    return key


def _layout(result: Any, tensors: list[FakeTensor]) -> _Layout | None:
    if not isinstance(result, FakeTensor) or result.layout != torch.strided or result.is_conj() or result.is_neg():
        return None
    storages = [id(tensor.untyped_storage()) for tensor in tensors]
    own = id(result.untyped_storage())
    whose = storages.index(own) if own in storages else None
    if whose is None and result.storage_offset():
        return None
    if whose is None and result.untyped_storage().nbytes() != _extent(result) * result.element_size():
        return None
    if any(result is tensor for tensor in tensors):
        return None
    return (result.shape, result.stride(), result.dtype, result.fake_device, whose, result.storage_offset())


def _extent(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _made(layout: _Layout, tensors: list[FakeTensor]) -> FakeTensor:
    shape, stride, dtype, device, whose, offset = layout
    mode = tensors[0].fake_mode
    with in_kernel_invocation_manager(mode):
        if whose is None:
            bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            bare = torch.empty(0, dtype=dtype, device="meta")
            bare.set_(tensors[whose].untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, bare, device)
