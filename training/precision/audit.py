"""A network in FP32 and in short dtypes, layer by layer: which layer loses what, and which only passes it on.

Two errors are told apart. A layer's **own** error is what it does itself: in the FP32 run each layer is run once more
on its FP32 input, rounded to the short dtype. Its error **so far** is what has gathered up to it: its output in a whole
run in the short dtype against its output in the FP32 run.

Nothing of a run is kept whole. Own errors are measured over all elements, on the spot; for the errors so far a sample
of at most `SAMPLE` elements of each output is kept (the same places in both runs, from the seed): 16 KiB a layer and
call.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .dtypes import DTYPES
from .layer_kinds import ATTENTION, NORM, kind_of, norm_eps
from .measures import FP16_LARGEST, Errors

__all__ = ["SAMPLE", "Audit", "Layer", "audit_module", "copy_in_dtype"]

SAMPLE = 4096  # elements of each output that are compared between two whole runs
_INFINITE = 1e38  # attention masks write minus infinity as the most negative number; it is meant to be infinite
_TENTH = 0.1  # a norm that keeps its eps is closer than that where eps counts; one that loses it is 0.41 off, or NaN


@dataclass
class Layer:
    """One layer over all its calls. `own` and `so_far`: errors by the dtype's name, of innermost layers and attention
    blocks, and of every module. `largest`: the largest magnitude that goes in or comes out, in FP32; `over`: how many
    such values FP16 cannot hold; `lost`: how many that are not 0 become 0 there.
    """

    name: str
    kind: str
    level: int  # how many modules of the network it runs inside of
    innermost: bool
    eps: float | None = None
    calls: int = 0
    largest: float = 0.0
    values: int = 0
    over: int = 0
    lost: int = 0
    own: dict[str, Errors] = field(default_factory=dict)
    so_far: dict[str, Errors] = field(default_factory=dict)
    quiet: dict[str, float] = field(default_factory=dict)  # error of a norm where its eps counts
    problems: dict[str, str] = field(default_factory=dict)  # dtype -> why the layer does not run alone

    def range_used(self, dtype: str = "fp16") -> float:
        """Its largest value against the largest that the dtype can hold."""
        return self.largest / torch.finfo(DTYPES[dtype]).max

    def loses_eps(self, dtype: str) -> bool:
        """A norm that does not add its eps in this dtype: its output is off where the eps counts."""
        return not self.quiet.get(dtype, 0.0) <= _TENTH


def copy_in_dtype(layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A layer of its own with the weights rounded to `dtype`."""
    return copy.deepcopy(layer).to(dtype)


