"""A patcher of the host for a copy of a model, with everything that other nodes have put on the model's own patcher."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch

from ....training.errors import BadInput

__all__ = ["carry", "patcher_of_copy", "refuse_dynamic", "take_off"]

# What a patcher knows of the weights in memory. All patchers of one model share these very objects: the host takes one
# off the model and puts the next one on, and what the first has put aside the second must find.
_OF_THE_WEIGHTS = ("backup", "object_patches_backup", "pinned", "hook_backup")


def refuse_dynamic(patcher: Any, what: str) -> None:
    """BadInput for a model under newer hosts' dynamic VRAM; `what` names it, such as "The CLIP (SDXLClipModel)"."""
    if getattr(patcher, "is_dynamic", lambda: False)():
        raise BadInput(
            f"{what} is under this host's dynamic VRAM, where weights are in the file's precision and cast as they are "
            f"used, so a dtype of our own would be ignored; start ComfyUI with --disable-dynamic-vram."
        )


def patcher_of_copy(patcher: Any, private: torch.nn.Module) -> Any:
    """A plain patcher for `private`, a copy of the model of `patcher`: of nothing loaded yet, and without patches."""
    return comfy.model_patcher.ModelPatcher(
        private, load_device=patcher.load_device, offload_device=patcher.offload_device
    )


def take_off(patcher: Any) -> None:
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


def carry(patcher: Any, home: Any) -> Any:
    """A patcher for the model of `home`, with the patches, hooks and options of `patcher`; neither is changed.

    The two models must have the same weights by name. Patches are kept as they were given, so they go onto the weights
    of the other model in the precision that these have.
    """
    new = patcher.clone()
    if new.model is home.model:
        return new
    new.model, new.parent, new.size = home.model, home, 0
    for name in _OF_THE_WEIGHTS:
        setattr(new, name, getattr(home, name))
    new.is_injected = False
    new.current_hooks, new.hook_patches_backup, new.cached_hook_patches = None, None, {}
    return new
