"""Where numbers that are not finite came from, forward or backward: looked for by running a step once more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...errors import BadInput

__all__ = ["FirstBadGradient", "find_origin", "refuse_without_gradient"]


class Found(Protocol):
    """What a look at the forward pass gives: the first layer at fault, or None (training/precision/guard.py)."""

    @property
    def found(self) -> Any: ...

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class BadGradient:
    """The first gradient on its way back that was not finite: the one at the output of layer `name`.

    after, norm: the layer reached last with a finite gradient, and that gradient's norm; "" where there was none.
    """

    name: str
    kind: str
    after: str
    norm: float

    def __str__(self) -> str:
        if not self.after:
            return f"the gradient of the loss itself, before it reached any layer (the first is {self.name})"
        return (
            f"the gradient at the output of layer {self.name} ({self.kind}); it was finite before that, at the output "
            f"of layer {self.after}, with norm {self.norm:.4g}"
        )


class FirstBadGradient:
    """Within the block, `found` becomes the first gradient of a layer's output that is not finite, else None.

    The innermost layers are looked at, in the order in which the backward pass reaches them.
    """

    def __init__(self, module: nn.Module):
        self.found: BadGradient | None = None
        self._module = module
        self._handles: list[Any] = []
        self._last: tuple[str, Tensor] | None = None

    def __enter__(self) -> FirstBadGradient:
        for name, layer in self._module.named_modules():
            if name and next(layer.children(), None) is None:
                self._handles.append(layer.register_forward_hook(self._follow(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _follow(self, name: str):
        def look_at_its_gradient(layer, _, output):
            if torch.is_tensor(output) and output.requires_grad:
                self._handles.append(output.register_hook(lambda gradient: self._look(name, layer, gradient)))

        return look_at_its_gradient

    def _look(self, name: str, layer: nn.Module, gradient: Tensor) -> None:
        if self.found is not None:
            return
        if torch.isfinite(gradient).all():
            self._last = (name, gradient.detach())
            return
        after, norm = "", 0.0
        if self._last is not None:
            after, norm = self._last[0], float(self._last[1].float().norm())
        self.found = BadGradient(name, type(layer).__name__, after, norm)


def find_origin(
    net: nn.Module, backward: Callable[[], None], watch_forward: Callable[[nn.Module], AbstractContextManager[Found]]
) -> str:
    """Run `backward` (forward and backward of the step that went wrong) once more and say what went wrong first.

    Leaves gradients behind. Returns "" where everything is finite this time.
    """
    for parameter in net.parameters():
        parameter.grad = None
    with watch_forward(net) as ahead, FirstBadGradient(net) as back:
        backward()
    if ahead.found is not None:
        return f"{ahead.found}, gradient norm of that layer {_gradient_norm(net, ahead.name):.4g}"
    if back.found is not None:
        return str(back.found)
    for name, parameter in net.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the gradient of the parameter {name}, gradient norm {float(parameter.grad.float().norm()):.4g}"
    return ""


def _gradient_norm(net: nn.Module, name: str) -> float:
    """L2 norm of the gradients of a layer's parameters; 0 for a layer without any."""
    gradients = [p.grad.float().flatten() for p in net.get_submodule(name).parameters() if p.grad is not None]
    return float(torch.cat(gradients).norm()) if gradients else 0.0


def refuse_without_gradient(net: nn.Module, parameters: dict[str, nn.Parameter], step: int) -> None:
    """BadInput where a backward pass left trained parameters without a gradient: they would stay as they are, unsaid.

    parameters: what is trained, by name. Most often a kernel without backward stands where attention is computed.
    """
    without = [name for name, parameter in parameters.items() if parameter.grad is None]
    if not without:
        return
    cause = ""
    if functions := _replaced_attention(net):
        cause = (
            f": attention is computed by {', '.join(functions)}, put there by another program, and that gives no "
            "gradient; take it out for training"
        )
    raise BadInput(
        f"Step {step}: expected a gradient for each of {len(parameters)} trained parameters, got none for "
        f"{len(without)}, the first {', '.join(without[:3])}{cause}."
    )


def _replaced_attention(net: nn.Module) -> list[str]:
    """What is called for attention in the place of torch's and diffusers' own functions."""
    attention = torch.nn.functional.scaled_dot_product_attention
    names = {} if attention is torch._C._nn.scaled_dot_product_attention else {_name_of(attention): None}
    for layer in net.modules():
        processor = getattr(layer, "processor", None)
        kind = processor if hasattr(processor, "__qualname__") else type(processor)
        if processor is not None and not str(kind.__module__).startswith("diffusers."):
            names[_name_of(kind)] = None
    return list(names)


def _name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"
