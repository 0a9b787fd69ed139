"""Is everything in the checkpoint that the host loaded from it?

The host only logs the weights that a checkpoint lacks and leaves the memory as it was: the model runs, and gives noise
or NaN. So before any work starts the names in the file are compared with the names in the module, after the host's
own renaming. Of a safetensors file only the header is read; of a .ckpt only the structure.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from typing import Any

import comfy.model_detection
import comfy.utils
import folder_paths
import torch

from ....training.errors import BadInput

__all__ = ["check_checkpoint", "loaded_from", "refuse_empty_link"]

_LOG = logging.getLogger("ref2v")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OPTIONAL = (".logit_scale", ".transformer.text_projection.weight")  # the host has defaults for these


def loaded_from(dynprompt: Any, node_id: str, path: Iterable[str]) -> str | None:
    """Name of the checkpoint that stands behind an input, or None where it is not a plain checkpoint.

    path: input names to follow from the node on, e.g. ["base", "model"]; the last one is followed further through
    nodes that pass the same thing on under the same name (LoRA loaders, model patches), up to a node with a
    `ckpt_name`.
    """
    if dynprompt is None:
        return None
    names = list(path)
    seen = set()
    while (node_id, len(names)) not in seen:
        seen.add((node_id, len(names)))
        if not dynprompt.has_node(node_id):
            return None
        link = dynprompt.get_node(node_id)["inputs"].get(names[0])
        if not _is_link(link):
            return None
        node_id = link[0]
        if len(names) > 1:
            names = names[1:]
            continue
        if not dynprompt.has_node(node_id):
            return None
        name = dynprompt.get_node(node_id)["inputs"].get("ckpt_name")
        if isinstance(name, str):
            return name
    return None


def refuse_empty_link(dynprompt: Any, node_id: str, input_name: str, value: Any) -> None:
    """BadInput when an input is wired but brings nothing, as a checkpoint without a text encoder does."""
    if value is not None or dynprompt is None or not dynprompt.has_node(node_id):
        return
    if _is_link(dynprompt.get_node(node_id)["inputs"].get(input_name)):
        name = loaded_from(dynprompt, node_id, [input_name])
        source = f"the checkpoint {name} holds none" if name else "the node before gives none"
        raise BadInput(f"The input {input_name!r} is wired but nothing comes in: {source}.")


def check_checkpoint(name: str, *, model: Any = None, clip: Any = None, text_encoder: bool = False) -> None:
    """Compare a checkpoint's keys with the UNet of `model` and the text encoder of `clip`, as far as given.

    `text_encoder`: check the text encoder even without a CLIP object at hand; the one that the host would build for
    this checkpoint is then built on the meta device (no memory).

    Raises BadInput that names the file, the module and up to three of its missing keys. A file that this function
    cannot read as the host would is passed over with a line in the log: it must never stop a sound one.
    """
    path = folder_paths.get_full_path("checkpoints", name)
    if path is None:
        return
    try:
        missing = _missing(path, model, clip, text_encoder)
    except Exception as error:  # host internals differ between versions; the finite checks still stand behind this one
        _LOG.warning("the keys of %s were not checked: %s", name, error)
        return
    for module, keys in missing.items():
        shown = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
        raise BadInput(
            f"The checkpoint {name} lacks {len(keys)} of the weights of its {module} ({shown}); the host would leave "
            f"them as random memory, so the results would be noise or NaN. Use a complete checkpoint, or load that "
            f"part from its own file."
        )


def _missing(path: str, model: Any, clip: Any, text_encoder: bool) -> dict[str, list[str]]:
    """Module name -> names of its weights that the file does not have."""
    state, metadata = _read_structure(path)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(state)
    config = _model_config(state, prefix, metadata)
    if config is None:
        return {}
    missing: dict[str, list[str]] = {}
    if model is not None:
        unet = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
        unet = config.process_unet_state_dict(unet)
        absent = _absent(model.model.diffusion_model, unet)
        if absent:
            missing["UNet"] = absent
    if clip is not None or text_encoder:
        target = config.clip_target(state_dict=state)
        if target is None:
            return missing
        module = clip.cond_stage_model if clip is not None else target.clip(device="meta", dtype=None, **target.params)
        for key in _absent(module, config.process_clip_state_dict(dict(state))):
            if not key.endswith(_OPTIONAL):
                missing.setdefault(f"text encoder {key.split('.')[0]}", []).append(key)
    return missing


def _absent(module: torch.nn.Module, state: dict[str, Any]) -> list[str]:
    """Weights and biases of `module` that `state` lacks. Buffers and scales have defaults, or are made by the host."""
    names = [name for name, _ in module.named_parameters() if name.endswith((".weight", ".bias"))]
    return [name for name in names if name not in state]


def _model_config(state: dict[str, Any], prefix: str, metadata: dict | None) -> Any:
    # A copy: the host takes keys out of the dictionary while it looks at it.
    return comfy.model_detection.model_config_from_unet(dict(state), prefix, metadata=metadata)


def _read_structure(path: str) -> tuple[dict[str, torch.Tensor], dict | None]:
    """Names, shapes and dtypes of a checkpoint as tensors on the meta device, and its safetensors metadata."""
    if path.lower().endswith((".safetensors", ".sft")):
        text = comfy.utils.safetensors_header(path, max_size=os.path.getsize(path))
        if text is None:
            raise ValueError("the header is longer than the file")
        header = json.loads(text)
        metadata = header.pop("__metadata__", None)
        state = {
            key: torch.empty(entry["shape"], dtype=_DTYPES.get(entry["dtype"], torch.uint8), device="meta")
            for key, entry in header.items()
        }
        return state, metadata
    try:
        state = torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # an old .ckpt that torch does not open so: read it as the host does
        return comfy.utils.load_torch_file(path, safe_load=True), None
    return state.get("state_dict", state), None


def _is_link(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str)
