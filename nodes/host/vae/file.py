"""Read a VAE from its file without the rounding that the host's loaders do on most GPUs."""

from __future__ import annotations

import os
import pickle
import weakref
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch

from ....training.errors import BadInput
from ....training.precision.dtypes import dtype_name
from ..patching.patcher import NOT_A_FAILURE
from ..patching.private_copy import has_quantized_weights, is_dynamic
from ..paths import model_file

if TYPE_CHECKING:
    from .select import SelectedVAE

__all__ = ["NO_FILES", "fingerprint_vae_file", "list_vae_files", "load_vae_precisely"]

NO_FILES = "(no files yet)"
_CHECKPOINTS = "checkpoints/"
# The VAE of each file that somebody uses, by path, size and time; the dtypes with which it was last loaded; and the one
# that the prompt about to run will ask for in others.
_READ: weakref.WeakValueDictionary[tuple[str, int, int], Any] = weakref.WeakValueDictionary()
_dtypes: dict[tuple[str, int, int], tuple] = {}
_held: list[Any] = []
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
    file = _version(path)
    vae = _READ.get(file)
    if vae is None:
        vae = _READ[file] = _read(path, name)
    _held.clear()
    _dtypes[file] = (encoder, decoder)
    selected = select_vae_precision(vae, encoder, decoder)
    return SelectedVAE(selected.vae, f"{selected.report}\nThe file holds {vae.ref2v_in_file} weights.")


def fingerprint_vae_file(name: str | None, encoder: str | None, decoder: str | None) -> str:
    """Changes with the inputs and with the file on disk. Linked inputs are None here.

    The host asks for this before it lets go of what the last prompt made; so here is the moment to hold the VAE of a
    file that is about to be asked for in other dtypes, until it is.
    """
    try:
        path = _path(name or NO_FILES)
        state: Any = _version(path)
        if (vae := _READ.get(state)) is not None and _dtypes.get(state) != (encoder, decoder):
            _held[:] = [vae]
    except (BadInput, OSError) as problem:  # execute will say it
        state = str(problem)
    return repr((name, encoder, decoder, state[1:] if isinstance(state, tuple) else state))


def _version(path: str) -> tuple[str, int, int]:
    file = os.stat(path)
    return path, file.st_size, file.st_mtime_ns


def _read(path: str, name: str) -> Any:
    """The VAE in FP32, on a plain patcher, with a note of what the host's own loader would choose."""
    from .halves import lacking_in_file
    from .host_vae import copy_vae
    from .select import remember_loader

    try:
        state, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
        state = {key: value for key, value in state.items() if torch.is_tensor(value)}
    except NOT_A_FAILURE:
        raise
    except Exception as error:  # each format has errors of its own
        why = (str(error).splitlines() or [type(error).__name__])[0].replace(path, name)[:200]
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
        found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if found:
            return found
    raise BadInput(f"{name} holds no VAE: none of its keys starts with {' or '.join(_PREFIXES)}.")
