"""Files of weights, and models of the host whose weights are the memory of such a file, in the dtype of the file."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import safetensors.torch
import torch

__all__ = ["as_dynamic", "load_clip", "load_model", "load_vae", "map_file", "mapped_digest", "write_file"]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def write_file(path: Path, state: dict[str, torch.Tensor], dtype: torch.dtype) -> Path:
    """A safetensors file with these weights in `dtype`, floating-point ones that is."""
    cast = {k: (v.to(dtype) if v.is_floating_point() else v).clone().contiguous() for k, v in state.items()}
    safetensors.torch.save_file(cast, path)
    return path


def map_file(path: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file as windows into its mmapped memory: nothing is read before it is needed.

    The mapping is private (copy on write), so a write to it shows in `mapped_digest` and not in the file.
    """
    size = Path(path).stat().st_size
    memory = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    (length,) = struct.unpack("<Q", bytes(memory[:8].tolist()))
    header = json.loads(bytes(memory[8 : 8 + length].tolist()))
    header.pop("__metadata__", None)
    found = {}
    for key, about in header.items():
        start, end = (8 + length + offset for offset in about["data_offsets"])
        found[key] = memory[start:end].view(_DTYPES[about["dtype"]]).reshape(about["shape"])
    return found


def mapped_digest(root: torch.nn.Module) -> str:
    """Of every weight of a model that is not loaded, with its dtype and where in memory it lies."""
    digest = hashlib.sha256()
    for key, weight in sorted([*root.named_parameters(), *root.named_buffers()], key=lambda each: each[0]):
        flat = weight.detach().contiguous().reshape(-1)
        digest.update(f"{key} {weight.dtype} {weight.data_ptr()}".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def as_dynamic(root: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Note on each layer the dtype that the host has chosen for it, then give it the file's own memory."""
    comfy.model_management.archive_model_dtypes(root)
    missing, unexpected = root.load_state_dict(state, strict=False, assign=True)
    assert not missing and not unexpected, (missing[:3], unexpected[:3])
    for parameter in root.parameters():
        parameter.requires_grad_(False)


def load_model(path: str, model_options: dict | None = None, disable_dynamic: bool = False) -> Any:
    """The patcher of a diffusion model's file, as the host's loader nodes give it."""
    model = comfy.sd.load_diffusion_model_state_dict(
        map_file(path), model_options=dict(model_options or {}), disable_dynamic=disable_dynamic
    )
    model.cached_patcher_init = (load_model, (path, model_options))
    return model


def load_clip(path: str, family: str, disable_dynamic: bool = False) -> Any:
    """The CLIP of a file of one of the small families of clip_families.py."""
    from clip_families import clip_target

    target, options = clip_target(family)
    state = map_file(path)
    clip = comfy.sd.CLIP(target, model_options=options, disable_dynamic=disable_dynamic)
    clip.load_sd(state, full_model=True)
    clip.patcher.cached_patcher_init = (_clip_patcher, (path, family))
    return clip


def _clip_patcher(path: str, family: str, disable_dynamic: bool = False) -> Any:
    return load_clip(path, family, disable_dynamic).patcher


def load_vae(path: str) -> Any:
    vae = comfy.sd.VAE(sd=map_file(path))
    vae.patcher.cached_patcher_init = (_vae_patcher, (path,))
    return vae


def _vae_patcher(path: str, disable_dynamic: bool = False) -> Any:
    """The host's own reloads of a VAE do not heed `disable_dynamic` either."""
    return load_vae(path).patcher
