"""Checkpoints of a run: one folder a step, checksums in it, written beside and renamed, so that what is there is whole.

    step-00000360/
        weights.safetensors  ema.safetensors  optimizer.safetensors
        state.json      what the loop needs beside tensors (training/run/checkpoints/resume.py)
        SHA256SUMS      written last
    step-00000400.passed-over/      damaged when the run was taken up; nothing reads it again

Tensors are safetensors and the rest is JSON. Nothing here opens a pickle.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.identity import differences
from ...errors import BadInput
from ...objectives.plain_names import plain_names
from ...storage.checksums import what_is_broken, write_checksums
from ...storage.files import replace, sync_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FORMAT, VERSION = "ref2v-checkpoint", 2
TENSOR_FILES = ("weights", "ema", "optimizer")
STATE = "state.json"
FILES = {STATE, *(f"{name}.safetensors" for name in TENSOR_FILES)}
PICKLES = {".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle"}
ASIDE = ".passed-over"


@dataclass
class Checkpoint:
    step: int
    weights: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]  # JSON: what the loop needs beside tensors

    def on_cpu(self) -> bool:
        """Whether all tensors are the CPU's own."""
        return all(tensor.is_cpu for name in TENSOR_FILES for tensor in getattr(self, name).values())

    def snapshot(self) -> Checkpoint:
        """A copy on the CPU that does not change as training goes on."""
        copies = {
            name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in getattr(self, name).items()}
            for name in TENSOR_FILES
        }
        return Checkpoint(step=self.step, state=self.state, **copies)


# ------------------------------------------------------------------------------------------------------------ writing


def save(folder: Path, checkpoint: Checkpoint, keep: int, best: int | None = None) -> Path:
    """Write `folder`/step-00000360/, then drop all older ones but the newest `keep` and that of the step `best`.

    Raises BadInput (disk full, no permission); the older checkpoints are then as they were.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    final = folder / f"step-{checkpoint.step:08d}"
    beside = folder / f".{final.name}.partial"
    if what_is_broken(final, FILES) is not None:  # else it is there: the same step of a run has the same content
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            for name in TENSOR_FILES:
                tensors = plain_names(getattr(checkpoint, name))
                cpu = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
                save_file(cpu, beside / f"{name}.safetensors")
            state = {**checkpoint.state, "format": FORMAT, "version": VERSION, "step": checkpoint.step}
            (beside / STATE).write_text(json.dumps(state, sort_keys=True, indent=1) + "\n", encoding="utf-8")
            write_checksums(beside)
            if final.exists():
                _remove(final)
            replace(beside, final)
            sync_folder(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise BadInput(
                f"{final}: the checkpoint could not be written, the older ones are whole: {error}."
            ) from error
    older = [path for path in list_steps(folder) if step_of(path) <= checkpoint.step]
    for old in older[:-keep]:
        if step_of(old) != best:
            _remove(old)
    return final


def list_steps(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first."""
    return sorted(p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir())


def kept(folder: Path) -> str:
    """Which checkpoint a run would go on from, for a sentence: "kept: step-00000360"."""
    whole = next((path.name for path in reversed(list_steps(folder)) if what_is_broken(path, FILES) is None), None)
    return f"kept: {whole}" if whole else "no checkpoint had been kept yet"


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def _remove(path: Path) -> None:
    """Delete a checkpoint; one that is half deleted, by a kill in between, no longer has the name of a whole one."""
    hidden = path.with_name(f".{path.name}.partial-removal")
    shutil.rmtree(hidden, ignore_errors=True)
    replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------ reading


