"""One training run as data: the same JSON for the node, the command line and the launcher.

Errors name the field: "optimizer.learning_rate: Input should be greater than 0 (got -1)".
"""

from __future__ import annotations

import json
import os
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from ..errors import BadInput
from ..errors.suggest import complaint
from ..storage.plain_json import RepeatedKey, parse_json
from .choices import Moments, Rounding, RoundingChoice
from .network import PRESETS
from .section import PlainPath, Section
from .start_file import start_file_hash

Precision = Literal["fp32", "bf16", "fp16", "pure_bf16"]
MOST_RANK = 1024  # of LoRA
LAST_TIMESTEP = 199  # of SDXL's refiner: sigma 0.569, where the base hands over
MOST_LOW_SUMS = 64  # gradients that add up in bfloat16: the 257th of equal size would change nothing


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


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up and a cosine to zero over `horizon_steps`."""

    learning_rate: float = Field(1e-4, gt=0, le=1)
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(0.01, ge=0, le=1)
    warmup_steps: int = Field(20, ge=0)
    horizon_steps: int | None = Field(None, ge=1, description="steps until the rate is zero; none = the whole run")
    clip_norm: float = Field(1.0, gt=0, description="gradient norm above which gradients are scaled down")
    decay_all: bool = Field(False, description="let norms and biases decay too")
    rounding: RoundingChoice = Field("auto", description="pure_bf16: what keeps updates below the gap of two numbers")
    moments: Moments = Field("fp32", description="pure_bf16: AdamW's moments in float32, or stochastically in bfloat16")
    compiled: bool = Field(False, description="pure_bf16: the update through torch.compile")

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


class ValidationConfig(Section):
    every: int = Field(0, ge=0, description="steps between validations; 0 = once an epoch")
    pictures: int = Field(4, ge=0, le=64, description="held-out pairs shown and measured in mid-training")
    crop: int | None = Field(128, ge=8, description="side of the measured centre crop in latent cells; none = whole")


class HealthConfig(Section):
    """When a run that goes wrong is ended (training/run/watch/health.py, leak_watch.py)."""

    skips: int = Field(20, ge=1, description="fp16: steps in a row that the loss scaler may skip")
    scale_floor: float = Field(1.0, ge=0, description="fp16: smallest loss scale; at 0 it would write NaN into weights")
    leak_watch: bool = Field(True, description="end the run when its memory grows all the time")


class TrainConfig(Section):
    """A whole run. `dataset` and `run` are folders; nothing of them enters the trained file's bytes."""

    dataset: PlainPath
    run: PlainPath
    objective: Literal["residual", "sdxl_refiner"] = "residual"
    sdxl_refiner: SDXLRefinerConfig = SDXLRefinerConfig()
    refiner: RefinerConfig = RefinerConfig()
    flow: FlowConfig = FlowConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    validation: ValidationConfig = ValidationConfig()
    health: HealthConfig = HealthConfig()
    lora: LoRAConfig | None = None
    epochs: int = Field(8, ge=1, le=100_000)
    ema_decay: float = Field(0.999, ge=0, lt=1)
    precision: Precision = "fp32"
    gradient_checkpointing: bool = Field(False, description="compute activations twice instead of keeping them")
    device: str = Field("auto", description="auto = the first GPU, else the CPU")
    deterministic: bool = Field(False, description="equal bytes on a GPU too, for some time; on a CPU they always are")
    seed: int = Field(0, ge=0, lt=2**63)
    keep_checkpoints: int = Field(2, ge=1)
    keep_best: bool = Field(True, description="keep the checkpoint of the lowest validation loss beside the newest")

    @model_validator(mode="after")
    def _options_of_pure_bf16(self) -> TrainConfig:
        if self.precision == "pure_bf16":
            if self.data.accumulation > MOST_LOW_SUMS:
                raise ValueError(
                    f"data.accumulation must be at most {MOST_LOW_SUMS} with precision pure_bf16, where gradients add "
                    f"up in bfloat16; got {self.data.accumulation}"
                )
            return self
        for name in ("rounding", "moments", "compiled"):
            value = getattr(self.optimizer, name)
            if value != OptimizerConfig.model_fields[name].default and value != MEANS_NOTHING_BY_ITSELF.get(name):
                raise ValueError(
                    f"optimizer.{name} belongs to precision pure_bf16 and would do nothing in {self.precision}; "
                    f"got {value!r}"
                )
        return self

    @model_validator(mode="after")
    def _options_of_one_objective(self) -> TrainConfig:
        other = {name for name in OF_ONE_OBJECTIVE if name != self.objective}.pop()
        for field in OF_ONE_OBJECTIVE[other]:
            section, _, name = field.rpartition(".")
            where = getattr(self, section) if section else self
            value = getattr(where, name)
            if value != type(where).model_fields[name].default:
                got = "a section" if isinstance(value, BaseModel) else repr(value)
                raise ValueError(
                    f"{field} belongs to objective {other} and would do nothing in {self.objective}; got {got}"
                )
        return self

    @model_validator(mode="after")
    def _a_network_to_go_on_from(self) -> TrainConfig:
        refiner, start = self.refiner, self.refiner.start_from
        if self.objective == "residual" and start is not None and (refiner.preset != "auto" or refiner.shape):
            raise ValueError(
                "refiner.start_from brings the network's shape along: expected preset auto and no shape beside it, got "
                f"{'a shape' if refiner.shape else f'preset {refiner.preset}'}"
            )
        if self.lora is not None and start is None:
            raise ValueError(
                "lora needs refiner.start_from: it trains small adapters and leaves the network under them as it is, "
                "and one of random weights would never learn"
            )
        if start is not None and os.path.realpath(start).startswith(os.path.join(os.path.realpath(self.run), "")):
            raise ValueError(
                f"refiner.start_from must not lie in the folder of the new run, which would put its own refiner there: "
                f"give the run another name; got {str(start)!r}"
            )
        return self

    @classmethod
    def parse(cls, text: str) -> TrainConfig:
        """From JSON; BadInput with the field's name."""
        try:
            values = parse_json(text)
        except RepeatedKey as error:
            raise BadInput(f"Training configuration: {error}.") from error
        except (ValueError, RecursionError) as error:
            raise BadInput(f"Training configuration: expected JSON, got text that is none ({error}).") from error
        return cls.build(values)

    @classmethod
    def build(cls, values: dict[str, Any]) -> TrainConfig:
        """From a nested dictionary; BadInput with the field's name."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise BadInput(f"Training configuration: {complaint(error, cls)}.") from error

    def identity(self) -> dict[str, Any]:
        """The part that decides the trained weights. Two runs of equal identity on equal data give equal bytes.

        BadInput where the refiner to start from cannot be read.
        """
        values = self.model_dump(mode="json")
        if self.refiner.start_from is not None:  # what is in the file, wherever it lies
            values["refiner"]["start_from"] = start_file_hash(self.refiner.start_from)
        for free in FREE_ON_RESUME:
            section, _, name = free.rpartition(".")
            (values[section] if section else values).pop(name)
        values["optimizer"].pop("rounding")
        values["optimizer"] |= self._rounding_of_the_weights()
        for later in ADDED_LATER:
            section, _, name = later.partition(".")
            if not name:
                if not values[section] or getattr(self, section) == type(self).model_fields[section].default:
                    values.pop(section)
            elif getattr(getattr(self, section), name) == type(getattr(self, section)).model_fields[name].default:
                values[section].pop(name)
        return values

    def _rounding_of_the_weights(self) -> dict[str, str]:
        """`rounding` as it enters the identity: what is done, and nothing where it is what it was in the first runs."""
        rounding = self.optimizer.chosen_rounding
        return {} if self.precision != "pure_bf16" or rounding == FORMER_ROUNDING else {"rounding": rounding}

    def as_begun(self, identity: Any) -> TrainConfig:
        """This configuration, with what it leaves to "auto" as a run of that identity, begun earlier, has it.

        identity: that of a run in the same folder, or whatever was found there.
        """
        if self.precision != "pure_bf16" or self.optimizer.rounding != "auto":
            return self
        rounding = self.optimizer.chosen_rounding
        if isinstance(identity, dict) and identity.get("precision") == "pure_bf16":
            theirs = identity.get("optimizer")
            found = theirs.get("rounding", FORMER_ROUNDING) if isinstance(theirs, dict) else None
            rounding = found if found in get_args(Rounding) else rounding
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update={"rounding": rounding})})

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


FREE_ON_RESUME = (
    "dataset", "run", "device", "keep_checkpoints", "keep_best", "gradient_checkpointing", "health.skips",
    "health.scale_floor", "health.leak_watch", "data.workers", "validation.every", "validation.pictures",
    "validation.crop",
)
"""Fields that may change between the parts of one run: where things lie, how often one looks and how much memory it
takes, not what is learnt."""

OF_ONE_OBJECTIVE = {
    "residual": (
        "refiner.preset", "refiner.base", "refiner.allow_larger", "flow.noise_scale", "flow.steps", "flow.on_grid",
        "flow.min_snr_gamma", "lora",
    ),
    "sdxl_refiner": ("sdxl_refiner.aesthetic_score", "sdxl_refiner.last_timestep"),
}
"""Fields that mean something to one objective alone: the other refuses them by name."""

ADDED_LATER = (
    "objective", "refiner.start_from", "lora", "sdxl_refiner.aesthetic_score", "sdxl_refiner.last_timestep",
    "sdxl_refiner",  # of which nothing is left then
    "flow.min_snr_gamma", "optimizer.decay_all", "optimizer.moments", "optimizer.compiled",
    "deterministic", "health",  # of which nothing is part of the identity
)
"""Fields that came after the first runs: at their defaults they are left out of the identity, which stays theirs."""


FORMER_ROUNDING: Rounding = "stochastic"
"""What `optimizer.rounding` was where nobody named it, and still is where an identity leaves it out."""

MEANS_NOTHING_BY_ITSELF = {"rounding": FORMER_ROUNDING}
"""Options of pure_bf16 that earlier workflows say in every precision, since they were the defaults: let through."""


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """"field old -> new" for every leaf where two identities differ."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        absent = {} if isinstance(old.get(key, new.get(key)), dict) else None  # a section that one of them lacks
        a, b = old.get(key, absent), new.get(key, absent)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} {_short(a)!r} -> {_short(b)!r}")
    return found


def _short(value: Any) -> Any:
    """A SHA-256, of what is in a file, as a person can read it."""
    return f"content {value[:12]}" if isinstance(value, str) and len(value) == 64 else value
