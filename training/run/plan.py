"""From a configuration and a dataset to every number of the run, each choice with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from pydantic import ValidationError

from ..config.network import UNetConfig, preset
from ..config.train_config import TrainConfig
from ..data.shards import RefinerDataset
from ..errors import BadInput, first_error
from ..objectives.residual import flow
from ..objectives.residual.lora import Adapters, choose_adapters
from ..objectives.residual.size import Size, check_size
from ..objectives.residual.start import Start, open_start
from ..objectives.sdxl_refiner import plan as sdxl_refiner
from ..precision.advice import training_advice
from .optim.schedule import warmup_cosine

LARGE_FOR_A_CPU = 20_000_000  # parameters; pixel-small, which is meant for CPUs too, has one million
LONG = 3600  # seconds of a run from which on a CPU's pace is remarked on

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "pure_bf16": None}


@dataclass(frozen=True)
class Plan:
    unet: UNetConfig
    size: Size
    device: torch.device
    autocast: torch.dtype | None
    weights: torch.dtype  # of the network in training; the averaged one is float32
    s: float  # the noise that is put on the base: sampling starts at b + s e
    c_v: float  # RMS of what the network predicts
    residual_rms: float
    min_snr_gamma: float | None
    sigmas: list[float]  # the run's own sampling times, the final 0 included
    on_grid: float
    micro_per_epoch: int
    total_steps: int
    horizon: int
    start: Start | None = None  # the trained refiner that the run goes on from
    adapters: Adapters | None = None  # what of it is trained, where not all is
    choices: list[str] = field(default_factory=list)  # what was chosen and why, for people

    def epoch_of(self, step: int, accumulation: int) -> int:
        """How many epochs are complete after `step` optimizer steps."""
        return step * accumulation // self.micro_per_epoch

    @property
    def loss_of_nothing(self) -> float:
        """The loss of a network that predicts nothing: 1, but on another residual than its start was trained on."""
        return self.start.velocity_loss(self.residual_rms) if self.start else 1.0

    @property
    def grid(self) -> torch.Tensor:
        """The sigmas at which the network is asked: all but the final 0."""
        return torch.tensor(self.sigmas[:-1])


def make_plan(config: TrainConfig, data: RefinerDataset, micro_per_epoch: int) -> Plan:
    """Every number of the run; BadInput where configuration and dataset do not fit together."""
    choices: list[str] = []
    start = adapters = None
    if config.objective == "sdxl_refiner":
        unet, size = sdxl_refiner.choose_network(config, data, choices)
        s, sigmas = sdxl_refiner.choose_noise(config, choices)
        c_v, on_grid = 1.0, 0.0  # it predicts unit noise, at all of its timesteps alike
    else:
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
        c_v = start.meta.c_v if start else flow.velocity_scale(data.residual_rms, s)
    device = choose_device(config, choices)
    choices.append(_precision_sentence(config))
    choices.append(training_advice(device, size.parameters, adapters.parameters if adapters else 0))
    if config.gradient_checkpointing:
        choices.append("gradient checkpointing, non-reentrant: less memory, each forward pass computed twice")
    choices += _crop_remark(config.data.crop, data)
    if device.type == "cpu" and size.parameters > LARGE_FOR_A_CPU:
        choices.append(
            f"a network of {size.parameters / 1e6:,.0f} million parameters is made for a GPU; on a CPU every step "
            "takes long, and how long is said after the first one"
        )
    drawn, there = micro_per_epoch * config.data.batch_size, len(data.train) * config.data.repeats
    if drawn >= 2 * there:
        choices.append(
            f"batch_size {config.data.batch_size} is large for this dataset: its batches are filled up with repeats, "
            f"so an epoch draws {drawn} samples where {there} would do; a smaller batch makes more steps of the same "
            "work"
        )
    total_steps = math.ceil(config.epochs * micro_per_epoch / config.data.accumulation)
    horizon = config.optimizer.horizon_steps or total_steps
    choices += _warmup_remark(config, total_steps, horizon)
    return Plan(
        unet=unet,
        size=size,
        device=device,
        autocast=AUTOCAST[config.precision],
        weights=torch.bfloat16 if config.precision == "pure_bf16" else torch.float32,
        s=s,
        c_v=c_v,
        residual_rms=data.residual_rms,
        min_snr_gamma=config.flow.min_snr_gamma,
        sigmas=sigmas,
        on_grid=on_grid,
        micro_per_epoch=micro_per_epoch,
        total_steps=total_steps,
        horizon=horizon,
        start=start,
        adapters=adapters,
        choices=choices,
    )


def _crop_remark(crop: int | None, data: RefinerDataset) -> list[str]:
    """What becomes of pairs that are smaller than the crop."""
    sizes = [(data.pairs[index].height, data.pairs[index].width) for index in data.train]
    if crop is None or not any(min(size) < crop for size in sizes):
        return []
    whole = sum(max(size) <= crop for size in sizes)
    if whole == len(sizes):
        height, width = max(sizes, key=lambda size: size[0] * size[1])
        return [f"crop {crop} is larger than every picture (the largest has {height} x {width} cells): they are whole"]
    short = sum(min(size) < crop for size in sizes)
    return [f"crop {crop}: {short} of {len(sizes)} pairs are shorter on a side, and whole there"]


def _warmup_remark(config: TrainConfig, total: int, horizon: int) -> list[str]:
    """What becomes of the learning rate where the run ends before its warm-up does."""
    warmup, last = config.optimizer.warmup_steps, min(total, horizon)
    if warmup < last:
        return []
    share = warmup_cosine(last - 1, warmup, horizon)
    return [
        f"optimizer.warmup_steps {warmup} is not over when the rate is to fall, after {last} steps: the learning rate "
        f"comes to {share:.1%} of {config.optimizer.learning_rate:g} at most; take a shorter warm-up or more steps"
    ]


def pace_remark(plan: Plan, first: float, step: int) -> str:
    """What the first step of this session, `first` seconds long, lets one expect on a CPU; "" for a short run."""
    left = first * (plan.total_steps - step)
    if plan.device.type != "cpu" or left < LONG:
        return ""
    took = f"{first:.0f} s" if first < 120 else f"{first / 60:.0f} min"
    steps = f"the other {plan.total_steps - step:,} take {left / 3600:,.1f} hours"
    return f"The first step took {took}: at this pace {steps}."


def _precision_sentence(config: TrainConfig) -> str:
    if config.precision == "pure_bf16":
        optimizer = config.optimizer
        return (
            "pure_bf16: weights, gradients and activations in bfloat16; AdamW computes in float32 and rounds once "
            f"({optimizer.chosen_rounding}, moments {optimizer.moments}: {_WHY_ROUNDING[optimizer.chosen_rounding]}); "
            "the averaged weights are float32"
        )
    return {
        "fp32": "fp32: every operation in float32 (on an NVIDIA GPU torch lets convolutions use TF32)",
        "bf16": "bf16 autocast: convolutions and matrices in bfloat16, weights, norms and loss in float32; "
        "its range is float32's, so no loss scaling",
        "fp16": "fp16 autocast with loss scaling: float16 gradients below 6e-8 would vanish without it",
    }[config.precision]


_WHY_ROUNDING = {
    "kahan": "what rounding drops is kept, so the weights are those of float32 AdamW, for 2 bytes a parameter",
    "master": "the weights are kept in float32 as well, for 4 bytes a parameter",
    "stochastic": "the least memory, for a fit up to 3 % above that of float32 AdamW",
}


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


def find_device(name: str) -> torch.device | None:
    """The device of that name, None where this machine has none."""
    try:
        probe = torch.zeros(1, device=name)
        probe.item()  # the device "meta" holds no numbers
    except (RuntimeError, AssertionError, ImportError, AttributeError, TypeError, ValueError):
        return None  # each backend that is not there says so in its own way; "hpu" by an ImportError
    return probe.device


def choose_device(config: TrainConfig, choices: list[str]) -> torch.device:
    if config.device != "auto":
        device = find_device(config.device)
        if device is None:
            raise BadInput(f"device: expected a device of this machine or auto, got {config.device!r}.")
        return device
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choices.append(f"device {device}: {'the first GPU' if device.type == 'cuda' else 'no GPU found'}")
    return device
