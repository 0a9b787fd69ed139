"""A training run inside the host: its inputs as a configuration, its progress on the node, its memory and its stop."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.model_management
import torch
from torch import Tensor

from ....training.config.train_config import TrainConfig
from ....training.data.shards import RefinerDataset
from ....training.errors import BadInput
from ....training.run.layout import ADAPTERS, REFINER
from ....training.run.plan import find_device
from ....training.run.report.labels import duration, measure_label, row_label
from ....training.run.run_folder import RunFolder
from ....training.run.train import RunResult, train
from ....training.storage.files import replace
from ....training.storage.plain_json import RepeatedKey, parse_json
from ..collector import without_collector
from ..paths import resolve_inside, run_folder
from ..progress import NodeProgress, interrupted, stop_as_interrupted
from ..wording import for_people
from .choice import GO_ON, START_OVER, start_file

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Trained", "fingerprint", "train_refiner"]


# Fields of the configuration that have an input of their own on the node; two places for one thing would hide one.
_OWN_INPUTS = {
    "dataset": "dataset",
    "run": "run_name",
    "refiner.preset": "preset",
    "epochs": "epochs",
    "data.batch_size": "batch_size",
    "optimizer.learning_rate": "learning_rate",
    "data.crop": "crop",
    "precision": "precision",
    "seed": "seed",
}
_SECONDS_BETWEEN_TEXTS = 1.0
_trained: Counter[str] = Counter()  # how often this process has finished a run of each name; see fingerprint()


@dataclass(frozen=True)
class Trained:
    """What the node hands on: the refiner's path, a report for a person, the loss curve [1, H, W, 3] in [0, 1]."""

    path: str
    report: str
    loss: Tensor
    message: str


# ------------------------------------------------------------------------------------------------- the configuration


def _build_config(
    notes: list[str], *, dataset: str, run_name: str, options: str, **inputs: Any
) -> TrainConfig:
    """The node's inputs and its `options` JSON as one configuration; BadInput names the field.

    A device that this machine lacks gives a note instead: a graph that somebody shared should run here too.
    """
    values = _parse_options(options)
    for field, widget in _OWN_INPUTS.items():
        section, _, name = field.rpartition(".")
        if name in (values.get(section, {}) if section else values):
            raise BadInput(f"options: {field} has an input of its own on the node ({widget}); set it there.")
    if values.get("data", {}).get("workers"):
        raise BadInput("options: data.workers must stay 0 inside ComfyUI; train on the command line to use workers.")
    values["dataset"] = resolve_inside(dataset, "the dataset")
    values["run"] = run_folder(run_name)
    own = str(comfy.model_management.get_torch_device())
    wanted = values.setdefault("device", own)
    if isinstance(wanted, str) and wanted != "auto" and find_device(wanted) is None:
        notes.append(f"The device {wanted!r} of the options is not on this machine: trained on {own} instead.")
        values["device"] = own
    refiner = values.setdefault("refiner", {})
    refiner["preset"] = inputs["preset"]
    if isinstance(refiner.get("start_from"), str):
        refiner["start_from"] = start_file(refiner["start_from"])
    values.setdefault("optimizer", {})["learning_rate"] = inputs["learning_rate"]
    values.setdefault("data", {}).update(batch_size=inputs["batch_size"], crop=inputs["crop"] or None)
    values |= {name: inputs[name] for name in ("epochs", "precision", "seed")}
    return TrainConfig.build(values)