class Audit:
    """The layers of one network, measured in `with audit.reference(module)` and then in
    `with audit.lowered("bf16", module)` for each dtype, around whatever runs the network; `module` may be the same or a
    copy with layers of the same names. Hooks hang on it inside the block only.

    names: short dtypes, keys of `DTYPES`. in_dtype(layer, dtype): the layer to run alone on input in that dtype; the
    default rounds a copy of it. A layer whose weights follow its input can be given back as it is.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        in_dtype: Callable[[torch.nn.Module, torch.dtype], torch.nn.Module] = copy_in_dtype,
        seed: int = 0,
    ) -> None:
        self.names = names
        self.layers: dict[str, Layer] = {}  # in the order in which they first finish
        self._in_dtype = in_dtype
        self._seed = seed
        self._samples: dict[tuple[str, int], list[Tensor]] = {}

    @contextmanager
    def reference(self, module: torch.nn.Module) -> Iterator[None]:
        """What runs in the block is the FP32 reference."""
        state = _Run()
        waiting: dict[torch.nn.Module, list[Any]] = {}

        def before(name: str, layer: torch.nn.Module):
            alone = _runs_alone(name, layer)

            def look(_module, args, kwargs):
                if state.inside:
                    return
                state.level += 1
                if not alone:
                    return
                # now, not afterwards: a layer may work in place
                rounded = state.alone(lambda: self._alone(name, layer, args, kwargs))
                waiting.setdefault(layer, []).append((rounded, [_magnitudes(x) for x in _tensors((args, kwargs))]))

            return look

        def after(name: str, layer: torch.nn.Module):
            def look(_module, args, kwargs, output):
                if state.inside:
                    return
                state.level -= 1
                record = self._layer(name, layer, state.level)
                outputs = _tensors(output)
                ran, magnitudes = waiting[layer].pop() if waiting.get(layer) else (None, [])
                for magnitudes_of_one in (*magnitudes, *(_magnitudes(x) for x in outputs)):
                    _add_magnitudes(record, magnitudes_of_one)
                if ran is not None:
                    _compare_alone(record, ran, outputs)
                if record.calls == 0 and (eps := record.eps) is not None:
                    state.alone(lambda: self._try_quiet(record, eps, layer, args, kwargs))
                self._samples[name, record.calls] = [self._sample(name, record.calls, x) for x in outputs]
                record.calls += 1

            return look

        with _hooks(module, before, after):
            yield

    @contextmanager
    def lowered(self, dtype: str, module: torch.nn.Module) -> Iterator[None]:
        """What runs in the block is the same run in `dtype`, compared with the reference as it goes."""
        calls: dict[str, int] = {}

        def after(name: str, _layer: torch.nn.Module):
            def look(_module, _args, _kwargs, output):
                call = calls[name] = calls.get(name, -1) + 1
                kept = self._samples.get((name, call))
                outputs = _tensors(output)
                if kept is None or len(kept) != len(outputs):
                    return
                for reference, low in zip(kept, outputs, strict=True):
                    sample = self._sample(name, call, low)
                    if sample.shape == reference.shape:
                        self.layers[name].so_far.setdefault(dtype, Errors()).add(sample, reference)

            return look

        with _hooks(module, None, after):
            yield

    # ------------------------------------------------------------------------------------------------- one layer alone

    def _alone(self, name: str, layer: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, list[Tensor] | str]:
        """Its outputs in each dtype on its input rounded to it, or why it does not run so."""
        outputs: dict[str, list[Tensor] | str] = {}
        for dtype in self.names:
            outputs[dtype] = _try(partial(self._outputs_in, DTYPES[dtype], layer, args, kwargs))
        return outputs

    def _outputs_in(self, dtype: torch.dtype, layer: torch.nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
        return _tensors(self._run_in(dtype, layer, args, kwargs))

    def _run_in(self, dtype: torch.dtype, layer: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        low = self._in_dtype(layer, dtype)
        return low.forward(*_rounded(args, dtype), **_rounded(kwargs, dtype))

    def _try_quiet(self, record: Layer, eps: float, layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Run a norm where its eps counts: its first input scaled so that its mean square is eps, where leaving eps out
        makes the output larger by the root of 2. The reference is FP32 on the same rounded input.
        """
        given = _tensors(args)
        spread = float(given[0].float().square().mean().sqrt()) if given else 0.0
        if not (spread and math.isfinite(spread)):
            return
        quiet = given[0].float() * (math.sqrt(eps) / spread)
        for dtype in self.names:
            low = DTYPES[dtype]
            error = _try(partial(self._quiet_error, layer, low, quiet.to(low), args[1:], kwargs))
            if not isinstance(error, str):
                record.quiet[dtype] = error

    def _quiet_error(self, layer: torch.nn.Module, dtype: torch.dtype, x: Tensor, more: Any, kwargs: Any) -> float:
        low = self._outputs_in(dtype, layer, (x, *more), kwargs)
        wanted = _tensors(layer.forward(x.float(), *more, **kwargs))
        errors = Errors()
        for one, other in zip(low, wanted, strict=True):
            errors.add(one, other)
        return errors.relative

    # --------------------------------------------------------------------------------------------------------- records

    def _layer(self, name: str, module: torch.nn.Module, level: int) -> Layer:
        if name not in self.layers:
            inner = not any(True for _ in module.children())
            kind = kind_of(name, module)
            self.layers[name] = Layer(name, kind, level, inner, norm_eps(module) if kind == NORM else None)
        return self.layers[name]

    def _sample(self, name: str, call: int, tensor: Tensor) -> Tensor:
        flat = tensor.detach().reshape(-1)
        if flat.numel() > SAMPLE:
            key = zlib.crc32(f"{self._seed} {name} {call}".encode())
            places = torch.randint(flat.numel(), (SAMPLE,), generator=torch.Generator().manual_seed(key))
            flat = flat[places.to(flat.device)]
        return flat.float().cpu().clone()


