"""The sections of a run's configuration, each with what it refuses by itself; TrainConfig puts them together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from .choices import Extension, Loss, Moments, Rounding, RoundingChoice, Schedule
from .network import PRESETS
from .section import PlainPath, Section

__all__ = [
    "LAST_TIMESTEP", "MOST_RANK", "CheckpointConfig", "DataConfig", "FlowConfig", "HealthConfig", "LoRAConfig",
    "OptimizerConfig", "RefinerConfig", "SDXLRefinerConfig", "ValidationConfig",
]

MOST_RANK = 1024  # of LoRA
LAST_TIMESTEP = 199  # of SDXL's refiner: sigma 0.569, where the base hands over


class RefinerConfig(Section):
    """Which network. `preset` "auto" looks at the dataset (training/objectives/residual/plan.py)."""

    preset: str = "auto"
    shape: dict[str, Any] | None = Field(None, description="explicit UNetConfig fields instead of a preset")
    base: Literal["SD1.5", "SDXL"] | None = Field(None, description="the base model's name, for the size ratio")
    allow_larger: bool = Field(False, description="train a refiner above 30 % of its base all the same")
    start_from: PlainPath | None = Field(None, description="the file to start from; none = random weights")

    @model_validator(mode="after")
    def _known(self) -> RefinerConfig:
        if self.preset not in ("auto", *PRESETS):
            raise ValueError(f"preset must be one of auto, {', '.join(PRESETS)}; got {self.preset!r}")
        return self


class LoRAConfig(Section):
    """Adapters on a network that stays as it is (Hu et al. 2021); training/objectives/residual/lora.py."""

    rank: int = Field(16, ge=1, le=MOST_RANK)
    alpha: float | None = Field(
        None, gt=0, le=65536, allow_inf_nan=False, description="adapters count alpha / rank; none = the rank, so once"
    )
    targets: Literal["all", "attention"] | tuple[str, ...] = Field(
        "all", description="all convolutions and linear layers, attention's projections, or endings of layers' names"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _word_or_endings(cls, value: Any) -> Any:
        if value in ("all", "attention"):
            return value
        if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) and name for name in value):
            return tuple(value)
        raise ValueError("must be 'all', 'attention' or a list of endings of layers' names such as ['to_q', 'conv1']")


class FlowConfig(Section):
    """The residual flow (training/objectives/residual/flow.py)."""

    noise_scale: Literal["auto"] | float = Field(
        "auto", description="s; auto = RMS(z - b) of the training pairs; 0 = one-shot mode, one step at t = 1"
    )
    steps: int = Field(8, ge=1, le=1000, description="sampling steps that the refiner is made for")
    on_grid: float = Field(0.5, ge=0, le=1, description="share of training times on the sampler's own sigmas; 1 = only")
    min_snr_gamma: float | None = Field(
        None, gt=0, le=1e6, allow_inf_nan=False, description="gamma of the loss's Min-SNR weighting; none = no weights"
    )
    loss: Loss = Field("mse", description="of each element: its square, or Huber's (flow.py)")
    huber_delta: float = Field(1.0, gt=0, le=1e6, description="error from which Huber's loss grows in a line")

    @field_validator("noise_scale", mode="before")
    @classmethod
    def _auto_or_number(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) or value == "auto":
            return value
        raise ValueError("must be 'auto' or a number from 0 up to 100")  # pydantic would speak of 'auto' alone

    @model_validator(mode="after")
    def _not_negative(self) -> FlowConfig:
        if self.noise_scale != "auto" and not 0 <= self.noise_scale < 100:
            raise ValueError(f"noise_scale must be 'auto' or a number from 0 up to 100, got {self.noise_scale!r}")
        return self

    @model_validator(mode="after")
    def _delta_of_huber(self) -> FlowConfig:
        if self.loss != "huber" and self.huber_delta != FlowConfig.model_fields["huber_delta"].default:
            raise ValueError(
                f"huber_delta belongs to loss huber and would do nothing in {self.loss}; got {self.huber_delta!r}"
            )
        return self


class SDXLRefinerConfig(Section):
    """Fine-tuning of SDXL's own refiner (training/objectives/sdxl_refiner)."""

    aesthetic_score: float = Field(6.0, ge=0, le=1000, description="what every training picture is called; host's: 6")
    last_timestep: int = Field(
        LAST_TIMESTEP, ge=15, le=LAST_TIMESTEP, description="trained on 0..last; 199 = sigma 0.569"
    )


