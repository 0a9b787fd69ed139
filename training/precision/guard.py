"""Where a NaN came from: the first layer of a network whose result is not finite, and what made it so.

Looking costs a hook for each layer and a wait for the device after it. So look only when a network's own output is not
finite, by running the same call once more:

    if not is_finite(output):
        with FirstBadLayer(network) as bad:
            network(x)
        raise TrainingFailed(str(bad.found))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .dtypes import dtype_name

__all__ = ["BadLayer", "FirstBadLayer", "is_finite", "tensors"]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in `value`: itself, or those in its lists, tuples and dicts (a video decoder gives chunks)."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)


def is_finite(value: Any) -> bool:
    """Whether no tensor in `value` holds NaN or infinity. None, and what holds no tensor, is finite."""
    return all(_is_finite(tensor) for tensor in tensors(value))


def _is_finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isfinite(_readable(tensor)).all())


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats have no arithmetic."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


@dataclass(frozen=True)
class BadLayer:
    """The first layer whose result was not finite, where all before it were.

    name, kind: its dotted name and its class. dtype: that in which it computed; `autocast`: because autocast was on.
    holds: "NaN" or "infinity", what its result held. weight, weight_holds: a tensor of its own that is at fault, as
    "norm.weight", and why, as "holds NaN". largest: the largest finite magnitude that it was given, None if unknown.
    after, inside: the fault is in no layer but in what `inside` computes between the layer `after` and `name` (a sum,
    an attention product); `name` was the first to be given that, and is empty where `inside` gave it on itself.
    """

    name: str
    kind: str
    dtype: torch.dtype | None
    autocast: bool = False
    holds: str = "NaN"
    weight: str = ""
    weight_holds: str = ""
    largest: float | None = None
    after: str = ""
    inside: str | None = None

    @property
    def overflowed(self) -> bool:
        """The numbers passed the dtype's limit; a wider dtype may well hold them."""
        return not self.weight and self.holds == "infinity" or self.weight_holds.startswith("reaches")

    def __str__(self) -> str:
        """For a sentence: "layer mid.attn.q (Conv2d, fp16): its weight mid.attn.q.weight holds NaN"."""
        named = f"layer {self.name} ({self.kind}, {self._ran_in()})"
        if self.weight:
            return f"{named}: its weight {self.weight} {self.weight_holds}"
        if self.inside is not None:
            within = f"{self.inside or 'the network'} ({self.kind}, {self._ran_in()})"
            between = [f"after layer {self.after}"] * bool(self.after) + [f"before layer {self.name}"] * bool(self.name)
            named = f"what {within} computes {' and '.join(between) or 'itself'}, outside of any layer"
        return f"{named}: {self._went_wrong()}"

    def _ran_in(self) -> str:
        name = dtype_name(self.dtype) if self.dtype else "no dtype"
        return f"{name} by autocast" if self.autocast else name

    def _went_wrong(self) -> str:
        given = "" if self.largest is None else f"; the largest number that it was given is {self.largest:.4g}"
        if self.dtype is None:
            return f"the result holds {self.holds}{given}"
        limit = f"{dtype_name(self.dtype)}'s limit, {torch.finfo(self.dtype).max:g}"
        if self.holds == "infinity":
            return f"the result passed {limit}{given}"
        return f"it gave NaN from finite numbers{given} (against {limit})"


