"""A patcher of the host for a copy of a model, with everything that other nodes have put on the model's own patcher."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from ..progress import NOT_A_FAILURE
from .private_copy import is_dynamic

__all__ = [
    "patcher_of_copy",
    "plain_patcher",
    "reread_and_copy",
    "retarget",
    "unload_model",
]

_LOG = logging.getLogger("ref2v")
# What a patcher knows of the weights in memory. All patchers of one model share these very objects: the host takes one
# off the model and puts the next one on, and what the first has put aside the second must find.
_OF_THE_WEIGHTS = ("backup", "object_patches_backup", "pinned", "hook_backup")
# What newer hosts know a model by, and how they read it once more.
_OF_THE_FILE = ("clone_base_uuid", "cached_patcher_init", "is_multigpu_base_clone")
# What nodes put on a patcher, whatever model it is for.
_OF_OTHER_NODES = (
    "patches", "patches_uuid", "object_patches", "weight_wrapper_patches", "model_options", "force_cast_weights",
    "weight_inplace_update", "attachments", "additional_models", "callbacks", "wrappers", "skip_injection",
    "injections", "hook_patches", "forced_hooks", "is_clip", "hook_mode",
)  # fmt: skip
_FURTHER_GPUS = "multigpu"  # the key of `additional_models` under which newer hosts keep copies for other GPUs


def plain_patcher(patcher: Any) -> Any:
    """The patcher to make a copy from. For one under dynamic VRAM a plain one, whose model the host has read from its
    file again; itself where the loader has left no way to do so, or the file is not there any more.
    """
    if not is_dynamic(patcher) or getattr(patcher, "cached_patcher_init", None) is None:
        return patcher
    try:
        return patcher.clone(disable_dynamic=True)
    except NOT_A_FAILURE:
        raise
    except Exception as failure:  # a loader of any node pack
        _LOG.warning("A model could not be read again from its file: %s: %s", type(failure).__name__, failure)
        return patcher


def reread_and_copy(patcher: Any, copied: Callable[[Any], Any]) -> tuple[Callable[..., Any], tuple] | None:
    """For the `cached_patcher_init` of a copy: what `patcher` holds is read again, and `copied` makes of it the
    patcher of a copy. Newer hosts do so for each further GPU. None where `patcher` itself cannot be read again.
    """
    init = getattr(patcher, "cached_patcher_init", None)
    if init is None:
        return None

    def make(**options: Any) -> Any:
        takes = inspect.signature(init[0]).parameters.values()
        if any(one.name == "disable_dynamic" or one.kind is one.VAR_KEYWORD for one in takes):
            options["disable_dynamic"] = True  # read as it was for the first copy
        made = init[0](*init[1], **options)
        return copied(made[init[2]] if len(init) > 2 else made)

    return make, ()


def patcher_of_copy(patcher: Any, private: torch.nn.Module, *, patched: bool = False) -> Any:
    """A plain patcher for `private`, a copy of the model of `patcher`: of nothing loaded yet, and without patches.

    `patched`: with the same patches of weights (LoRA).
    """
    new = comfy.model_patcher.ModelPatcher(
        private, load_device=patcher.load_device, offload_device=patcher.offload_device
    )
    if patched:
        new.patches = {key: list(patches) for key, patches in patcher.patches.items()}
    return new


def unload_model(patcher: Any) -> None:
    """Have the host unload the model of `patcher`, whichever clone of it is loaded: what that one has put on the model
    (weights, objects, hooks) is off it then. The next sampler loads it again.
    """
    management = comfy.model_management
    if hasattr(management, "unload_model_and_clones"):
        management.unload_model_and_clones(patcher)
        return
    for loaded in [*management.current_loaded_models]:
        if loaded.model is not None and loaded.model.is_clone(patcher):
            loaded.model_unload()
            management.current_loaded_models.remove(loaded)


def retarget(patcher: Any, target: Any) -> Any:
    """A patcher for the model of `target`, with the patches, hooks and options of `patcher`; neither is changed.

    The two models must have the same weights by name. Patches are kept as they were given, so they go onto the weights
    of the other model in the precision that these have. Copies for further GPUs stay with the model that they are of.
    """
    if patcher.model is target.model:
        return patcher.clone()
    if is_dynamic(target) and not is_dynamic(patcher):  # back to the source: `clone` gives the class of what it clones
        new, given = target.clone(), patcher.clone()
        for name in _OF_OTHER_NODES:
            if hasattr(given, name):
                setattr(new, name, getattr(given, name))
    elif _takes_another_model(patcher):
        new = patcher.clone(disable_dynamic=not is_dynamic(target), model_override=target.get_clone_model_override())
        new.hook_backup = target.hook_backup
    else:
        new = patcher.clone()
        new.model = target.model
        for name in _OF_THE_WEIGHTS:
            setattr(new, name, getattr(target, name))
    new.parent, new.size, new.is_injected = target, 0, False
    new.current_hooks, new.hook_patches_backup, new.cached_hook_patches = None, None, {}
    for name in _OF_THE_FILE:
        if hasattr(target, name):
            setattr(new, name, getattr(target, name))
    new.additional_models.pop(_FURTHER_GPUS, None)
    if further := target.additional_models.get(_FURTHER_GPUS):
        new.additional_models[_FURTHER_GPUS] = [clone.clone() for clone in further]
    return new


def _takes_another_model(patcher: Any) -> bool:
    """Does this host's `clone` take the model that the clone shall be of?"""
    parameters = inspect.signature(patcher.clone).parameters.values()
    return hasattr(patcher, "get_clone_model_override") and any(
        parameter.name == "model_override" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )
