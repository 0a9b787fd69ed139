"""One training run as data: the same JSON for the node, the command line and the launcher.

Errors name the field: "optimizer.learning_rate: Input should be greater than 0 (got -1)".
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from ..errors import BadInput
from ..errors.suggest import complaint
from ..storage.plain_json import RepeatedKey, parse_json
from .choices import PrecisionChoice
from .identity import MEANS_NOTHING_BY_ITSELF, as_begun, identity_of
from .section import PlainPath, Section
from .sections import (
    CheckpointConfig,
    DataConfig,
    FlowConfig,
    HealthConfig,
    LoRAConfig,
    OptimizerConfig,
    RefinerConfig,
    SDXLRefinerConfig,
    ValidationConfig,
)

__all__ = ["OF_ONE_OBJECTIVE", "TrainConfig"]

MOST_LOW_SUMS = 64  # gradients that add up in bfloat16: the 257th of equal size would change nothing


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
    checkpoint: CheckpointConfig = CheckpointConfig()
    health: HealthConfig = HealthConfig()
    lora: LoRAConfig | None = None
    epochs: int = Field(8, ge=1, le=100_000)
    max_steps: int | None = Field(None, ge=1, le=10**9, description="steps of the whole run, in the place of epochs")
    ema_decay: float = Field(0.999, ge=0, lt=1)
    precision: PrecisionChoice = Field(
        "fp32", description="auto: bf16 where the device has it in hardware, else fp32; a run stays what it began as"
    )
    tf32: bool = Field(False, description="matrices and convolutions in float32 may use TF32, on a GPU that has it")
    compile: bool = Field(False, description="the network through torch.compile")
    channels_last: bool = Field(False, description="convolutions with the channels last in memory")
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
        return identity_of(self)

    def as_begun(self, identity: Any) -> TrainConfig:
        """This configuration, with what it leaves open as a run of that identity, begun earlier, has it: what "auto"
        means, and the lengths that the run had before.

        identity: that of a run in the same folder, or whatever was found there.
        """
        return as_begun(self, identity)

    def total_steps(self, micro_per_epoch: int) -> int:
        """Optimizer steps of the whole run, where an epoch has `micro_per_epoch` micro-batches."""
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(self.epochs * micro_per_epoch / self.data.accumulation)

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"


OF_ONE_OBJECTIVE = {
    "residual": (
        "refiner.preset", "refiner.base", "refiner.allow_larger", "flow.noise_scale", "flow.steps", "flow.on_grid",
        "flow.min_snr_gamma", "flow.loss", "flow.huber_delta", "lora",
    ),
    "sdxl_refiner": ("sdxl_refiner.aesthetic_score", "sdxl_refiner.last_timestep"),
}
"""Fields that mean something to one objective alone: the other refuses them by name."""
