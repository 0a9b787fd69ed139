"""The patchers of the newest host: plain ones with what they have gained since 0.3.75, and those of dynamic VRAM."""

from __future__ import annotations

import uuid
from collections import namedtuple
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.utils
import torch
from comfy.patcher_extension import CallbacksMP

from .casting import Handle, PatchAtUse

__all__ = ["DynamicPatcher", "PlainPatcher"]

_Backup = namedtuple("_Backup", ["weight", "inplace_update"])
_SMALL_LAYER = 16 * 1024  # bytes; layers up to this size are brought over when the model is loaded, not at their use


class PlainPatcher(comfy.model_patcher.ModelPatcher):
    """0.3.75's ModelPatcher with what the newest one adds."""

    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False, fast_disk=False):
        super().__init__(model, load_device, offload_device, size, weight_inplace_update=weight_inplace_update)
        self.fast_disk = fast_disk
        self.backup_buffers: dict[str, torch.Tensor] = {}
        self.cached_patcher_init: tuple | None = None
        self.is_multigpu_base_clone = False
        self.clone_base_uuid = uuid.uuid4()

    def is_dynamic(self) -> bool:
        return False

    def get_free_memory(self, device):
        return comfy.model_management.get_free_memory(device)

    def loaded_ram_size(self) -> int:
        return 0

    def pinned_memory_size(self) -> int:
        return 0

    def partially_unload_ram(self, ram_to_unload, subsets=()) -> int:
        return 0

    def get_clone_model_override(self) -> tuple:
        return self.model, (self.backup, self.backup_buffers, self.object_patches_backup, self.pinned)

    def clone(self, disable_dynamic=False, model_override=None, force_deepcopy=False):
        """Another patcher of the same model; with `disable_dynamic` or `force_deepcopy`, of one read anew from disk."""
        kind = type(self)
        to_plain = self.is_dynamic() and disable_dynamic
        if to_plain:
            kind = PlainPatcher
        if (to_plain or force_deepcopy) and model_override is None:
            if self.cached_patcher_init is None:
                raise RuntimeError("Cannot create non-dynamic delegate: cached_patcher_init is not initialized.")
            model_override = self._read_anew(disable_dynamic=True).get_clone_model_override()
        model, of_the_weights = model_override or self.get_clone_model_override()
        new = kind(
            model, self.load_device, self.offload_device, self.model_size(),
            weight_inplace_update=self.weight_inplace_update, fast_disk=self.fast_disk,
        )  # fmt: skip
        new.backup, new.backup_buffers, new.object_patches_backup, new.pinned = of_the_weights
        new.parent = self
        self._hand_on(new)
        for callback in self.get_all_callbacks(CallbacksMP.ON_CLONE):
            callback(self, new)
        return new

    def _hand_on(self, new: Any) -> None:
        """What every clone has of the patcher that it was made of."""
        for name in (
            "patches_uuid", "force_cast_weights", "is_injected", "skip_injection", "is_clip", "hook_mode",
            "hook_backup", "cached_patcher_init", "is_multigpu_base_clone", "clone_base_uuid",
        ):  # fmt: skip
            setattr(new, name, getattr(self, name))
        new.patches = {key: [*chain] for key, chain in self.patches.items()}
        new.object_patches = {**self.object_patches}
        new.weight_wrapper_patches = {**self.weight_wrapper_patches}
        new.model_options = _containers_copied(self.model_options)
        for key, attachment in self.attachments.items():
            passed_on = getattr(attachment, "on_model_patcher_clone", lambda kept=attachment: kept)
            new.attachments[key] = passed_on()
        for key, models in self.additional_models.items():
            new.additional_models[key] = [model.clone() for model in models]
        for name in ("callbacks", "wrappers"):
            of_mine = getattr(self, name)
            setattr(new, name, {kind: {key: [*each] for key, each in by.items()} for kind, by in of_mine.items()})
        new.injections = {key: [*each] for key, each in self.injections.items()}
        copied = comfy.model_patcher.create_hook_patches_clone
        new.hook_patches = copied(self.hook_patches)
        new.hook_patches_backup = copied(self.hook_patches_backup) if self.hook_patches_backup else None
        new.cached_hook_patches = {group: {**cached} for group, cached in self.cached_hook_patches.items()}
        new.current_hooks = self.current_hooks.clone() if self.current_hooks else self.current_hooks
        new.forced_hooks = self.forced_hooks.clone() if self.forced_hooks else self.forced_hooks

    def _read_anew(self, **more: Any) -> Any:
        """What the loader of this model makes of the file now: a patcher, or the one of several that is named."""
        load, arguments, *which = self.cached_patcher_init
        made = load(*arguments, **more)
        return made[which[0]] if which else made

    def deepclone_multigpu(self, new_load_device=None, models_cache=None):
        """A clone for another GPU, over weights of its own that the loader reads anew."""
        if self.cached_patcher_init is None:
            raise RuntimeError(
                f"Cannot create multigpu deepclone of {type(self.model).__name__}: the loader that produced this model "
                "does not support multigpu (cached_patcher_init is not initialized)."
            )
        comfy.model_management.unload_model_and_clones(self)
        new = self.clone(model_override=(self._read_anew().model, ({}, {}, {}, set())))
        new.hook_backup = {}
        new.load_device = new_load_device or new.load_device
        new.remove_additional_models("multigpu")
        cache = {} if models_cache is None else models_cache
        for key, models in new.additional_models.items():
            for each in models:
                if each.clone_base_uuid not in cache:
                    cache[each.clone_base_uuid] = each.deepclone_multigpu(new_load_device, cache)
            new.additional_models[key] = [cache[each.clone_base_uuid] for each in models]
        return new


