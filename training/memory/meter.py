"""Counts the bytes of living tensors while code runs: what was really allocated, whatever the closed form says."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["StorageMeter"]


class StorageMeter(TorchDispatchMode):
    """`with StorageMeter(q, k, v) as meter: f(q, k, v)`; then `meter.peak` is the most that lived at once, in bytes.

    Tensors given to the constructor count from the start, any other tensor from the operation that makes it (or first
    returns it) until its storage is freed. A storage counts once, however many views it has. Buffers inside a kernel
    (workspaces, per-thread scratch) never pass through PyTorch's dispatcher and are not seen. Works on real and on fake
    tensors.
    """

    def __init__(self, *tensors: torch.Tensor):
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: dict[int, int] = {}  # id of a living storage -> its bytes
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # in inference mode whole compositions (softmax, attention) arrive here: look inside them
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # PyTorch keeps one Python object per storage for as long as the storage lives
        if key in self._seen:
            return
        self._seen[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.live -= self._seen.pop(key)
