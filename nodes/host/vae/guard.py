"""A VAE whose encoder and decoder are watched for NaN, beside the VAE that it was made of.

The new VAE holds a proxy of the source's module, over its very weights and under its very patcher. All paths of the
host (whole, tiled, video) call `encode` and `decode` of the module that they are given, and there the guard stands.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from comfy_execution.utils import get_executing_context

from ....training.precision.guard import is_finite
from ..patching.guard import Call, Guard, GuardedModule, at_work
from ..patching.private_copy import module_proxy
from .copies import compute_dtype, estimate_for, set_compute_dtypes, subclass_by_half, to_dtype
from .select import half_in_float32
from .source import recognise

__all__ = ["guard_vae"]

# The FP32 VAEs at work, by guard. The host runs each prompt in a context of its own, so they go when it ends, however.
_FINE_AT_WORK: ContextVar[dict[int, Any]] = ContextVar("ref2v_fp32_vaes")
_GIVEN = {"encoder": "picture", "decoder": "latent"}


def guard_vae(vae: Any, guard: Guard) -> Any:
    """`vae` under `guard`; one that is guarded already changes its guard. Raises BadInput for a VAE without weights."""
    bare = recognise(vae).bare
    return _GuardedVAE(guard, bare).wrap(bare)


class _GuardedVAE(GuardedModule):
    """What is called instead of a VAE's module. `source`: the VAE that came in."""

    def __init__(self, guard: Guard, source: Any) -> None:
        super().__init__(guard)
        self.source = source
        # while which node worked, which half, the VAE with it in FP32
        self._fine: tuple[Any, str, weakref.ref] | None = None

    def wrap(self, vae: Any) -> Any:
        """A guarded VAE like `vae`."""
        root, encoder, decoder = vae.first_stage_model, compute_dtype(vae, "encoder"), compute_dtype(vae, "decoder")
        watched = module_proxy(root, _guarded_class(type(root)))
        watched.ref2v_guard = self if vae is self.source else _GuardedVAE(self.guard, vae)
        set_compute_dtypes(watched, encoder, decoder)
        new = copy.copy(vae)
        new.first_stage_model = watched
        # What the host would round beforehand is cast by us instead: an FP32 re-run then has it as it was.
        new.vae_dtype = torch.float32
        new.memory_used_encode = estimate_for(vae.memory_used_encode, encoder)
        new.memory_used_decode = estimate_for(vae.memory_used_decode, decoder)
        return new

    def unwrap(self, vae: Any) -> Any:
        """A VAE that `wrap` made, unguarded: the source, unless another node has changed the VAE object since."""
        own = {"first_stage_model", "vae_dtype", "memory_used_encode", "memory_used_decode"}
        source = vars(self.source)
        changed = {key: value for key, value in vars(vae).items() if key not in own and value is not source.get(key)}
        if not changed:
            return self.source
        bare = copy.copy(self.source)
        vars(bare).update(changed)
        return bare

    def run(self, module: Any, method: str, half: str, inner: Callable[..., Any], x: Any, *args: Any, **kwargs: Any):
        """`inner(module, x, ...)`, the family's own `method`, and a look at what it gives.

        Some VAEs of newer hosts write their result into `output_buffer` and return None.
        """
        dtype = module.ref2v_compute_dtypes[half]
        again = partial(inner, module, to_dtype(x, dtype), *args, **kwargs)
        working = get_executing_context()
        if self._fine is not None and self._fine[0] != working:
            self._let_go()
        result = again()
        produced = kwargs.get("output_buffer") if result is None else result
        if is_finite(produced):
            return result
        call = Call(
            part=lambda _layer: f"VAE {half}",
            module=module,
            dtype=dtype,
            given={_GIVEN[half]: x},
            again=again,
            in_float32=lambda: self._in_float32(half, method, working, x, args, kwargs),
        )
        answer = self.guard.answer(call, produced)
        return result if answer is produced or result is None else answer

    def _in_float32(self, half: str, method: str, working: Any, x: Any, args: tuple, kwargs: dict) -> Any:
        fine = None if self._fine is None or self._fine[1] != half else self._fine[2]()
        if fine is None:
            fine = half_in_float32(self.source, half)
            self._fine = (working, half, weakref.ref(fine))
            _FINE_AT_WORK.set({**_FINE_AT_WORK.get({}), id(self): fine})
        memory_used = fine.memory_used_encode if half == "encoder" else fine.memory_used_decode
        with at_work(fine.patcher, memory_used(x.shape, torch.float32)):
            fixed = getattr(fine.first_stage_model, method)(to_dtype(x, torch.float32), *args, **kwargs)
        return kwargs.get("output_buffer") if fixed is None else fixed

    def _let_go(self) -> None:
        _FINE_AT_WORK.set({guard: fine for guard, fine in _FINE_AT_WORK.get({}).items() if guard != id(self)})
        self._fine = None


@cache
def _guarded_class(family: type) -> type:
    def watching(method: str, half: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(self, x, *args, **kwargs):
            return self.ref2v_guard.run(self, method, half, inner, x, *args, **kwargs)

        return call

    return subclass_by_half(family, watching)
