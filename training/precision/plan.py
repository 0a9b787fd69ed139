"""Which part of a pipeline runs in which dtype, and why: what the audit writes and the plan node reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import BadInput
from .dtypes import COMPUTE, DTYPES
from .resolve import AUTO, DEFAULT

__all__ = ["KEEP_KINDS", "PrecisionPlan"]

KEEP_KINDS = ("norms", "embeddings", "in_out", "attention_softmax")


@dataclass(frozen=True)
class PrecisionPlan:
    """Dtypes are the names of `DTYPES`, or "default" (what the loader chose), or "auto".

    keep: what of the model stays in FP32: kinds of `KEEP_KINDS`, and patterns of layer names (`fnmatch`). clip: name of
    a text encoder ("clip_l", "t5xxl", ...) -> (storage, compute). reasons: part ("model", "clip_l", "VAE decoder", ...)
    -> why it got its dtype.
    """

    model_compute: str = DEFAULT
    model_storage: str = DEFAULT
    keep: tuple[str, ...] = ()
    clip: dict[str, tuple[str, str]] = field(default_factory=dict)
    vae_encoder: str = DEFAULT
    vae_decoder: str = DEFAULT
    reasons: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        computes = [self.model_compute, self.vae_encoder, self.vae_decoder, *(pair[1] for pair in self.clip.values())]
        storages = [self.model_storage, *(pair[0] for pair in self.clip.values())]
        for names, allowed in ((computes, COMPUTE), (storages, tuple(DTYPES))):
            for name in names:
                if name not in (DEFAULT, AUTO, *allowed):
                    raise BadInput(
                        f"A precision plan takes {', '.join((DEFAULT, AUTO, *allowed))} there; it got {name!r}."
                    )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> PrecisionPlan:
        """BadInput for what is not the JSON of a plan, naming the field that is wrong."""
        try:
            fields: Any = json.loads(text)
        except ValueError as error:
            raise BadInput(f"A precision plan must be JSON; this is not: {error}.") from None
        known = cls.__dataclass_fields__
        if not isinstance(fields, dict):
            raise BadInput(f"A precision plan must be a JSON object; it is a {type(fields).__name__}.")
        unknown = fields.keys() - known.keys()
        if unknown:
            raise BadInput(f"A precision plan has the fields {', '.join(known)}; it got {', '.join(sorted(unknown))}.")
        try:
            fields["keep"] = tuple(str(kind) for kind in fields.get("keep", ()))
            fields["clip"] = {str(name): _pair(pair) for name, pair in fields.get("clip", {}).items()}
            fields["reasons"] = {str(part): str(why) for part, why in fields.get("reasons", {}).items()}
        except (AttributeError, TypeError, ValueError):
            raise BadInput(
                "In a precision plan, keep must be a list of names, clip must give [storage, compute] for each "
                "encoder, and reasons a sentence for each part."
            ) from None
        return cls(**fields)


def _pair(value: Any) -> tuple[str, str]:
    storage, compute = value
    return str(storage), str(compute)
