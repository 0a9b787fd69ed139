"""Counts the bytes of living tensors while code runs: what was really allocated, whatever the closed form says."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .op_memo import OpMemo

__all__ = ["StorageMeter"]


_NORMS = (torch.ops.aten.native_group_norm.default, torch.ops.aten.native_layer_norm.default)


class StorageMeter(TorchDispatchMode):
    """`with StorageMeter(q, k, v) as meter: f(q, k, v)`; then `meter.peak` is the most that lived at once, in bytes.

    Tensors given to the constructor count from the start (label "inputs"), any other tensor from the operation that
    makes it (or first returns it) until its storage is freed. A storage counts once, however many views it has. Every
    storage has a label, and `meter.terms` says what the peak consisted of: label -> bytes, which sum to it exactly.
    Buffers inside a kernel (workspaces, per-thread scratch) never pass through PyTorch's dispatcher and are not seen.
    Works on real and on fake tensors; enter it after FakeTensorMode.
    """

    def __init__(self, *tensors: torch.Tensor, label: str = "activations"):
        super().__init__()
        self.live = 0
        self.peak = 0
        self.peak_without_burst = 0
        self.terms: dict[str, int] = {}
        self.label = label
        self.labels: Counter[str] = Counter()  # label -> living bytes
        self.most: Counter[str] = Counter()  # label -> the most that it ever had, at whatever time
        self._seen: dict[int, tuple[int, str]] = {}  # id of a living storage -> its bytes and label
        self._memo = OpMemo()
        self._whole: dict[Any, bool] = {}  # operation -> whether it cannot be taken apart
        self.hold("inputs", tensors)

    def hold(self, label: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that no operation has made, such as weights; those that are counted already move to `label`."""
        for tensor in tensors:
            key = id(tensor.untyped_storage())
            if key in self._seen:
                size, before = self._seen[key]
                self.labels[before] -= size
                self.labels[label] += size
                self.most[label] = max(self.most[label], self.labels[label])
                self._seen[key] = size, label
            else:
                self._count(tensor, label)

    def burst(self, label: str, size: int) -> None:
        """`size` bytes that come and go: what a stand-in would have allocated."""
        if self.live + size > self.peak:
            self._note_peak(self.live + size, {label: size})

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """New storages get this label."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it twice an operation
        kwargs = kwargs or {}
        if func.namespace == "aten" and not self._whole.get(func):
            with self:  # in inference mode whole compositions (softmax, attention) arrive here: look inside them
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._whole[func] = True
        result = self._memo(func, args, kwargs)
        if func in _NORMS and isinstance(result[0], FakeTensor):
            result = _with_real_statistics(result, args)
        if isinstance(result, torch.Tensor):
            self._count(result, self.label)
        elif isinstance(result, (tuple, list)):
            for each in result:
                if isinstance(each, torch.Tensor):
                    self._count(each, self.label)
        return result

    def _count(self, tensor: torch.Tensor, label: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # PyTorch keeps one Python object per storage for as long as the storage lives
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = size, label
        self.labels[label] += size
        self.live += size
        self.most[label] = max(self.most[label], self.labels[label])
        self.peak_without_burst = max(self.peak_without_burst, self.live)
        if self.live > self.peak:
            self._note_peak(self.live, {})
        weakref.finalize(storage, self._free, key).atexit = False

    def _note_peak(self, size: int, more: dict[str, int]) -> None:
        self.peak = size
        self.terms = {label: held for label, held in self.labels.items() if held}
        for label, extra in more.items():
            self.terms[label] = self.terms.get(label, 0) + extra

    def _free(self, key: int) -> None:
        size, label = self._seen.pop(key)
        self.live -= size
        self.labels[label] -= size


def _with_real_statistics(result: tuple[torch.Tensor, ...], args: Any) -> tuple[torch.Tensor, ...]:
    """A fake norm of half input with FP32 weights says that its statistics are half; the real ones are FP32."""
    mixed = any(isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in args[1:])
    if not mixed or result[1].dtype == torch.float32:
        return result
    return result[0], *(torch.empty_like(each, dtype=torch.float32) for each in result[1:])