def _parse_options(text: str) -> dict[str, Any]:
    example = 'a JSON object such as {"flow": {"steps": 8}}'
    try:
        values = parse_json(text.strip() or "{}")
    except RepeatedKey as error:
        raise BadInput(f"options: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"options: expected {example}, got text that is not JSON ({error}).") from error
    if not isinstance(values, dict):
        raise BadInput(f"options: expected {example}, got {text.strip()[:80]}.")
    for section in ("refiner", "optimizer", "data"):
        if not isinstance(values.get(section, {}), dict):
            raise BadInput(f"options: {section} must be a JSON object, got {json.dumps(values[section])[:80]}.")
    return values


# ------------------------------------------------------------------------------------------------------------ the run


class _NodeObserver:
    """Shows a run on its node: bar and preview picture, a line with loss and time left, messages in the log."""

    pictures = True

    def __init__(self, progress: NodeProgress) -> None:
        self.progress = progress
        self.messages: list[str] = []
        self._last_text = float("-inf")

    def on_step(self, step: int, total: int, loss: float, eta: float) -> None:
        self.progress.update(step, total)
        now = time.monotonic()
        if now - self._last_text >= _SECONDS_BETWEEN_TEXTS:
            self._last_text = now
            self.progress.text(f"Step {step} of {total}, loss {loss:.3f}, {duration(eta)} left")

    def on_picture(self, picture: Image.Image) -> None:
        self.progress.update(self.progress.value, preview=picture)

    def on_measure(self, done: int, total: int) -> None:
        self.progress.text(f"Measured {done} of {total} pairs")
        self.progress.update(done, total)

    def on_message(self, text: str) -> None:
        self.messages.append(text)
        self.progress.message(text)


@contextmanager
def _room_to_train() -> Iterator[None]:
    """The host's models out of the way, and autograd on: the host runs its nodes in inference mode."""
    management = comfy.model_management
    with without_collector():
        management.unload_all_models()
    management.soft_empty_cache()
    before = getattr(management, "in_training", None)  # newer hosts switch int8 and fused paths off by it
    try:
        if before is not None:
            management.in_training = True
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        if before is not None:
            management.in_training = before
        management.soft_empty_cache()


def train_refiner(node_id: str | None, if_run_exists: str, **inputs: Any) -> Trained:
    """Train as the node's inputs say, or find that this very run is finished.

    Ends as the host's own interruption when the user stops it (within a step; the state is saved before). BadInput
    says what does not fit.
    """
    if if_run_exists not in (GO_ON, START_OVER):
        raise BadInput(f"if_run_exists must be {GO_ON!r} or {START_OVER!r}, got {if_run_exists!r}.")
    notes: list[str] = []
    config = _build_config(notes, **inputs)
    folder = RunFolder(config.run)
    observer = _NodeObserver(NodeProgress(node_id, 1))
    for note in notes:
        observer.on_message(note)
    if _is_finished(folder, config):
        # Also with "start over": the same configuration and data give the same file, and a queue that is run again
        # for something further down the graph must not train for hours each time.
        return _hand_on(train(config, observer), observer)
    aside = folder.move_aside() if if_run_exists == START_OVER else None
    if aside is not None:
        observer.on_message(f"The run that had this name was kept as {aside.name}.")
    try:
        with _room_to_train():
            result = train(config, observer, should_stop=interrupted)
    except BadInput:
        if aside is not None and not folder.path.exists():  # nothing has begun: leave things as they were
            replace(aside, folder.path)
        raise
    if result.status == "stopped":
        stop_as_interrupted()
    _trained[config.run.name] += 1
    return _hand_on(result, observer)


def _is_finished(folder: RunFolder, config: TrainConfig) -> bool:
    """Whether the folder holds this very run, whole."""
    return folder.is_finished() and folder.holds(config, RefinerDataset.open(config.dataset).content_hash)


def _hand_on(result: RunResult, observer: _NodeObserver) -> Trained:
    report = _report_text(result, observer.messages)
    return Trained(str(result.refiner), report, _loss_picture(result.folder), result.message)


def _report_text(result: RunResult, messages: list[str]) -> str:
    """The run in words and one table; report.json in the run's folder has all of it."""
    report = result.report
    lines = [result.message, "", f"Refiner: {result.refiner}", ""]
    lines += [f"- {choice}" for choice in report.get("choices", [])]
    told = {result.message, *report.get("choices", [])}
    lines += [f"- {message}" for message in messages if message not in told]
    evaluation = report.get("evaluation", {})
    measures: dict[str, dict[str, float]] = evaluation.get("measures", {})
    if measures:
        columns = list(next(iter(measures.values())))
        lines += ["", f"Measured on {evaluation['pairs']} {evaluation['on']}:", ""]
        heads = [measure_label(name) for name in columns]
        lines += [_row(["", *heads]), _row(["---", *("---:" for _ in columns)])]  # Markdown, for the preview node
        for name, row in measures.items():
            lines.append(_row([row_label(name), *(f"{row.get(column, float('nan')):.3f}" for column in columns)]))
    losses = evaluation.get("loss_per_sigma", {})
    if losses:
        lines += ["", "Loss at each sigma: " + ", ".join(f"{t} {loss:.3f}" for t, loss in losses.items())]
    return for_people("\n".join(lines))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _loss_picture(folder: Path) -> Tensor:
    """loss.png of a run as an IMAGE; a white dot where somebody deleted it, since the refiner is what counts."""
    import numpy
    from PIL import Image

    try:
        with Image.open(folder / "loss.png", formats=["PNG"]) as picture:
            pixels = numpy.asarray(picture.convert("RGB"), dtype=numpy.float32) / 255
    except OSError:
        pixels = numpy.ones((1, 1, 3), dtype=numpy.float32)
    return torch.from_numpy(pixels)[None]


# ------------------------------------------------------------------------------------- what the host's cache goes by


def fingerprint(run_name: str | None, dataset: str | None, options: str | None = None, **constants: Any) -> str:
    """A text that changes when the node must run again: an input, the run's folder, the dataset's index, or the refiner
    that it goes on from changed.

    So a finished run is found finished when it is queued again, and a deleted file trains again. Linked inputs are
    None here; what they bring is part of the host's own key. The count of finished runs is in it since a run that was
    trained and then deleted, folder and all, would otherwise look as before, and the host's cache would hand out the
    path of nothing.
    """
    seen: list[Any] = [run_name, dataset, options, sorted(constants.items(), key=lambda item: item[0])]
    try:
        if run_name is not None:
            folder = run_folder(run_name)
            seen.append(_trained[folder.name])
            seen += [_content(folder / name) for name in ("config.json", "status.json")]
            seen += [_stamp(folder / name) for name in (REFINER, ADAPTERS, "report.json")]
        if dataset is not None:
            seen.append(_stamp(resolve_inside(dataset, "the dataset") / "index.json"))
        start = _parse_options(options or "").get("refiner", {}).get("start_from")
        if isinstance(start, str):
            seen.append(_stamp(start_file(start)))
        if run_name is not None and (started := _start_of(run_folder(run_name))) is not None:
            seen.append(_stamp(started))  # linked options are None here, so the run itself says where it began
    except BadInput as problem:  # execute will say it
        seen.append(str(problem))
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _start_of(folder: Path) -> Path | None:
    """The refiner that the run in a folder goes on from; None where it has none, or nobody can tell.

    Whoever reaches the host's API can write a config.json there, so its path is looked at as one from a graph would be:
    BadInput where it leads out of the host's folders.
    """
    try:
        start = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))["config"]["refiner"]["start_from"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return resolve_inside(start, "refiner.start_from") if isinstance(start, str) else None


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _stamp(file: Path) -> tuple[int, int] | None:
    """(size, time of change in ns), None for a file that is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