def audit_module(
    module: torch.nn.Module, inputs: tuple[Any, ...], names: tuple[str, ...] = ("bf16", "fp16"), *, seed: int = 0
) -> Audit:
    """Any module on FP32 `inputs`, in FP32 and whole in each of the dtypes. The module itself stays as it is."""
    audit = Audit(names, seed=seed)
    with torch.no_grad():
        fine = copy_in_dtype(module, torch.float32)
        with audit.reference(fine):
            fine(*inputs)
        for name in names:
            low = copy_in_dtype(module, DTYPES[name])
            with audit.lowered(name, low):
                low(*_rounded(inputs, DTYPES[name]))
    return audit


# ------------------------------------------------------------------------------------------------------------ the hooks


class _Run:
    """Where the run is: how deep in the network, and whether a layer is being run alone, which hooks must not see."""

    def __init__(self) -> None:
        self.level = 0
        self.inside = False

    def alone(self, action: Callable[[], Any]) -> Any:
        self.inside = True
        try:
            return action()
        finally:
            self.inside = False


@contextmanager
def _hooks(module: torch.nn.Module, before: Callable | None, after: Callable) -> Iterator[None]:
    handles = []
    try:
        for name, layer in module.named_modules():
            if before is not None:
                handles.append(layer.register_forward_pre_hook(before(name, layer), with_kwargs=True))
            handles.append(layer.register_forward_hook(after(name, layer), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _runs_alone(name: str, layer: torch.nn.Module) -> bool:
    return not any(True for _ in layer.children()) or kind_of(name, layer) == ATTENTION


def _compare_alone(record: Layer, ran: dict[str, list[Tensor] | str], outputs: list[Tensor]) -> None:
    for dtype, low in ran.items():
        if isinstance(low, str):
            record.problems[dtype] = low
        elif len(low) == len(outputs):
            for one, reference in zip(low, outputs, strict=True):
                record.own.setdefault(dtype, Errors()).add(one, reference)


def _try(action: Callable[[], Any]) -> Any:
    """What it returns, or as a string why torch refused it. No memory left is not a refusal."""
    try:
        return action()
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else type(error).__name__


def _magnitudes(x: Tensor) -> tuple[float, int, int, int]:
    """(largest magnitude, number of values, over FP16's limit, becoming 0 in FP16)"""
    size = x.detach().float().abs()
    size = size[size < _INFINITE]
    largest = float(size.max()) if size.numel() else 0.0
    half = torch.finfo(torch.float16).smallest_normal * 2**-10 / 2  # half of its smallest subnormal
    return largest, size.numel(), int((size > FP16_LARGEST).sum()), int(((size > 0) & (size <= half)).sum())


def _add_magnitudes(record: Layer, seen: tuple[float, int, int, int]) -> None:
    largest, values, over, lost = seen
    record.largest = max(record.largest, largest)
    record.values += values
    record.over += over
    record.lost += lost


def _tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in nested tuples, lists and the arguments of a call."""
    if torch.is_tensor(value):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):  # only of a call's own keywords: what hangs deeper is options, not data
        value = [x for x in value.values() if not isinstance(x, dict)]
    if isinstance(value, (tuple, list)):
        return [x for item in value for x in _tensors(item)]
    return []


def _rounded(value: Any, dtype: torch.dtype, deep: bool = False) -> Any:
    if torch.is_tensor(value):
        # a clone where the dtype is there already: the layer may work in place
        return value.to(dtype, copy=True) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        items = [_rounded(item, dtype, True) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict) and not deep:
        return {key: x if isinstance(x, dict) else _rounded(x, dtype, True) for key, x in value.items()}
    return value
