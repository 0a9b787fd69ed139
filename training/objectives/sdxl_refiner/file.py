"""The fine-tuned UNet as a file for models/diffusion_models or models/checkpoints, and the file that it starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ...config.network import UNetConfig
from ...errors import BadInput, first_error
from ..residual.file import SDXL_FORMAT, open_safetensors, save_tensors
from .keys import PREFIX, original_names

if TYPE_CHECKING:
    from torch import Tensor


class SDXLRefinerMeta(BaseModel):
    """What travels in the file beside the weights; for people and for `is it whole`: a loader needs none of it."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["ref2v-sdxl-refiner"] = SDXL_FORMAT
    version: Literal[1] = 1
    unet: UNetConfig
    aesthetic_score: float
    last_timestep: int
    training: dict[str, Any]  # provenance: dataset hash, start file's hash, steps, settings, ...


def save(path: Path, weights: dict[str, Tensor], meta: SDXLRefinerMeta) -> None:
    """Write the weights (diffusers' names) under the original checkpoint's names; whole or not there."""
    names = original_names(weights, meta.unet.layers_per_block)
    tensors = {PREFIX + names[name]: tensor for name, tensor in weights.items()}
    save_tensors(path, tensors, {"ref2v": json.dumps(meta.model_dump(mode="json"), sort_keys=True)})


def load_meta(path: Path) -> SDXLRefinerMeta:
    """The metadata alone; BadInput where the file is missing, damaged or something else."""
    text = (open_safetensors(path).metadata() or {}).get("ref2v")
    if text is None:
        raise BadInput(f"{path.name}: expected an SDXL refiner made by Train Refiner, got a file without its metadata.")
    try:
        return SDXLRefinerMeta.model_validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        reason = first_error(error) if isinstance(error, ValidationError) else str(error)
        raise BadInput(f"{path.name}: expected an SDXL refiner made by Train Refiner: {reason}.") from error


def read_weights(path: Path, shapes: dict[str, Any], layers: int) -> dict[str, Tensor]:
    """The weights of a UNet under diffusers' names, in float32, from a file under whichever names.

    Diffusers' names, or the original's alone or in a checkpoint with VAE and text encoder. shapes: {diffusers' name:
    shape} of the network that takes them. BadInput where the file is no such UNet.
    """
    file = open_safetensors(path)
    there = set(file.keys())
    names = _names_in(there, original_names(shapes, layers))
    if names is None:
        raise BadInput(f"refiner.start_from: expected the UNet of SDXL's refiner in {path.name}, found no UNet.")
    weights = {}
    for name, shape in shapes.items():
        key = names[name]
        if key not in there:
            raise BadInput(f"refiner.start_from: {path.name} lacks {key}: it is no UNet of this refiner's shape.")
        tensor = file.get_tensor(key)
        if tensor.shape != shape:
            raise BadInput(
                f"refiner.start_from: expected SDXL's refiner, but in {path.name} {key} is {list(tensor.shape)} "
                f"instead of {list(shape)}."
            )
        weights[name] = tensor.float()
        if not weights[name].isfinite().all():
            raise BadInput(f"refiner.start_from: {key} of {path.name} holds NaN or infinity: the file is damaged.")
    inside = {key for key in there if any(key.startswith(f"{first}.") for first in _firsts(names))}
    more = sorted(inside - set(names.values()))
    if more:
        raise BadInput(f"refiner.start_from: {path.name} has {more[0]} besides: it is no UNet of this refiner's shape.")
    return weights


def _names_in(there: set[str], original: dict[str, str]) -> dict[str, str] | None:
    """{diffusers' name: the file's} for the names that this file has."""
    for names in (
        {name: name for name in original},
        original,
        {name: PREFIX + other for name, other in original.items()},
    ):
        if names["conv_in.weight"] in there:
            return names
    return None


def _firsts(names: dict[str, str]) -> set[str]:
    """What the UNet's names begin with: its blocks, each once."""
    prefix = PREFIX if names["conv_in.weight"].startswith(PREFIX) else ""
    return {prefix + key.removeprefix(prefix).split(".")[0] for key in names.values()}