class DynamicPatcher(PlainPatcher):
    """The patcher of dynamic VRAM: loading a model prepares its layers, and each weight comes as its layer computes."""

    def __init__(self, model, load_device, offload_device, size=0, weight_inplace_update=False, fast_disk=False):
        super().__init__(model, load_device, offload_device, size, weight_inplace_update, fast_disk)
        for name, empty in (("dynamic_vbars", {}), ("dynamic_pins", {}), ("dynamic_patchers", set())):
            if not hasattr(model, name):
                setattr(model, name, empty)
        model.dynamic_vbars.setdefault(load_device, Handle())
        model.dynamic_pins.setdefault(load_device, {"weights": Handle(), "active": False})
        model.dynamic_patchers.add(id(self))
        self.non_dynamic_delegate_model = None

    def is_dynamic(self) -> bool:
        return True

    def pin_weight_to_device(self, key):
        raise RuntimeError("pin_weight_to_device is not for dynamic loading")

    def unpin_weight(self, key):
        raise RuntimeError("unpin_weight is not for dynamic loading")

    def unpin_all_weights(self):
        pass

    def memory_required(self, input_shape):
        return super().memory_required(input_shape) * 1.3 + 2**30

    def get_non_dynamic_delegate(self):
        made = self.clone(disable_dynamic=True, model_override=self.non_dynamic_delegate_model)
        self.non_dynamic_delegate_model = made.get_clone_model_override()
        return made

    # -------------------------------------------------------------------------------------------- onto the device

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False, dirty=False):
        assert not force_patch_weights
        assert not full_load
        assert device_to == self.load_device
        self._put_back()
        with self.use_ejected():
            for name, layer in self.model.named_modules():
                self._prepare(name, layer, dirty)
            for key, buffer in [*self.model.named_buffers()]:
                self.backup_buffers.setdefault(key, buffer)
                owner, attribute = _owner(self.model, key)
                owner._buffers[attribute] = buffer.to(device_to, getattr(owner, f"{attribute}_comfy_model_dtype", None))
            self.model.device = device_to
            self.model.current_weight_patches_uuid = self.patches_uuid
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def _prepare(self, name: str, layer: torch.nn.Module, dirty: bool) -> None:
        own = dict(layer.named_parameters(recurse=False))
        inside = len(dict(layer.named_parameters())) > len(own)
        if inside:  # weights of a module that has layers with weights too are cast for good
            for attribute, weight in own.items():
                weight.data = weight.data.to(dtype=getattr(layer, f"{attribute}_comfy_model_dtype", None))
        elif hasattr(layer, "comfy_cast_weights"):
            self._prepare_own_layer(name, layer, own, dirty)
        else:
            for attribute, weight in own.items():  # a layer that is not the host's: cast now, put back on unloading
                key = f"{name}.{attribute}".lstrip(".")
                self.backup.setdefault(key, _Backup(weight, False))
                cast = weight.to(self.load_device, getattr(layer, f"{attribute}_comfy_model_dtype", None))
                self._set(key, cast)

    def _prepare_own_layer(self, name: str, layer: Any, own: dict[str, Any], dirty: bool) -> None:
        layer.comfy_cast_weights = True
        layer.seed_key = name
        layer._pin_state = self.model.dynamic_pins[self.load_device]
        if dirty or not hasattr(layer, "_v_signature"):
            layer._v_signature = None
        at_use = comfy.model_management.module_size(layer) > _SMALL_LAYER
        if at_use:
            layer.__dict__.setdefault("_v", Handle())
            for attribute in ("weight", "bias"):
                key = f"{name}.{attribute}".lstrip(".")
                patch = PatchAtUse(key, self.patches) if key in self.patches else None
                setattr(layer, f"{attribute}_lowvram_function", patch)
                setattr(layer, f"{attribute}_function", [*self.weight_wrapper_patches.get(key, ())])
        for attribute in own:
            if not at_use or attribute not in ("weight", "bias"):
                self._bring_over(f"{name}.{attribute}".lstrip("."))
        if not at_use:
            layer.__dict__.pop("_v", None)

    def _bring_over(self, key: str) -> None:
        """A small weight, in the dtype of the file, with its LoRA."""
        weight = comfy.utils.get_attr(self.model, key)
        self.backup.setdefault(key, _Backup(weight, False))
        made = weight.detach().clone()
        if key in self.patches:
            made = comfy.lora.calculate_weight(self.patches[key], made.float(), key)
            made = comfy.float.stochastic_rounding(made, weight.dtype, seed=comfy.model_patcher.string_to_seed(key))
        self._set(key, made)

    def _set(self, key: str, weight: torch.Tensor) -> None:
        comfy.utils.set_attr_param(self.model, key, weight)
        self.model.model_loaded_weight_memory += weight.numel() * weight.element_size()

    def patch_model(self, device_to=None, lowvram_model_memory=0, load_weights=True, force_patch_weights=False):
        assert not load_weights  # models are loaded by load_models_gpu alone
        return super().patch_model(load_weights=load_weights, force_patch_weights=force_patch_weights)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """None, not the bytes that were loaded: nobody knows them."""
        assert not force_patch_weights
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            was = self.model.current_weight_patches_uuid
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
            self.load(device_to, dirty=was is not None and was != self.patches_uuid)

    # ------------------------------------------------------------------------------------------------ off it again

    def _put_back(self) -> int:
        """The file's own weights and buffers in place of what was brought over; how many bytes that frees."""
        freed = self.model.model_loaded_weight_memory
        for key in [*self.backup]:
            comfy.utils.set_attr_param(self.model, key, self.backup.pop(key).weight)
        for key in [*self.backup_buffers]:
            owner, attribute = _owner(self.model, key)
            owner._buffers[attribute] = self.backup_buffers.pop(key)
        self.model.model_loaded_weight_memory = 0
        return freed

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        super().unpatch_model(device_to=None, unpatch_weights=False)
        if unpatch_weights:
            self.partially_unload(None, 1e32)

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        assert not force_patch_weights
        for layer in self.model.modules():
            if hasattr(layer, "_v"):
                layer._v_signature = layer._v_weight = layer._v_bias = None
        return self._put_back()

    def patch_hook_weight_to_device(self, hooks, combined_patches, key, original_weights, memory_counter):
        if key in combined_patches:
            raise RuntimeError("weight hooks are not for dynamic loading")

    def unpatch_hooks(self, whitelist_keys_set=None) -> None:
        pass

    def __del__(self):
        patchers = getattr(self.model, "dynamic_patchers", set())
        if id(self) in patchers:
            patchers.discard(id(self))
            self.detach(unpatch_all=False)


def _owner(root: torch.nn.Module, key: str) -> tuple[torch.nn.Module, str]:
    path, _, attribute = key.rpartition(".")
    return root.get_submodule(path), attribute


def _containers_copied(value: Any) -> Any:
    """Lists and dicts copied, all else shared, as the newest host copies a patcher's options."""
    if isinstance(value, dict):
        return {key: _containers_copied(each) for key, each in value.items()}
    return [_containers_copied(each) for each in value] if isinstance(value, list) else value
