"""A precision plan put into effect on a MODEL, a CLIP and a VAE, and the table that says what then runs in what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch

from ....training.errors import BadInput
from ....training.errors.markdown import markdown_table
from ....training.precision.dtypes import DTYPES, dtype_name
from ....training.precision.plan import KEEP_KINDS, PrecisionPlan
from ....training.precision.resolve import AUTO, DEFAULT
from ..clip.select import ALL, encoder_dtypes, select_clip_precision
from ..model.select import Keep, model_dtypes, select_model_precision
from ..patching.storage import storage_name
from ..vae.halves import find_halves
from ..vae.select import select_vae_precision, vae_dtypes

__all__ = ["PlannedModels", "apply_plan", "device_of"]


@dataclass(frozen=True)
class PlannedModels:
    """What came in, in the dtypes of the plan (None where nothing came in), and the table."""

    model: Any
    clip: Any
    vae: Any
    table: str


@dataclass(frozen=True)
class _Row:
    part: str
    kept_in: str
    before: int  # bytes of weights
    after: int
    computes_in: str
    why: str


def device_of(model: Any = None, clip: Any = None, vae: Any = None) -> torch.device:
    """Where these models compute; the host's own device where there is none."""
    if model is not None:
        return model.load_device
    for other in (vae, clip):
        if other is not None:
            return other.patcher.load_device
    return comfy.model_management.get_torch_device()


def apply_plan(plan: PrecisionPlan, *, model: Any = None, clip: Any = None, vae: Any = None) -> PlannedModels:
    """The models in the dtypes of `plan`; what selectors before it chose is replaced.

    Each part is decided on its own: one that cannot be changed passes through, and its row says why. A dtype that this
    machine lacks is passed over and said.
    """
    rows: list[_Row] = []
    reports: list[str] = []
    given = {"MODEL": model, "CLIP": clip, "VAE": vae}
    for part, planned, rows_of in (
        ("MODEL", _planned_model, _model_rows),
        ("CLIP", _planned_clip, _clip_rows),
        ("VAE", _planned_vae, _vae_rows),
    ):
        if given[part] is not None:
            more, report, given[part] = _each(part, given[part], planned, rows_of, plan)
            rows += more
            reports.append(report)
    return PlannedModels(given["MODEL"], given["CLIP"], given["VAE"], "\n\n".join([_table(rows), *reports]))


def _each(
    part: str,
    given: Any,
    planned: Callable[[Any, PrecisionPlan], tuple[Any, str]],
    rows_of: Callable[[Any, Any, PrecisionPlan], list[_Row]],
    plan: PrecisionPlan,
) -> tuple[list[_Row], str, Any]:
    """(its rows, the report of its selector, the part to go on with), where `planned` refuses too."""
    try:
        made, report = planned(given, plan)
    except BadInput as refused:
        patcher = getattr(given, "patcher", given)
        size = _bytes(patcher.model.parameters()) if hasattr(patcher, "model") else 0
        row = _Row(part, "as it came", size, size, "as it came", str(refused))
        return [row], f"{part}: as it came in; {refused}", given
    return rows_of(given, made, plan), report, made


def _planned_model(model: Any, plan: PrecisionPlan) -> tuple[Any, str]:
    kinds = {kind: kind in plan.keep for kind in KEEP_KINDS}
    patterns = "\n".join(name for name in plan.keep if name not in KEEP_KINDS)
    selected = select_model_precision(model, plan.model_compute, plan.model_storage, Keep(**kinds, layers=patterns))
    return selected.model, selected.report


def _planned_clip(clip: Any, plan: PrecisionPlan) -> tuple[Any, str]:
    selected = select_clip_precision(clip)  # forget what selectors before chose
    # "all" first: an encoder that is named as well then has the last word
    for name, (storage, compute) in sorted(plan.clip.items(), key=lambda item: item[0] != ALL):
        if name == ALL or name in encoder_dtypes(clip):
            selected = select_clip_precision(selected.clip, name, storage, compute)
    return selected.clip, selected.report


