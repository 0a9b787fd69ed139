"""A CLIP whose text encoders are watched for NaN, beside the CLIP that it was made of.

It is a clone of the host's, and what it calls is a proxy over the source's very weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import comfy.hooks
import comfy.model_management
import torch

from ....training.errors import BadInput
from ....training.precision.guard import is_finite
from ..patching.guard import Call, Guard, GuardedModule, at_work, float32_patcher
from ..patching.private_copy import copy_module, module_proxy
from ..patching.provenance import guard_of
from .select import text_encoders

__all__ = ["guard_clip"]

_COMPUTE = torch.float32  # written out in the host's text encoders, whatever their weights are kept in
_OPTIONS = ("layer", "layer_idx", "return_projected_pooled", "execution_device")  # set anew by the host for each call


def guard_clip(clip: Any, guard: Guard) -> Any:
    """`clip` under `guard`; one that is guarded already changes its guard. Raises BadInput for one without weights."""
    root = getattr(clip, "cond_stage_model", None)
    if root is None:
        raise BadInput("The clip holds no weights: the checkpoint that it comes from has no text encoder.")
    return _GuardedCLIP(guard, _unguarded_root(root)).wrap(clip)


def _unguarded_root(root: torch.nn.Module) -> torch.nn.Module:
    guard = guard_of(root)
    return root if guard is None else guard.root


class _GuardedCLIP(GuardedModule):
    """What is called instead of a CLIP's model. `root`: that model, unguarded."""

    def __init__(self, guard: Guard, root: torch.nn.Module) -> None:
        super().__init__(guard)
        self.root = root

    def wrap(self, clip: Any) -> Any:
        """A guarded CLIP like `clip`."""
        root = _unguarded_root(clip.cond_stage_model)
        new = clip.clone()
        new.cond_stage_model = module_proxy(root, _guarded_class(type(root)))
        new.cond_stage_model.ref2v_guard = self if root is self.root else _GuardedCLIP(self.guard, root)
        return new

    def unwrap(self, clip: Any) -> Any:
        """`clip`, which `wrap` made, unguarded."""
        new = clip.clone()
        new.cond_stage_model = self.root
        return new

    def run(self, module: Any, inner: Callable[..., Any], tokens: Any, *args: Any, **kwargs: Any) -> Any:
        """`inner(module, tokens)`: conditioning, pooled output and more, and a look at them."""
        again = partial(inner, module, tokens, *args, **kwargs)
        result = again()
        if is_finite(result):
            return result
        call = Call(
            part=partial(_part, module),
            module=module,
            dtype=_COMPUTE,
            given={"embeddings": tokens, "prompt's weights": _weights_of(tokens)},
            again=again,
            in_float32=lambda: self._in_float32(module, inner, tokens, *args, **kwargs),
        )
        return self.guard.answer(call, result)

    def _in_float32(self, module: Any, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Copied for this one call: text is encoded seldom, and its encoders can be large."""
        fine = float32_patcher(_patcher_at_work(module), "CLIP", module, partial(_in_float32, module))
        fine.is_clip, fine.hook_mode = True, comfy.hooks.EnumHookMode.MinVram
        _copy_options(module, fine.model)
        with at_work(fine, 0):
            return inner(fine.model, *args, **kwargs)


def _part(module: torch.nn.Module, layer: str) -> str:
    """ "CLIP (clip_g)", by the encoder in which the layer lies."""
    within = [name for name in text_encoders(module) if layer == name or layer.startswith(f"{name}.")]
    return f"CLIP ({within[0]})" if within else "CLIP"


def _weights_of(tokens: Any) -> torch.Tensor:
    """The weights that a prompt gives its words, "(word:1.2)"."""
    if isinstance(tokens, dict):
        return torch.cat([torch.zeros(0), *(_weights_of(part) for part in tokens.values())])
    pairs = [pair for batch in tokens if isinstance(batch, list) for pair in batch if isinstance(pair, tuple)]
    return torch.tensor([pair[1] for pair in pairs if len(pair) > 1 and isinstance(pair[1], float)] or [0.0])


def _patcher_at_work(module: torch.nn.Module) -> Any:
    """The patcher of what the proxy `module` stands over, as it is loaded now; None: the host does not say."""
    weight, loaded = next(module.parameters()), comfy.model_management.loaded_models()
    return next((patcher for patcher in loaded if next(patcher.model.parameters(), None) is weight), None)


def _in_float32(module: torch.nn.Module, patcher: Any) -> torch.nn.Module:
    private = copy_module(module, patcher, torch.float32)
    for part in private.modules():
        if "ref2v_compute" in part.__dict__:  # what Select CLIP Precision has chosen
            part.ref2v_compute = torch.float32
    return private


def _copy_options(module: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Which layer to stop at, and the like, which the host has set on `module` for the call at hand."""
    for own, other in zip(module.modules(), copied.modules(), strict=True):
        other.__dict__.update({name: own.__dict__[name] for name in _OPTIONS if name in own.__dict__})


@cache
def _guarded_class(family: type) -> type:
    def encode_token_weights(self, tokens, *args, **kwargs):
        return self.ref2v_guard.run(self, family.encode_token_weights, tokens, *args, **kwargs)

    return type(family.__name__, (family,), {"encode_token_weights": encode_token_weights})
