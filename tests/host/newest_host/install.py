"""Puts the stand-ins in their places in the booted 0.3.75. For a process of its own, before the pack's nodes load."""

from __future__ import annotations

from typing import Any

import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import torch

from .casting import cast_weights
from .dynamic_patcher import DynamicPatcher, PlainPatcher
from .loading import as_dynamic

__all__ = ["install"]


class Interrupted(BaseException):
    """The newest host's InterruptProcessingException: no `except Exception` may catch it."""


def archive_model_dtypes(model: torch.nn.Module) -> None:
    for layer in model.modules():
        for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            setattr(layer, f"{name}_comfy_model_dtype", tensor.dtype)


def unload_model_and_clones(model: Any, unload_additional_models: bool = True, all_devices: bool = False) -> None:
    management = comfy.model_management
    family = {model.clone_base_uuid}
    if unload_additional_models:
        family |= {each.clone_base_uuid for each in model.get_nested_additional_models()}
    others = [
        loaded
        for loaded in management.current_loaded_models
        if loaded.model is not None and loaded.model.clone_base_uuid not in family
    ]
    management.free_memory(1e30, management.get_torch_device(), others)


_ABSENT = object()


def set_attr(root: Any, path: str, value: Any) -> Any:
    """What was there, or a mark that nothing was; given the mark, the attribute goes."""
    *parts, name = path.split(".")
    for part in parts:
        root = getattr(root, part)
    before = getattr(root, name, _ABSENT)
    if value is _ABSENT:
        delattr(root, name)
    else:
        setattr(root, name, value)
    return before


class NewestVAE(comfy.sd.VAE):
    def __init__(self, sd=None, device=None, config=None, dtype=None, metadata=None, fast_disk=False):
        state = dict(sd)  # the host takes some keys out
        super().__init__(sd=sd, device=device, config=config, dtype=dtype, metadata=metadata)
        if self.first_stage_model is not None:
            plain = self.patcher
            as_dynamic(self.first_stage_model, state)
            self.patcher = comfy.model_patcher.CoreModelPatcher(
                self.first_stage_model, load_device=plain.load_device, offload_device=plain.offload_device
            )


class NewestCLIP(comfy.sd.CLIP):
    def __init__(self, target=None, *args, no_init=False, disable_dynamic=False, **kwargs):
        super().__init__(target, *args, no_init=no_init, **kwargs)
        if no_init:
            return
        comfy.model_management.archive_model_dtypes(self.cond_stage_model)
        kind = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
        old = self.patcher
        self.patcher = kind(self.cond_stage_model, load_device=old.load_device, offload_device=old.offload_device)
        self.patcher.set_model_compute_dtype(torch.float32)
        self.patcher.hook_mode, self.patcher.is_clip = old.hook_mode, True

    def load_sd(self, sd, full_model=False):
        if not (full_model and self.patcher.is_dynamic()):
            return super().load_sd(sd, full_model=full_model)
        return self.cond_stage_model.load_state_dict(sd, strict=False, assign=True)

    def clone(self, disable_dynamic=False):
        new = super().clone()
        new.__class__ = NewestCLIP
        if disable_dynamic:
            new.patcher = self.patcher.clone(disable_dynamic=True)
        return new


def install() -> None:
    """From here on this process has the newest host's patchers, casting and loaders."""
    patchers, management, base = comfy.model_patcher, comfy.model_management, comfy.model_base.BaseModel
    patchers.ModelPatcher, patchers.CoreModelPatcher = PlainPatcher, DynamicPatcher
    patchers.ModelPatcherDynamic = DynamicPatcher
    comfy.ops.cast_bias_weight = cast_weights
    comfy.utils.set_attr = set_attr
    management.archive_model_dtypes = archive_model_dtypes
    management.unload_model_and_clones = unload_model_and_clones
    management.InterruptProcessingException = Interrupted
    comfy.sd.VAE, comfy.sd.CLIP = NewestVAE, NewestCLIP
    _give_models_their_notes(base)
    load = comfy.sd.load_diffusion_model_state_dict

    def load_diffusion_model_state_dict(sd, model_options={}, metadata=None, disable_dynamic=False):  # noqa: B006
        state = dict(sd)
        plain = load(sd, model_options=model_options, metadata=metadata)
        if disable_dynamic:
            return plain
        root = plain.model
        prefix = comfy.model_detection.unet_prefix_from_state_dict(state)
        inside = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        to_load = root.model_config.process_unet_state_dict(inside or state)
        as_dynamic(root.diffusion_model, to_load)
        return DynamicPatcher(root, load_device=plain.load_device, offload_device=plain.offload_device)

    comfy.sd.load_diffusion_model_state_dict = load_diffusion_model_state_dict


def _give_models_their_notes(base: type) -> None:
    built, loaded = base.__init__, base.load_model_weights

    def __init__(self, *args, **kwargs):
        built(self, *args, **kwargs)
        if hasattr(self, "diffusion_model"):
            archive_model_dtypes(self.diffusion_model)

    def load_model_weights(self, sd, unet_prefix="", assign=False):
        if not assign:
            return loaded(self, sd, unet_prefix)
        state = {key[len(unet_prefix) :]: sd.pop(key) for key in [*sd] if key.startswith(unet_prefix)}
        state = self.model_config.process_unet_state_dict(state)
        self.diffusion_model.load_state_dict(state, strict=False, assign=True)
        return self

    base.__init__, base.load_model_weights = __init__, load_model_weights
    base.get_dtype_inference = lambda self: self.manual_cast_dtype or self.get_dtype()