def _planned_vae(vae: Any, plan: PrecisionPlan) -> tuple[Any, str]:
    selected = select_vae_precision(vae, plan.vae_encoder, plan.vae_decoder)
    return selected.vae, selected.report


# --------------------------------------------------------------------------------------------------------- the table


def _model_rows(before: Any, after: Any, plan: PrecisionPlan) -> list[_Row]:
    dtypes = model_dtypes(after)
    in_float32 = f"; FP32: {', '.join(plan.keep)}" if plan.keep else ""
    networks = [patcher.model.diffusion_model for patcher in (before, after)]
    sizes = [_bytes(network.parameters()) for network in networks]
    why = _why(plan.reasons, "model") + _passed_over(plan.model_storage, dtypes[0])
    return [_Row("MODEL", storage_name(dtypes[0]), *sizes, dtype_name(dtypes[1]) + in_float32, why)]


def _clip_rows(before: Any, after: Any, plan: PrecisionPlan) -> list[_Row]:
    rows = []
    for name, (storage, compute) in encoder_dtypes(after).items():
        sizes = [_bytes(getattr(clip.cond_stage_model, name).parameters()) for clip in (before, after)]
        wanted = plan.clip.get(name, plan.clip.get(ALL, (DEFAULT, DEFAULT)))[0]
        why = _why(plan.reasons, name, "clip") + _passed_over(wanted, storage)
        rows.append(_Row(f"CLIP {name}", storage_name(storage), *sizes, dtype_name(compute), why))
    return rows


def _vae_rows(before: Any, after: Any, plan: PrecisionPlan) -> list[_Row]:
    halves = find_halves(before.first_stage_model)
    whole = [("VAE", None)] if halves is None else zip(("VAE encoder", "VAE decoder"), halves, strict=True)
    rows = []
    for (part, names), dtype in zip(whole, vae_dtypes(after), strict=False):
        sizes = [_bytes(_weights_of(vae.first_stage_model, names)) for vae in (before, after)]
        wanted = plan.vae_encoder if part == "VAE encoder" else plan.vae_decoder
        why = _why(plan.reasons, part, "VAE decoder") + _passed_over(wanted, dtype)
        rows.append(_Row(part, dtype_name(dtype), *sizes, dtype_name(dtype), why))
    return rows


def _weights_of(module: torch.nn.Module, names: Iterable[str] | None) -> list[torch.nn.Parameter]:
    """Those of the parts named, which are attributes: a half that is shared with the source is no registered child."""
    if names is None:
        return [*module.parameters()]
    parts = []
    for name in names:
        part = module
        for step in name.split("."):
            part = getattr(part, step)
        parts.append(part)
    return [weight for part in parts for weight in part.parameters()]


def _bytes(weights: Iterable[torch.Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)


def _why(reasons: Mapping[str, str], *parts: str) -> str:
    return next((reasons[part] for part in parts if part in reasons), "")


def _passed_over(wanted: str, kept_in: torch.dtype | None) -> str:
    """What to add where a part is not kept as the plan would have it; the report below says why."""
    if wanted in (DEFAULT, AUTO) or kept_in == DTYPES.get(wanted, kept_in):
        return ""
    return f" ({wanted} passed over, see below)"


def _table(rows: list[_Row]) -> str:
    sizes = [[row.before, row.after] for row in rows]
    cells = [[row.part, row.kept_in, row.computes_in, row.why] for row in rows]
    cells.append(["all", "", "", ""])
    sizes.append([sum(pair[side] for pair in sizes) for side in (0, 1)])
    mib = [[f"{size / 2**20:.1f}" for size in pair] for pair in sizes]
    head = ["part", "kept in", "computes in", "why", "MiB before", "MiB after"]
    return "\n".join(markdown_table(head, [[*cell, *size] for cell, size in zip(cells, mib, strict=True)], left=4))
