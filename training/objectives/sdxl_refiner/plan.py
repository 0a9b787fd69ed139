"""The numbers of a run that fine-tunes SDXL's refiner, each choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from ...config.network import UNetConfig
from ...errors import BadInput, first_error
from ..base import ObjectivePlan
from ..size import BASE_PARAMETERS, Size
from . import diffusion
from .unet import BOTH_ENCODERS, CONTEXT, POOLED, SHAPE, build

if TYPE_CHECKING:
    from ...config.train_config import TrainConfig
    from ...data.shards import RefinerDataset

SHOWN_STEPS = 8
_FIXED = ("latent_channels", "context_dim", "pooled_dim")  # of SDXL's latent space and of CLIP-G
_SCALE = 0.13025  # of SDXL's latents; their shift is 0


@dataclass(frozen=True, kw_only=True)
class SDXLRefinerPlan(ObjectivePlan):
    """It predicts unit noise, at all of its timesteps alike."""

    @property
    def handover(self) -> float:
        """The sigma at which the refiner takes over from the base."""
        return self.sigmas[0]

    def report(self) -> dict[str, Any]:
        return {"noise_scale": self.handover, "c_v": 1.0, "sigmas": self.sigmas}


def plan_sdxl_refiner(config: TrainConfig, data: RefinerDataset, choices: list[str]) -> SDXLRefinerPlan:
    """Each choice with its reason goes to the end of `choices`; BadInput where the dataset does not fit."""
    unet, size = choose_network(config, data, choices)
    return SDXLRefinerPlan(unet=unet, size=size, sigmas=choose_sigmas(config, choices))


def choose_network(config: TrainConfig, data: RefinerDataset, choices: list[str]) -> tuple[UNetConfig, Size]:
    """(shape, size); BadInput where dataset or settings are not SDXL's refiner's."""
    _check_data(data)
    try:
        shape = UNetConfig(**{**SHAPE, **(config.refiner.shape or {})})
    except ValidationError as error:
        raise BadInput(f"refiner.shape: {first_error(error)}.") from error
    for name in _FIXED:
        if getattr(shape, name) != SHAPE[name]:
            raise BadInput(f"refiner.shape.{name}: expected SDXL's {SHAPE[name]}, got {getattr(shape, name)}.")
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(shape).parameters())
    size = Size(parameters, "SDXL", BASE_PARAMETERS["SDXL"])
    whose = "SDXL's own refiner" if config.refiner.shape is None else "a UNet of your shape in the place of SDXL's own"
    choices.append(
        f"{size.sentence()}: {whose}, trained as it is; the limit of 30 % is for residual refiners and plays no part"
    )
    start = config.refiner.start_from
    if start is None and config.refiner.shape is None:
        raise BadInput(
            "refiner.start_from: objective sdxl_refiner fine-tunes SDXL's refiner: expected its file, such as "
            "sd_xl_refiner_1.0.safetensors, got none."
        )
    choices.append(f"starts from {start.name}" if start else "starts from random weights: refiner.start_from is none")
    context: dict[str, Any] = data.context or {}  # check_data has refused what has no text
    dim = context["dim"]
    taken = f"the last {CONTEXT} of {dim} columns, which are CLIP-G's" if dim > CONTEXT else f"CLIP-G, {dim} wide"
    choices.append(f"text: {taken}; every picture is told aesthetic score {config.sdxl_refiner.aesthetic_score:g}")
    return shape, size


def choose_sigmas(config: TrainConfig, choices: list[str]) -> list[float]:
    """Those of the validation, from the hand-over's down to the final 0."""
    last = config.sdxl_refiner.last_timestep
    sigmas = diffusion.sigmas(SHOWN_STEPS, last).tolist()
    choices.append(
        f"predicts the noise at timesteps 0 to {last} of {diffusion.TIMESTEPS}; takes over from the base at sigma "
        f"{sigmas[0]:.4g}"
    )
    return sigmas


def _check_data(data: RefinerDataset) -> None:
    latent, text = data.latent, data.context
    if latent["channels"] != SHAPE["latent_channels"] or latent["scale"] != _SCALE or latent["shift"] != 0:
        raise BadInput(
            f"Dataset: objective sdxl_refiner expects SDXL's latents (4 channels, scale {_SCALE}, shift 0), got "
            f"{latent['name']} ({latent['channels']} channels, scale {latent['scale']}, shift {latent['shift']}); "
            "Base from Model with SDXL or its refiner builds them."
        )
    if text is None or text["dim"] not in (CONTEXT, BOTH_ENCODERS) or text.get("pooled") != POOLED:
        got = f"{text['dim']} and {text.get('pooled')}" if text else "no text"
        raise BadInput(
            f"Dataset: objective sdxl_refiner expects captions of CLIP-G ({CONTEXT} wide, pooled {POOLED}) or of "
            f"SDXL's two encoders ({BOTH_ENCODERS} wide), got {got}; build it with the CLIP of SDXL or its refiner."
        )
