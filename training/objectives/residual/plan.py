"""The numbers of a run of residual flow, each choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from ...config.network import UNetConfig, preset
from ...errors import BadInput, first_error
from ..base import ObjectivePlan
from . import flow
from .lora import choose_adapters
from .size import check_size
from .start import Start, open_start

if TYPE_CHECKING:
    from ...config.train_config import TrainConfig
    from ...data.shards import RefinerDataset

__all__ = ["ResidualPlan", "plan_residual"]


@dataclass(frozen=True, kw_only=True)
class ResidualPlan(ObjectivePlan):
    s: float  # the noise that is put on the base: sampling starts at b + s e
    c_v: float  # RMS of what the network predicts
    residual_rms: float  # RMS(z - b) over the training pairs
    min_snr_gamma: float | None
    huber_delta: float | None  # none: the loss is the square
    on_grid: float  # share of the training times that lie on `grid`
    start: Start | None = None  # the trained refiner that the run goes on from

    @property
    def loss_of_nothing(self) -> float:
        """1, but on another residual than its start was trained on."""
        return self.start.velocity_loss(self.residual_rms) if self.start else 1.0

    @property
    def grid(self) -> torch.Tensor:
        """The sigmas at which the network is asked: all but the final 0."""
        return torch.tensor(self.sigmas[:-1])

    def report(self) -> dict[str, Any]:
        return {"noise_scale": self.s, "c_v": self.c_v, "sigmas": self.sigmas}


def plan_residual(config: TrainConfig, data: RefinerDataset, choices: list[str]) -> ResidualPlan:
    """Each choice with its reason goes to the end of `choices`; BadInput where the dataset does not fit."""
    start = open_start(config.refiner.start_from, data) if config.refiner.start_from else None
    unet = start.meta.unet if start else choose_unet(config, data, choices)
    base = data.info["base"]
    size = check_size(
        unet,
        config.refiner.base or base.get("name"),
        None if config.refiner.base else base.get("parameters"),
        allow_larger=config.refiner.allow_larger,
    )
    choices.append(size.sentence())
    adapters = choose_adapters(config.lora, unet) if config.lora else None
    if adapters:
        choices.append(adapters.sentence(size.parameters))
    s, sigmas, on_grid = choose_flow(config, data, choices, start)
    return ResidualPlan(
        unet=unet,
        size=size,
        sigmas=sigmas,
        adapters=adapters,
        s=s,
        c_v=start.meta.c_v if start else flow.velocity_scale(data.residual_rms, s),
        residual_rms=data.residual_rms,
        min_snr_gamma=config.flow.min_snr_gamma,
        huber_delta=config.flow.huber_delta if config.flow.loss == "huber" else None,
        on_grid=on_grid,
        start=start,
    )


def choose_unet(config: TrainConfig, data: RefinerDataset, choices: list[str]) -> UNetConfig:
    """The network's shape from the explicit shape, the named preset, or the dataset."""
    channels, text = data.latent["channels"], data.context
    dim = text["dim"] if text else None
    pooled = text["pooled"] if text else None
    if config.refiner.shape is not None:
        fields = {"latent_channels": channels, **config.refiner.shape}
        if dim is not None:
            fields = {"context_dim": dim, "pooled_dim": pooled, **fields}
        try:
            unet = UNetConfig(**fields)
        except ValidationError as error:
            raise BadInput(f"refiner.shape: {first_error(error)}.") from error
        choices.append("explicit network shape from the configuration")
    else:
        name = config.refiner.preset
        if name == "auto":
            if data.latent["downscale"] == 1:
                name, why = "pixel-small", "the data are pixels"
            elif dim == 2048:
                name, why = "sdxl-half", "the text is 2048 wide, as SDXL's"
            else:
                name, why = "sd15-half", "a latent space"
            choices.append(f"preset {name}: {why}")
        unet = preset(name, channels, dim, pooled)
    if text and not any(unet.depths()):
        choices.append("this network has no attention: the captions are not used")
    if unet.latent_channels != channels:
        raise BadInput(f"refiner.shape.latent_channels: expected the dataset's {channels}, got {unet.latent_channels}.")
    if text and unet.context_dim != dim:
        raise BadInput(f"refiner.shape.context_dim: expected the dataset's {dim}, got {unet.context_dim}.")
    if unet.pooled_dim and text and unet.pooled_dim != pooled:
        raise BadInput(f"refiner.shape.pooled_dim: expected the dataset's {pooled}, got {unet.pooled_dim}.")
    return unet


def choose_flow(
    config: TrainConfig, data: RefinerDataset, choices: list[str], start: Start | None = None
) -> tuple[float, list[float], float]:
    """(s, sigmas with the final 0, share of training times on them)."""
    rms = data.residual_rms
    if rms == 0:
        raise BadInput("Dataset: expected base latents that differ from their targets, but every pair is identical.")
    asked = config.flow.noise_scale
    if start and asked not in ("auto", start.meta.noise_scale):
        raise BadInput(
            f"flow.noise_scale: expected auto, or the {start.meta.noise_scale:g} that {start.path.name} was trained "
            f"with, got {asked:g}: its network knows no other states."
        )
    s = float(asked) if asked != "auto" else start.meta.noise_scale if start else rms
    gamma = config.flow.min_snr_gamma
    if gamma is not None and s == 0:
        raise BadInput("flow.min_snr_gamma: expected a noise scale above 0, got 0: without noise the SNR is infinite.")
    if gamma is not None:
        choices.append(f"Min-SNR weighting t^2 min(SNR(t), {gamma:g}); it gives t = 1 the weight 0")
    if config.flow.loss == "huber":
        choices.append(
            f"Huber's loss: errors beyond {config.flow.huber_delta:g} of the target's RMS count in a line; the journal "
            "and the reports go on giving the square"
        )
    if s == 0:
        choices += start.sentences(rms, 1) if start else []
        choices.append("noise scale 0: one-shot mode, trained at t = 1 only and sampled in one step")
        return 0.0, [1.0, 0.0], 1.0
    if start:
        choices += start.sentences(rms, config.flow.steps)
        return s, flow.sigmas(config.flow.steps).tolist(), config.flow.on_grid
    why = "= RMS(z - b) of the training pairs" if config.flow.noise_scale == "auto" else "from the configuration"
    choices.append(f"noise scale s = {s:.5g} {why}")
    return s, flow.sigmas(config.flow.steps).tolist(), config.flow.on_grid
