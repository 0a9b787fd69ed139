"""A MODEL whose network is watched for NaN, beside the MODEL that it was made of: a clone with a wrapper."""

from __future__ import annotations

from typing import Any

import torch
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP

from ....training.precision.guard import is_finite
from ..patching.guard import RERUN, Call, Guard, at_work, float32_patcher
from ..patching.private_copy import copy_in_parts

__all__ = ["GUARD", "guard_model", "network_name", "reruns_in_float32"]

GUARD = "ref2v_nan_guard"  # the key of what hangs on a guarded patcher


def guard_model(model: Any, guard: Guard) -> Any:
    """`model` under `guard`; one that is guarded already changes its guard."""
    new = model.clone()
    watch = _Watch(guard)
    new.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, GUARD)
    new.remove_callbacks_with_key(CallbacksMP.ON_CLEANUP, GUARD)
    new.add_wrapper_with_key(WrappersMP.APPLY_MODEL, GUARD, watch)
    new.add_callback_with_key(CallbacksMP.ON_CLEANUP, GUARD, watch.forget)
    return new


def reruns_in_float32(model: Any) -> bool:
    """Whether a guard may give other numbers than the unguarded `model`: it computes in FP32 what was NaN."""
    watches = model.wrappers.get(WrappersMP.APPLY_MODEL, {}).get(GUARD, ())
    return any(watch.guard.on_nan == RERUN for watch in watches)


def network_name(network: torch.nn.Module) -> str:
    """What a person calls it: "UNet", or "diffusion model (Flux)"."""
    kind = type(network).__name__
    return "UNet" if "unet" in kind.lower() else f"diffusion model ({kind})"


class _Watch:
    """Around `BaseModel._apply_model`: every call of the network in a sampling run, whatever the sampler."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self._fine: Any = None  # a patcher of the model in FP32, kept for the rest of a sampling run that needed it

    def __deepcopy__(self, _memo: dict) -> _Watch:
        return self

    def forget(self, *_: Any) -> None:
        """At the end of a sampling run: an FP32 copy of a UNet is large."""
        self._fine = None

    def __call__(
        self,
        executor: Any,
        x: torch.Tensor,
        t: torch.Tensor,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: dict[str, Any] | None = None,
        **conds: Any,
    ) -> torch.Tensor:
        options = {} if transformer_options is None else transformer_options
        spare = _copied(control)  # the network takes a ControlNet's tensors off the lists as it uses them
        result = executor(x, t, c_concat, c_crossattn, control, options, **conds)
        if is_finite(result):
            return result

        def again(run: Any = executor) -> torch.Tensor:
            return run(x, t, c_concat, c_crossattn, _copied(spare), options, **conds)

        base = executor.class_obj
        call = Call(
            part=lambda _layer: network_name(base.diffusion_model),
            module=base.diffusion_model,
            dtype=getattr(base, "manual_cast_dtype", None) or base.get_dtype(),
            given={
                "latent": x,
                "sigma": t,
                "image beside it": c_concat,
                "conditioning": c_crossattn,
                "ControlNet's output": spare,
                # a mask may hold infinity by right
                **{f"conditioning {name}": value for name, value in conds.items() if "mask" not in name},
            },
            again=again,
            in_float32=lambda: self._in_float32(executor, again, x),
            when=_when(t, options.get("sample_sigmas")),
        )
        answer = self.guard.answer(call, result)
        return answer.to(result) if answer is not result else result

    def _in_float32(self, executor: Any, again: Any, x: torch.Tensor) -> torch.Tensor:
        if self._fine is None:
            self._fine = _float32_patcher(executor.class_obj)
        model = self._fine.model
        inner = WrapperExecutor.new_class_executor(model._apply_model, model, executor.wrappers, executor.idx + 1)
        with at_work(self._fine, model.memory_required(list(x.shape))):
            return again(inner.execute)


def _copied(control: Any) -> Any:
    if not isinstance(control, dict):
        return control
    return {name: list(value) if isinstance(value, list) else value for name, value in control.items()}


def _when(t: torch.Tensor, sigmas: torch.Tensor | None) -> str:
    """ "at sigma 14.61 (step 1 of 8)"; a sampler may ask between two steps, which then counts to the first of them."""
    sigma = float(t.flatten()[0])
    if sigmas is None or len(sigmas) < 2:
        return f"at sigma {sigma:.4g}"
    begun = int((sigmas[:-1] >= sigma * (1 - 1e-4)).sum())
    return f"at sigma {sigma:.4g} (step {max(begun, 1)} of {len(sigmas) - 1})"


def _float32_patcher(base: Any) -> Any:
    """A patcher of a copy of `base`, with weights and compute in FP32 and with the same patches (LoRA)."""
    patcher = base.current_patcher

    def copied(patcher: Any) -> Any:
        private = copy_in_parts(base, patcher, {})
        private.manual_cast_dtype, private.current_patcher = None, None
        return private

    new = float32_patcher(patcher, "MODEL", base, copied, " during the run")
    for key, functions in getattr(patcher, "weight_wrapper_patches", {}).items():
        for function in functions:
            new.add_weight_wrapper(key, function)
    return new
