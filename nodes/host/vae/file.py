"""Read a VAE from its file without the rounding that the host's loaders do on most GPUs."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name
from ..loaded_files import LoadedFiles, version_of
from ..patching.private_copy import has_quantized_weights, is_dynamic
from ..paths import model_file
from ..progress import NOT_A_FAILURE
from ..wording import first_line

if TYPE_CHECKING:
    from .select import SelectedVAE

__all__ = ["NO_FILES", "fingerprint_vae_file", "list_vae_files", "load_vae_precisely"]

NO_FILES = "(no files yet)"
_CHECKPOINTS = "checkpoints/"
_LOADED = LoadedFiles()  # the VAE of each file, and what was made of it, by the dtypes asked for
_PREFIXES = ("first_stage_model.", "vae.", "pretransform.model.")  # of the VAE inside a checkpoint


def list_vae_files() -> list[str]:
    """VAE files by name, then the checkpoints (which hold a VAE too) as "checkpoints/<name>"."""
    inside = [_CHECKPOINTS + name.replace("\\", "/") for name in folder_paths.get_filename_list("checkpoints")]
    return [*folder_paths.get_filename_list("vae"), *inside]


def load_vae_precisely(name: str, encoder: str, decoder: str) -> SelectedVAE:
    """The VAE of a file from `list_vae_files()`, its weights exactly those of the file before any cast.

    "default" is the dtype that the host's own loader would choose. A file is read once for all dtypes that are asked of
    it, as long as one of them is in use. Raises BadInput naming the file.
    """
    from .select import SelectedVAE, select_vae_precision  # not for the list of files alone

    path = _path(name)
    version = version_of(path)
    vae = _LOADED.find(version)
    if vae is None:
        vae = _read(path, name)
        _LOADED.add(version, vae)
    selected = select_vae_precision(vae, encoder, decoder)
    _LOADED.note_made(version, (encoder, decoder), selected.vae)
    return SelectedVAE(selected.vae, f"{selected.report}\nThe file holds {vae.ref2v_in_file} weights.")


def fingerprint_vae_file(name: str | None, encoder: str | None, decoder: str | None) -> str:
    """Changes with the inputs and with the file on disk. Linked inputs are None here."""
    try:
        version = version_of(_path(name or NO_FILES))
        _LOADED.hold_for(version, (encoder, decoder))
        state: Any = version[1:]
    except (BadInput, OSError) as problem:  # execute will say it
        state = str(problem)
    return repr((name, encoder, decoder, state))


def _read(path: str, name: str) -> Any:
    """The VAE in FP32, on a plain patcher, with a note of what the host's own loader would choose."""
    from .copies import copy_vae
    from .halves import lacking_in_file
    from .source import remember_loader

    try:
        state, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
        state = {key: value for key, value in state.items() if torch.is_tensor(value)}
    except NOT_A_FAILURE:
        raise
    except Exception as error:  # each format has errors of its own
        why = first_line(error, 2000).replace(path, name)[:200]
        if isinstance(error, pickle.UnpicklingError):  # torch advises to read it unsafely
            why = "it cannot be read as weights alone"
        raise BadInput(f"{name}: expected a whole file of weights, got a damaged one or none ({why}).") from error
    if name.startswith(_CHECKPOINTS):
        state = _vae_of(state, name)
    keys = list(state)
    in_file = sorted({dtype_name(value.dtype) for value in state.values() if value.is_floating_point()})
    vae = comfy.sd.VAE(sd=state, metadata=metadata, dtype=torch.float32)
    if vae.first_stage_model is None:
        raise BadInput(f"{name} holds no VAE that ComfyUI knows.")
    if is_dynamic(vae.patcher) and not has_quantized_weights(vae.first_stage_model):
        vae = copy_vae(vae, torch.float32)  # ours alone, so the host has no need to cast it in passing
    vae.ref2v_in_file = " and ".join(in_file)
    chosen = comfy.model_management.vae_dtype(vae.device, vae.working_dtypes)
    remember_loader(vae, chosen, chosen, lacking_in_file(keys, vae.first_stage_model))
    return vae


def _path(name: str) -> str:
    if name == NO_FILES:
        raise BadInput("No VAE is chosen: put a file into models/vae and press R to see it in the list.")
    folder = "checkpoints" if name.startswith(_CHECKPOINTS) else "vae"
    path = model_file(folder, name.removeprefix(_CHECKPOINTS))
    if path is None:
        raise BadInput(f"The file {name!r} does not exist in models/{folder}.")
    return path


def _vae_of(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    for prefix in _PREFIXES:
        vae_keys = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if vae_keys:
            return vae_keys
    raise BadInput(f"{name} holds no VAE: none of its keys starts with {' or '.join(_PREFIXES)}.")