class FirstBadLayer:
    """Within the block, `found` becomes the first layer of `module` with a result that is not finite, else None.

    A layer that was given NaN or infinity is never blamed: what computed that is, in or between the layers before it.
    Nothing stays on the module afterwards. Layers inside a compiled graph run without hooks and are not seen.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.found: BadLayer | None = None
        self._module = module
        self._handles: list[Any] = []
        self._open: list[tuple[str, torch.nn.Module]] = []  # the layers that are at work, outermost first
        self._last = ""  # the innermost layer that came out finite just now

    @property
    def name(self) -> str:
        """The dotted name of the layer found, or "" where no single one was."""
        return "" if self.found is None else self.found.name or self.found.inside or ""

    def __enter__(self) -> FirstBadLayer:
        for name, layer in _named_layers(self._module):
            self._handles.append(layer.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._after(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()

    def _before(self, name: str):
        def look(layer, args, kwargs):
            if self.found is None:
                given = _first_tensor(args) if args else _first_tensor(list(kwargs.values()))
                if given is not None and not _is_finite(given):
                    inside, outer = self._open[-1] if self._open else ("", self._module)
                    self.found = BadLayer(
                        name, type(outer).__name__, _float_dtype(given), _autocast(given), _holds(given),
                        after=self._last, inside=inside,
                    )  # fmt: skip
                self._open.append((name, layer))

        return look

    def _after(self, name: str):
        def look(layer, args, output):
            if self.found is not None:
                return
            if self._open and self._open[-1][1] is layer:
                self._open.pop()
            bad = next((tensor for tensor in tensors(output) if not _is_finite(tensor)), None)
            if bad is None:
                if _is_innermost(layer):
                    self._last = name
                return
            self.found = self._blame(name, layer, _first_tensor(args), bad)

        return look

    def _blame(self, name: str, layer: torch.nn.Module, given: torch.Tensor | None, bad: torch.Tensor) -> BadLayer:
        kind, dtype, autocast, holds = type(layer).__name__, _float_dtype(bad), _autocast(bad), _holds(bad)
        weight, fault = _bad_weight(layer, name, dtype)
        if weight or _is_innermost(layer):
            return BadLayer(name, kind, dtype, autocast, holds, weight, fault, _largest(given))
        return BadLayer("", kind, dtype, autocast, holds, largest=_largest(given), after=self._last, inside=name)


def _named_layers(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Name and layer of all inside `module`, those too that it holds without having them registered."""
    seen = {id(module)}
    parts = [("", module), *((k, v) for k, v in vars(module).items() if isinstance(v, torch.nn.Module))]
    for root, part in parts:
        for name, layer in part.named_modules(prefix=root):
            if id(layer) not in seen and ".parametrizations" not in f".{name}":
                seen.add(id(layer))
                yield name, layer


def _is_innermost(layer: torch.nn.Module) -> bool:
    """A weight that is itself computed (weight norm) belongs to the layer that uses it."""
    return all(name == "parametrizations" for name, _ in layer.named_children())


def _first_tensor(values: Any) -> torch.Tensor | None:
    """What a layer works on. Not the others: an attention mask may hold infinity by right."""
    return next(tensors(values), None)


def _float_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    return tensor.dtype if tensor.is_floating_point() else None


def _autocast(tensor: torch.Tensor) -> bool:
    kind = tensor.device.type
    return torch.is_autocast_enabled(kind) and tensor.dtype == torch.get_autocast_dtype(kind)


def _holds(tensor: torch.Tensor) -> str:
    """Infinity where there is any: an overflow comes before the NaN that it leads to."""
    return "infinity" if torch.isinf(_readable(tensor)).any() else "NaN"


def _largest(given: torch.Tensor | None) -> float | None:
    if given is None or not given.is_floating_point() or not given.numel():
        return None
    finite = torch.nan_to_num(_readable(given).detach().float(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max())


def _bad_weight(layer: torch.nn.Module, name: str, dtype: torch.dtype | None) -> tuple[str, str]:
    """Name and fault of a weight of `layer` that holds NaN or infinity, or would where it is cast to `dtype`."""
    limit = torch.finfo(dtype).max if dtype else math.inf
    deep = _is_innermost(layer)
    for key, weight in [*layer.named_parameters(recurse=deep), *layer.named_buffers(recurse=deep)]:
        if not weight.is_floating_point() or weight.is_meta:
            continue
        if not _is_finite(weight.detach()):
            return f"{name}.{key}", f"holds {'NaN' if torch.isnan(_readable(weight)).any() else 'infinity'}"
        largest = _largest(weight.detach())
        if dtype is not None and largest is not None and largest > limit:
            return f"{name}.{key}", f"reaches {largest:.4g}, past {dtype_name(dtype)}'s limit, {limit:g}"
    return "", ""
