"""What the audits of a VAE, a CLIP and a MODEL have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....training.precision.audit_report import AuditPart
from ....training.precision.device import Support, support
from ....training.precision.dtypes import DTYPES
from ....training.precision.measures import Errors

__all__ = ["Audited", "error_of", "native_support"]


@dataclass
class Audited:
    """What an audit measured of one model: the parts of its report, and notes for its head."""

    parts: list[AuditPart] = field(default_factory=list, kw_only=True)
    notes: list[str] = field(default_factory=list, kw_only=True)


def native_support(device: torch.device, names: Iterable[str]) -> dict[str, Support]:
    """What `device` can do with each dtype of these names."""
    return {name: support(device, DTYPES[name]) for name in names}


def error_of(low: Iterable[Tensor], reference: Iterable[Tensor]) -> Errors:
    """The error of the tensors `low` against those of `reference`, all taken together."""
    errors = Errors()
    for one, other in zip(low, reference, strict=True):
        errors.add(one, other)
    return errors
