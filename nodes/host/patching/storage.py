"""What a report says of the dtype in which weights are stored: chosen, as loaded, or passed over and why."""

from __future__ import annotations

import logging

import torch

from ....training.precision.dtypes import dtype_name
from ....training.precision.resolve import DEFAULT, resolve_storage

__all__ = ["as_loaded", "choose_storage", "storage_name"]

_LOG = logging.getLogger("ref2v")
_QUANTIZED = "its weights are quantized, packed numbers with scales beside them, which no cast reaches"


def storage_name(dtype: torch.dtype | None) -> str:
    """ "bf16"; "quantized" where it is None."""
    return "quantized" if dtype is None else dtype_name(dtype)


def choose_storage(
    part: str, wanted: str, loaded: torch.dtype | None, device: torch.device
) -> tuple[torch.dtype | None, str]:
    """The dtype to store the weights of `part` in, and the line of a report; `loaded`: what the loader chose, None for
    quantized weights, which stay as they are.
    """
    if loaded is not None:
        return resolve_storage(part, wanted, loaded, device)
    return None, f"{part}: quantized, as loaded" if wanted == DEFAULT else as_loaded(part, wanted, None, _QUANTIZED)


def as_loaded(part: str, wanted: str, loaded: torch.dtype | None, why: str) -> str:
    """The line for a storage that these weights cannot be brought into; logged too."""
    line = f"{part}: {storage_name(loaded)}, as loaded; {wanted} is passed over, because {why.rstrip('.')}."
    _LOG.warning(line)
    return line