def load_newest(
    folder: Path,
    run: dict[str, Any] | None = None,
    like: Mapping[str, Tensor] | None = None,
    parts: tuple[str, ...] = TENSOR_FILES,
    earlier: Sequence[dict[str, Any]] = (),
) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint (None where there is none), and a sentence for each one passed over. Changes nothing.

    run: {"identity", "data"} of the run that asks; a checkpoint of another one is passed over.
    like: tensors of the network that will take the weights; a checkpoint with other names or shapes is passed over.
    parts: which of its tensors to read.
    earlier: the runs that `run` was made longer from; their checkpoints are its own.
    """
    found, passed_over = _look(folder, _runs(run, earlier), like, parts)
    return found, [sentence for _, sentence in passed_over]


def load_step(
    path: Path,
    run: dict[str, Any] | None = None,
    parts: tuple[str, ...] = TENSOR_FILES,
    earlier: Sequence[dict[str, Any]] = (),
) -> Checkpoint:
    """The checkpoint in the folder `path`, of which only the tensors `parts` are read; BadInput says what is wrong."""
    try:
        return _load(path, _runs(run, earlier), None, parts)
    except BadInput as error:
        raise BadInput(str(error).replace(" passed over: ", " cannot be used: ", 1)) from error


def take_up(
    folder: Path, run: dict[str, Any], like: Mapping[str, Tensor], earlier: Sequence[dict[str, Any]] = ()
) -> tuple[Checkpoint | None, list[str]]:
    """As `load_newest`, and clear what a kill left half done.

    A checkpoint that was passed over gets another name, so that it neither counts among the newest that are kept nor is
    looked at again. Pickles that lie here are named.
    """
    found, passed_over = _look(folder, _runs(run, earlier), like)
    sentences = []
    for path, sentence in passed_over:
        aside = path.with_name(path.name + ASIDE)
        try:
            shutil.rmtree(aside, ignore_errors=True)
            replace(path, aside)
            sentences.append(f"{sentence} It is now called {aside.name}.")
        except OSError:
            sentences.append(sentence)
    for half in [*folder.glob(".step-*.partial"), *folder.glob(".step-*.partial-removal")]:
        shutil.rmtree(half, ignore_errors=True)
    return found, [*sentences, *_pickles(folder)]


def _runs(run: dict[str, Any] | None, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    return None if run is None else [run, *earlier]


def _look(
    folder: Path,
    runs: list[dict[str, Any]] | None,
    like: Mapping[str, Tensor] | None,
    parts: tuple[str, ...] = TENSOR_FILES,
) -> tuple[Checkpoint | None, list[tuple[Path, str]]]:
    passed_over: list[tuple[Path, str]] = []
    for path in reversed(list_steps(folder)):
        try:
            return _load(path, runs, like, parts), passed_over
        except BadInput as error:
            passed_over.append((path, str(error)))
    return None, passed_over


def _load(
    path: Path,
    runs: list[dict[str, Any]] | None,
    like: Mapping[str, Tensor] | None,
    parts: tuple[str, ...] = TENSOR_FILES,
) -> Checkpoint:
    """A checkpoint that is whole, of this format, this run and this network; BadInput says what it is not."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    broken = what_is_broken(path, FILES)
    if broken is not None:
        if _is_of_version_1(path):
            broken = "it is of an earlier format, without checksums, and this version does not read it"
        elif pickles := _pickles(path):
            broken = f"{broken}; {pickles[0].rstrip('.')}"
        raise BadInput(f"{path.name} passed over: {broken}.")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if (state["format"], state["version"]) != (FORMAT, VERSION):
            raise BadInput(
                f"{path.name} passed over: expected {FORMAT} version {VERSION}, got {state['format']} version "
                f"{state['version']}."
            )
        tensors = {
            name: load_file(path / f"{name}.safetensors") if name in parts else {} for name in TENSOR_FILES
        }
        found = Checkpoint(step=state["step"], state=state, **tensors)
        if found.step != step_of(path):
            raise BadInput(f"{path.name} passed over: it is step {found.step} under another name.")
        if runs is not None and state["run"] not in runs:
            changed = differences(state["run"], runs[0])
            raise BadInput(f"{path.name} passed over: it is of another run ({'; '.join(changed)}).")
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise BadInput(f"{path.name} passed over: its content cannot be read ({error}).") from error
    if like is not None:
        other = _what_does_not_fit(found, like)
        if other:
            raise BadInput(f"{path.name} passed over: it is of another network: {other}.")
    return found


def _what_does_not_fit(found: Checkpoint, like: Mapping[str, Tensor]) -> str | None:
    """The first tensor that this network does not have, or has in another shape."""
    for part in (found.weights, found.ema):
        for name in sorted(like.keys() ^ part.keys()):
            return f"{name} is in {'the checkpoint' if name in part else 'the network'} alone"
        for name, tensor in part.items():
            if tensor.shape != like[name].shape:
                return f"{name} is {list(tensor.shape)} instead of {list(like[name].shape)}"
    for key in found.optimizer:
        if key.rpartition("/")[0] not in like:
            return f"the optimizer's {key} is in the checkpoint alone"
    return None


def _pickles(folder: Path) -> list[str]:
    """A sentence for each file that is a pickle by its name, in the folder or in one of its checkpoints."""
    if not folder.is_dir():
        return []
    inside = [file for path in list_steps(folder) for file in sorted(path.iterdir())]
    return [
        f"{file.relative_to(folder)} was not opened: it is a pickle, which can run code, and checkpoints are "
        "safetensors and JSON."
        for file in [*sorted(folder.iterdir()), *inside]
        if file.suffix.lower() in PICKLES
    ]


def _is_of_version_1(path: Path) -> bool:
    """Whether this was written before there were checksums: sizes of the files in state.json."""
    try:
        return isinstance(json.loads((path / STATE).read_text(encoding="utf-8"))["files"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        return False


# ------------------------------------------------------------------------------------------------------- the optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, Tensor]:
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
    import torch

    # AdamW keeps its moments beside the parameter, and its step counter there too where a kernel on the device reads it
    counts_on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    # copies, since on the CPU a loaded tensor is a window into its file, which will be deleted in time
    for key, value in tensors.items():
        name, _, state = key.rpartition("/")
        parameter = parameters[name]
        if state == "step" and not counts_on_device:
            optimizer.state[parameter][state] = value.clone()
        elif counts_on_device and value.shape == parameter.shape:
            # the kernel reads weights and moments side by side, so they lie alike: channels last, too
            alike = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
            optimizer.state[parameter][state] = alike.copy_(value)
        else:
            optimizer.state[parameter][state] = value.to(parameter.device, copy=True)
