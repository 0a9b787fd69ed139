"""What of a configuration decides the trained weights, and how a run that goes on is the run that was begun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from .choices import PRECISIONS_OF_AUTO, Extension, Rounding
from .start_file import start_file_hash

if TYPE_CHECKING:
    from .train_config import TrainConfig

__all__ = [
    "ADDED_LATER", "FORMER_ROUNDING", "FREE_ON_RESUME", "LENGTH", "MEANS_NOTHING_BY_ITSELF", "as_begun", "differences",
    "identity_of", "without_length",
]

FREE_ON_RESUME = (
    "dataset", "run", "device", "keep_checkpoints", "keep_best", "gradient_checkpointing", "health.skips",
    "health.scale_floor", "health.leak_watch", "data.workers", "data.verify", "validation.every",
    "validation.pictures", "validation.crop", "checkpoint.every", "checkpoint.minutes",
)
"""Fields that may change between the parts of one run: where things lie, how often one looks and how much memory it
takes, not what is learnt."""

ADDED_LATER = (
    "objective", "refiner.start_from", "lora", "sdxl_refiner.aesthetic_score", "sdxl_refiner.last_timestep",
    "sdxl_refiner",  # of which nothing is left then
    "flow.min_snr_gamma", "optimizer.decay_all", "optimizer.moments", "optimizer.compiled",
    "deterministic", "health", "checkpoint",  # of the two sections nothing is part of the identity
    "max_steps", "optimizer.schedule", "optimizer.floor", "optimizer.eps", "optimizer.extension",
    "optimizer.extended_from", "flow.loss", "flow.huber_delta", "tf32", "compile", "channels_last",
)
"""Fields that came after the first runs: at their defaults they are left out of the identity, which stays theirs."""

LENGTH = ("epochs", "max_steps", "optimizer.extension", "optimizer.extended_from")
"""Fields that may differ between a finished run and the longer one that it is made into."""

FORMER_ROUNDING: Rounding = "stochastic"
"""What `optimizer.rounding` was where nobody named it, and still is where an identity leaves it out."""

MEANS_NOTHING_BY_ITSELF = {"rounding": FORMER_ROUNDING}
"""Options of pure_bf16 that earlier workflows say in every precision, since they were the defaults: let through."""


def identity_of(config: TrainConfig) -> dict[str, Any]:
    """See TrainConfig.identity."""
    values = config.model_dump(mode="json")
    if config.refiner.start_from is not None:  # what is in the file, wherever it lies
        values["refiner"]["start_from"] = start_file_hash(config.refiner.start_from)
    for free in FREE_ON_RESUME:
        _pop(values, free)
    if config.max_steps is not None:  # which says how long the run is
        values.pop("epochs")
    if not config.optimizer.extended_from:  # what would be done if it were made longer is no part of it yet
        values["optimizer"].pop("extension")
    values["optimizer"].pop("rounding")
    values["optimizer"] |= _rounding_of_the_weights(config)
    for later in ADDED_LATER:
        section, _, name = later.partition(".")
        if not name:
            if not values[section] or getattr(config, section) == type(config).model_fields[section].default:
                values.pop(section)
        elif getattr(getattr(config, section), name) == type(getattr(config, section)).model_fields[name].default:
            values[section].pop(name, None)
    return values


def _rounding_of_the_weights(config: TrainConfig) -> dict[str, str]:
    """`rounding` as it enters the identity: what is done, and nothing where it is what it was in the first runs."""
    rounding = config.optimizer.chosen_rounding
    return {} if config.precision != "pure_bf16" or rounding == FORMER_ROUNDING else {"rounding": rounding}


def as_begun(config: TrainConfig, identity: Any) -> TrainConfig:
    """See TrainConfig.as_begun."""
    identity = identity if isinstance(identity, dict) else {}
    theirs = identity.get("optimizer") if isinstance(identity.get("optimizer"), dict) else {}
    if config.precision == "auto" and identity.get("precision") in PRECISIONS_OF_AUTO:
        config = config.model_copy(update={"precision": identity["precision"]})
    optimizer: dict[str, Any] = {}
    if config.precision == "pure_bf16" and config.optimizer.rounding == "auto":
        rounding = theirs.get("rounding", FORMER_ROUNDING) if identity.get("precision") == "pure_bf16" else None
        optimizer["rounding"] = rounding if rounding in get_args(Rounding) else config.optimizer.chosen_rounding
    lengths, same_length = theirs.get("extended_from"), _length_of(identity) == _length_of_config(config)
    if _are_lengths(lengths) and same_length and not config.optimizer.extended_from:
        optimizer["extended_from"] = tuple(lengths or ())
        if config.optimizer.extension == "refuse" and theirs.get("extension") in get_args(Extension):
            optimizer["extension"] = theirs["extension"]
    if not optimizer:
        return config
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=optimizer)})


def _length_of(identity: dict[str, Any]) -> tuple[Any, Any]:
    return identity.get("epochs"), identity.get("max_steps")


def _length_of_config(config: TrainConfig) -> tuple[int | None, int | None]:
    return (config.epochs, None) if config.max_steps is None else (None, config.max_steps)


def _are_lengths(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(length, int) for length in value)


def without_length(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity but for what may differ when a finished run is made longer."""
    rest = {name: dict(value) if isinstance(value, dict) else value for name, value in identity.items()}
    for field in LENGTH:
        _pop(rest, field)
    return rest


def _pop(values: dict[str, Any], field: str) -> None:
    section, _, name = field.rpartition(".")
    (values.get(section, {}) if section else values).pop(name, None)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """"field old -> new" for every leaf where two identities differ."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        # a section that one of them lacks
        absent: dict[str, Any] | None = {} if isinstance(old.get(key, new.get(key)), dict) else None
        a, b = old.get(key, absent), new.get(key, absent)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} {_short(a)!r} -> {_short(b)!r}")
    return found


def _short(value: Any) -> Any:
    """A SHA-256, of what is in a file, as a person can read it."""
    return f"content {value[:12]}" if isinstance(value, str) and len(value) == 64 else value
