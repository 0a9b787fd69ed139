"""From what a person picked for a part of a model to a dtype that this machine has, and the line that says so."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from .device import Support, stores, support
from .dtypes import DTYPES, dtype_name
from .policy import AutomaticDtype

__all__ = ["AUTO", "DEFAULT", "resolve_compute", "resolve_storage"]

DEFAULT, AUTO = "default", "auto"
_LOG = logging.getLogger("ref2v")


def resolve_compute(
    part: str, wanted: str, loaded: torch.dtype, device: torch.device, automatic: Callable[[], AutomaticDtype]
) -> tuple[torch.dtype, str]:
    """The dtype in which `part` computes, and the line of a report that says so.

    `wanted`: "default" (`loaded`, what the loader chose), "auto" (what `automatic()` gives), or a key of `DTYPES`. A
    dtype that `device` cannot compute in, or that this version does not know, is logged and passed over: a workflow
    from another machine runs here too.
    """
    if wanted == DEFAULT:
        return loaded, f"{part}: {dtype_name(loaded)}, as loaded"
    if wanted == AUTO:
        choice = automatic()
        return choice.dtype, f"{part}: {dtype_name(choice.dtype)} (auto: {choice.why})"
    dtype = DTYPES.get(wanted)
    return _if_possible(part, wanted, loaded, support(device, dtype) if dtype is not None else None)


def resolve_storage(part: str, wanted: str, loaded: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """The same for the dtype in which the weights of `part` are kept: "default", or any key of `DTYPES`."""
    if wanted == DEFAULT:
        return loaded, f"{part}: {dtype_name(loaded)}, as loaded"
    dtype = DTYPES.get(wanted)
    return _if_possible(part, wanted, loaded, stores(device, dtype) if dtype is not None else None)


def _if_possible(part: str, wanted: str, loaded: torch.dtype, possible: Support | None) -> tuple[torch.dtype, str]:
    """`wanted` where the machine has it, as `possible` says, else `loaded`."""
    if possible is None or not possible.runs:
        why = possible.why if possible else f"this version of the pack does not know the dtype {wanted!r}"
        _LOG.warning("%s: %s; it stays %s, as loaded.", part, why, dtype_name(loaded))
        return loaded, f"{part}: {dtype_name(loaded)}, as loaded, because {why}"
    return DTYPES[wanted], f"{part}: {wanted}" + (f" (slow: {possible.why})" if possible.why else "")