class DataConfig(Section):
    batch_size: int = Field(4, ge=1, le=4096)
    accumulation: int = Field(1, ge=1, le=4096, description="micro-batches per optimizer step")
    repeats: int = Field(1, ge=1, le=10_000, description="how often an epoch shows each pair, each time another crop")
    crop: int | None = Field(None, ge=8, description="side of the square training crops in latent cells; none = whole")
    mirror: bool = Field(False, description="mirror half of the crops; pixel space only")
    caption_dropout: float = Field(0.1, ge=0, le=1, description="share of samples trained on the empty caption")
    workers: int = Field(0, ge=0, le=64, description="loader processes; 0 inside ComfyUI")
    verify: Literal["changed", "full"] = Field(
        "changed", description="which shards a start reads through: those not known to be whole, or all"
    )


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up and a schedule (training/run/optim/schedule.py)."""

    learning_rate: float = Field(1e-4, gt=0, le=1, description="the highest, at the end of the warm-up")
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = Field(1e-8, gt=0, le=1, description="AdamW's, added to the root of the second moment")
    weight_decay: float = Field(0.01, ge=0, le=1)
    warmup_steps: int = Field(20, ge=0)
    schedule: Schedule = Field("cosine", description="how the rate falls after the warm-up; constant = it stays")
    floor: float = Field(0.0, ge=0, lt=1, description="share of learning_rate that the schedule ends at")
    horizon_steps: int | None = Field(None, ge=1, description="steps until the rate is at its floor; none = all")
    extension: Extension = Field(
        "refuse",
        description="the rate of a finished run that is made longer: constant, its last one; stretch, that of the "
        "schedule over the whole length",
    )
    extended_from: tuple[int, ...] = Field(
        (), description="lengths in steps that the run had before it was made longer; the run itself fills them in"
    )
    clip_norm: float = Field(1.0, gt=0, description="gradient norm above which gradients are scaled down")
    decay_all: bool = Field(False, description="let norms and biases decay too")
    rounding: RoundingChoice = Field("auto", description="pure_bf16: what keeps updates below the gap of two numbers")
    moments: Moments = Field("fp32", description="pure_bf16: AdamW's moments in float32, or stochastically in bfloat16")
    compiled: bool = Field(False, description="pure_bf16: the update through torch.compile")

    @property
    def depends_on_length(self) -> bool:
        """Whether a longer run would have had other rates from the start."""
        return self.schedule != "constant" and self.horizon_steps is None

    @property
    def chosen_rounding(self) -> Rounding:
        """What "auto" means: kahan, whose weights are float32 AdamW's; stochastic where moments in bfloat16 say that
        memory comes first."""
        if self.rounding == "auto":
            return "stochastic" if self.moments == "bf16" else "kahan"
        return self.rounding

    @model_validator(mode="after")
    def _betas(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {list(self.betas)}")
        return self

    @model_validator(mode="after")
    def _of_a_rate_that_falls(self) -> OptimizerConfig:
        for name, nothing in (("floor", 0.0), ("horizon_steps", None)):
            if self.schedule == "constant" and getattr(self, name) != nothing:
                raise ValueError(
                    f"{name} belongs to a rate that falls and would do nothing with schedule constant; got "
                    f"{getattr(self, name)!r}"
                )
        return self

    @model_validator(mode="after")
    def _lengths_before(self) -> OptimizerConfig:
        lengths = self.extended_from
        if any(length < 1 for length in lengths) or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"extended_from must be rising numbers of steps, got {list(lengths)}")
        if lengths and self.extension == "refuse":
            raise ValueError(f"extended_from needs extension constant or stretch beside it; got {list(lengths)}")
        if lengths and not self.depends_on_length:
            raise ValueError(
                "extended_from would do nothing where the rate does not depend on the run's length (schedule constant, "
                f"or horizon_steps); got {list(lengths)}"
            )
        return self


def _steps_or_epoch(value: Any) -> Any:
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value == int(value)
    if value == "epoch" or whole:
        return value
    raise ValueError("must be a number of steps, 0 for the default, or 'epoch'")  # pydantic would speak of one alone


StepsOrEpoch = Annotated[Literal["epoch"] | int, BeforeValidator(_steps_or_epoch)]


class ValidationConfig(Section):
    every: StepsOrEpoch = Field(
        0,
        description="steps between validations; 'epoch' = once an epoch; 0 = once an epoch, and no more than 5 % of "
        "the run's work",
    )
    pictures: int = Field(4, ge=0, le=64, description="held-out pairs shown and measured in mid-training")
    crop: int | None = Field(128, ge=8, description="side of the measured centre crop in latent cells; none = whole")


class CheckpointConfig(Section):
    """When the state is saved, beside the end of the run, a stop, and a validation that was the best so far."""

    every: StepsOrEpoch = Field(
        0,
        description="steps between checkpoints; 'epoch' = at each epoch's end; 0 = at an epoch's end, or 30 minutes "
        "after the last one, and no more than 5 % of the time",
    )
    minutes: float = Field(0.0, ge=0, le=10_000, description="also when so many have passed since the last; 0 = never")


class HealthConfig(Section):
    """When a run that goes wrong is ended (training/run/watch/health.py, leak_watch.py)."""

    skips: int = Field(20, ge=1, description="fp16: steps in a row that the loss scaler may skip")
    scale_floor: float = Field(1.0, ge=0, description="fp16: smallest loss scale; at 0 it would write NaN into weights")
    leak_watch: bool = Field(True, description="end the run when its memory grows all the time")
