"""The settings of a run beside those that Train Refiner asks for itself, as the JSON that its `options` takes."""

from __future__ import annotations

import json
from typing import Any

from ..errors import BadInput
from ..storage.plain_json import RepeatedKey, parse_json
from .identity import MEANS_NOTHING_BY_ITSELF
from .sections import OptimizerConfig
from .train_config import TrainConfig

__all__ = ["FIELDS", "build_options", "default_of"]

FIELDS = {
    "repeats": "data.repeats",
    "mirror": "data.mirror",
    "accumulation": "data.accumulation",
    "caption_dropout": "data.caption_dropout",
    "ema_decay": "ema_decay",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "optimizer.warmup_steps",
    "clip_norm": "optimizer.clip_norm",
    "gradient_checkpointing": "gradient_checkpointing",
    "noise_scale": "flow.noise_scale",
    "steps": "flow.steps",
    "on_grid": "flow.on_grid",
    "min_snr_gamma": "flow.min_snr_gamma",
    "validation_every": "validation.every",
    "validation_pictures": "validation.pictures",
    "keep_checkpoints": "keep_checkpoints",
    "rounding": "optimizer.rounding",
    "moments": "optimizer.moments",
    "start_from": "refiner.start_from",
    "lora_rank": "lora.rank",
    "max_steps": "max_steps",
    "checkpoint_every": "checkpoint.every",
    "checkpoint_minutes": "checkpoint.minutes",
    "schedule": "optimizer.schedule",
    "floor": "optimizer.floor",
    "extension": "optimizer.extension",
    "loss": "flow.loss",
    "huber_delta": "flow.huber_delta",
    "tf32": "tf32",
    "compile": "compile",
    "channels_last": "channels_last",
}
"""Input of Training Options -> field of the configuration."""

_OFF = {"min_snr_gamma": 0, "start_from": "", "lora_rank": 0, "max_steps": 0}  # what stands for None
_EXAMPLE = 'a JSON object such as {"optimizer": {"betas": [0.9, 0.95]}}'


def default_of(name: str) -> Any:
    """An input's default, which is the configuration's own."""
    if name in _OFF:
        return _OFF[name]
    section, _, field = FIELDS[name].rpartition(".")
    model: Any = TrainConfig.model_fields[section].annotation if section else TrainConfig
    return model.model_fields[field].default


def build_options(values: dict[str, Any], more: str = "") -> str:
    """JSON of those `values` (names of FIELDS) that differ from their defaults, with the JSON object `more` over them.

    What is at its default is left out, so that a run without any of it is the same run. BadInput names the field that
    no configuration can have.
    """
    options: dict[str, Any] = {}
    for name, value in values.items():
        if name == "noise_scale":
            value = _noise_scale(value)
        if value == default_of(name):
            continue
        section, _, field = FIELDS[name].rpartition(".")
        (options.setdefault(section, {}) if section else options)[field] = value
    options = _merged(options, _parse(more))
    # whatever is wrong is said here, at the node where it was entered; which precision it is for, only the run knows
    low = options.get("optimizer")
    bf16 = isinstance(low, dict) and any(
        low.get(name, default) not in (default, MEANS_NOTHING_BY_ITSELF.get(name))
        for name in ("rounding", "moments", "compiled")
        for default in [OptimizerConfig.model_fields[name].default]
    )
    places = {"dataset": "dataset", "run": "a run of its own", "precision": "pure_bf16" if bf16 else "fp32"}
    TrainConfig.build({**places, **options})
    return json.dumps(options)


def _noise_scale(text: str) -> Any:
    text = text.strip()
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise BadInput(f"noise_scale: expected auto or a number from 0 up to 100, got {text!r}.") from None


def _parse(text: str) -> dict[str, Any]:
    try:
        values = parse_json(text.strip() or "{}")
    except RepeatedKey as error:
        raise BadInput(f"more: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"more: expected {_EXAMPLE}, got text that is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise BadInput(f"more: expected {_EXAMPLE}, got {text.strip()[:80]}.")
    return values


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, section by section; `above` wins."""
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = {**merged[name], **value} if both else value
    return merged
