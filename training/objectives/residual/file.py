"""refiner.safetensors: weights, the run's own empty conditioning, and in the metadata all that a sampler needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...config.network import UNetConfig
from ...data.index import check_latent
from ...errors import BadInput, first_error
from ...storage.files import whole_file
from .shapes import what_does_not_fit

if TYPE_CHECKING:
    from torch import Tensor

FORMAT: Final = "ref2v-refiner"
SDXL_FORMAT: Final = "ref2v-sdxl-refiner"  # training/objectives/sdxl_refiner/file.py
VERSION: Final = 1
WEIGHTS = "unet."
EMPTY = "empty."
LORA = "ref2v_lora"  # metadata of the other file, training/objectives/residual/lora.py


class RefinerMeta(BaseModel):
    """What travels in the file beside the weights. No clock, path or host name: the same run gives the same bytes."""

    model_config = ConfigDict(extra="forbid")

    format: Literal["ref2v-refiner"] = FORMAT
    version: Literal[1] = VERSION
    unet: UNetConfig
    latent: dict[str, Any]  # name, channels, scale, shift, downscale: model space = (raw - shift) * scale
    preview: dict[str, Any] | None = None  # latent -> RGB in [-1, 1]: weight [C][3], bias [3]
    noise_scale: float = Field(ge=0, allow_inf_nan=False)  # s
    residual_rms: float = Field(gt=0, allow_inf_nan=False)  # RMS(z - b) over the training pairs
    c_v: float = Field(gt=0, allow_inf_nan=False)
    sigmas: list[float]  # the run's own sampling times, the final 0 included
    context: dict[str, Any] | None = None  # tokens, dim, pooled of the text conditioning, None without text
    training: dict[str, Any]  # provenance: dataset hash, base, seed, epochs, steps, ...

    @model_validator(mode="after")
    def _fits_together(self) -> RefinerMeta:
        check_latent(self.latent)
        if self.latent["channels"] != self.unet.latent_channels:
            raise ValueError(f"latent has {self.latent['channels']} channels and unet {self.unet.latent_channels}")
        falls = all(now > then for now, then in zip(self.sigmas, self.sigmas[1:], strict=False))
        if len(self.sigmas) < 2 or self.sigmas[0] > 1 or self.sigmas[-1] != 0 or not falls:
            raise ValueError(f"sigmas must fall from 1 at most to 0, got {self.sigmas[:9]}")
        return self


def save_refiner(path: Path, weights: dict[str, Tensor], empty: dict[str, Tensor], meta: RefinerMeta) -> None:
    """weights: diffusers UNet2DConditionModel names; empty: "context" [T, D] and, with pooled_dim, "pooled" [P]."""
    tensors = {WEIGHTS + name: t for name, t in weights.items()} | {EMPTY + name: t for name, t in empty.items()}
    # exactly one metadata entry: safetensors writes several in an order that differs from process to process
    save_tensors(path, tensors, {"ref2v": json.dumps(meta.model_dump(mode="json"), sort_keys=True)})


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, written beside its final name and renamed; BadInput where that is not possible."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    try:
        with whole_file(path) as beside:
            beside.touch()
            mode = beside.stat().st_mode  # what the user's umask gives; safetensors' files only the owner can read
            save_file(tensors, beside, metadata)
            beside.chmod(mode)
    except (OSError, SafetensorError) as error:
        size = sum(t.nbytes for t in tensors.values())
        raise BadInput(f"{path}: expected room for {size:,} bytes, but writing failed: {error}.") from error


def load_meta(path: Path) -> RefinerMeta:
    """The metadata alone; BadInput where the file is missing, truncated, a pickle or another model."""
    return _open(path)[1]


def load_refiner(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], RefinerMeta]:
    """(weights under diffusers names, empty conditioning, metadata), on the CPU, in the file's float32."""
    file, meta = _open(path)
    weights, empty = {}, {}
    for key in file.keys():  # noqa: SIM118 safe_open is no mapping
        if key.startswith(WEIGHTS):
            weights[key.removeprefix(WEIGHTS)] = file.get_tensor(key)
        elif key.startswith(EMPTY):
            empty[key.removeprefix(EMPTY)] = file.get_tensor(key)
    if "context" not in empty:
        raise BadInput(f"{path.name}: expected the run's empty conditioning ('empty.context') in the file, found none.")
    shape, width = list(empty["context"].shape), meta.unet.context_dim
    if len(shape) != 2 or shape[1] != width:
        raise BadInput(f"{path.name}: expected 'empty.context' to be [tokens, {width}], got {shape}.")
    for kind, tensors in ((WEIGHTS, weights), (EMPTY, empty)):
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise BadInput(
                    f"{path.name}: its weight {kind}{name} holds NaN or infinity, so every picture would be black: the "
                    "file is damaged; train it again."
                )
    return weights, empty, meta


def open_safetensors(path: Path):
    """A handle on a safetensors file; BadInput where it is missing, truncated or a pickle."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise BadInput(f"Refiner file: expected a file at {path}, found none.")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        with open(path, "rb") as file:
            head = file.read(2)
        # looked at only now: a whole safetensors file can begin with these bytes too, its header's length then
        if head == b"PK" or (head[:1] == b"\x80" and head[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")):
            raise BadInput(f"{path.name}: expected a safetensors refiner, got a pickle, which can run code.") from error
        raise BadInput(f"{path.name}: expected a whole safetensors file, got a damaged one ({error}).") from error


def _open(path: Path) -> tuple[Any, RefinerMeta]:
    """The file and its metadata, whose network has the very weights that the file's header lists.

    Whoever builds that network then allocates no more than the file holds.
    """
    file = open_safetensors(path)
    meta = _parse_meta(path, file.metadata() or {})
    keys = [key for key in file.keys() if key.startswith(WEIGHTS)]  # noqa: SIM118 safe_open is no mapping
    shapes = {key.removeprefix(WEIGHTS): tuple(file.get_slice(key).get_shape()) for key in keys}
    complaint = what_does_not_fit(meta.unet, shapes)
    if complaint:
        raise BadInput(f"{path.name}: {complaint}.")
    return file, meta


def _parse_meta(path: Path, metadata: dict[str, str]) -> RefinerMeta:
    if f'"format": "{SDXL_FORMAT}"' in metadata.get("ref2v", ""):
        raise BadInput(
            f"{path.name}: expected a residual refiner, got SDXL's own refiner, fine-tuned: put it into "
            "models/diffusion_models and load it with the node Load Diffusion Model."
        )
    if LORA in metadata:
        raise BadInput(
            f"{path.name}: expected a refiner, got the adapters of one (LoRA); the refiner with them in it is the "
            "refiner.safetensors of the same run."
        )
    if "ref2v" not in metadata:
        raise BadInput(f"{path.name}: expected a refiner made by Train Refiner, got another model (no ref2v metadata).")
    try:
        return RefinerMeta.model_validate_json(metadata["ref2v"])
    except ValidationError as error:
        raise BadInput(f"{path.name}: its metadata does not fit this version: {first_error(error)}.") from error
