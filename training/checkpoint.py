"""Checkpoints of a run: one folder a step, written beside and renamed, so that every folder that is there is whole."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BadInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TENSOR_FILES = ("weights", "ema", "optimizer")


@dataclass
class Checkpoint:
    step: int
    weights: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]  # JSON: what the loop needs beside tensors


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `folder`/step-00000360/, then drop all but the newest `keep`.

    Raises BadInput (disk full, no permission); the older checkpoints are then as they were.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = folder / f"step-{checkpoint.step:08d}"
    if _is_whole(final):  # a run of this folder has the same content at the same step
        return final
    beside = folder / f".{final.name}.partial"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        sizes = {}
        for name in TENSOR_FILES:
            path = beside / f"{name}.safetensors"
            save_file({k: t.detach().cpu().contiguous() for k, t in getattr(checkpoint, name).items()}, path)
            sizes[path.name] = path.stat().st_size
            _sync(path)
        state = beside / "state.json"
        state.write_text(json.dumps({"step": checkpoint.step, "files": sizes, **checkpoint.state}, sort_keys=True))
        _sync(state)
        if final.exists():  # not whole, or it would have been left as it is
            shutil.rmtree(final)
        os.replace(beside, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise BadInput(f"{final}: the checkpoint could not be written, the older ones are whole: {error}.") from error
    for old in list_steps(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def list_steps(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def kept(folder: Path) -> str:
    """Which checkpoint a run would go on from, for a sentence: "kept: step-00000360"."""
    whole = next((path.name for path in reversed(list_steps(folder)) if _is_whole(path)), None)
    return f"kept: {whole}" if whole else "no checkpoint had been kept yet"


def load_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint (None where there is none), and a sentence for each one passed over."""
    passed_over = []
    for path in reversed(list_steps(folder)):
        try:
            return _load(path), passed_over
        except BadInput as error:
            passed_over.append(str(error))
    return None, passed_over


def _is_whole(path: Path) -> bool:
    try:
        _read_state(path)
    except BadInput:
        return False
    return True


def _read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint whose tensor files have the sizes that it says; BadInput otherwise."""
    try:
        state = json.loads((path / "state.json").read_text())
        for name in TENSOR_FILES:
            file = path / f"{name}.safetensors"
            expected, found = state["files"][file.name], file.stat().st_size
            if expected != found:
                raise BadInput(f"{path.name} passed over: {file.name} has {found:,} bytes instead of {expected:,}.")
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path.name} passed over: it is not whole ({error}).") from error
    return state


def _load(path: Path) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state = _read_state(path)
    try:
        tensors = {name: load_file(path / f"{name}.safetensors") for name in TENSOR_FILES}
        return Checkpoint(step=state["step"], state=state, **tensors)
    except (OSError, KeyError, SafetensorError) as error:
        raise BadInput(f"{path.name} passed over: it is not whole ({error}).") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """The optimizer's state as named tensors, "<parameter>/<state>", so that no pickle is needed."""
    import torch

    return {
        f"{names[parameter]}/{key}": value if torch.is_tensor(value) else torch.tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """The inverse of optimizer_tensors."""
    # AdamW keeps its moments beside the parameter, and its step counter there too where a kernel on the device reads it
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for key, value in tensors.items():
        name, _, state = key.rpartition("/")
        parameter = parameters[name]
        stays = state == "step" and not counts_on_device
        optimizer.state[parameter][state] = value if stays else value.to(parameter.device)


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
