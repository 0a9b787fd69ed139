"""A run's folder: what is in it, and what a second start with the same name means.

    config.json         the whole configuration, the identity that decides the weights, and the data's hash
    status.json         running | stopped | failed | done, with step and message
    checkpoints/        the newest whole states
    metrics.jsonl       one line a step; tensorboard/ the same
    validation/         pictures in mid-training
    refiner.safetensors, report.json, loss.png, grid.png      at the end
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .config import TrainConfig, differences
from .errors import BadInput, TrainingFailed

REFINER = "refiner.safetensors"


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.refiner = path / REFINER
        self.report = path / "report.json"
        self.checkpoints = path / "checkpoints"

    def status(self) -> dict[str, Any]:
        """The last status written, {} for a folder without one."""
        return _read_json(self.path / "status.json")

    def set_status(self, state: str, step: int, total: int, message: str = "") -> None:
        _write_json(self.path / "status.json", {"state": state, "step": step, "total": total, "message": message})

    def is_finished(self) -> bool:
        return self.status().get("state") == "done" and self.refiner.is_file() and self.report.is_file()

    def claim(self, config: TrainConfig, data_hash: str) -> None:
        """Make the folder this run's own; BadInput where it holds a run of another configuration or other data.

        A finished run whose refiner has been deleted is trained again from the start: its checkpoints go, so that
        nothing goes on silently from trained weights.
        """
        new = {"identity": config.identity(), "data": data_hash}
        stored = _read_json(self.path / "config.json")
        if stored:
            old = {"identity": stored.get("identity", {}), "data": stored.get("data")}
            changed = differences(old["identity"], new["identity"])
            if old["data"] != new["data"]:
                changed.append("the dataset's content")
            if changed:
                raise BadInput(
                    f"Run {self.path.name!r} exists with another configuration ({'; '.join(changed)}): "
                    "give the new run another name, or start over."
                )
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise BadInput(f"Run folder {self.path}: expected an empty folder or a run, found other files in it.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.status().get("state") == "done" and not self.is_finished():
                shutil.rmtree(self.checkpoints, ignore_errors=True)
                (self.path / "metrics.jsonl").unlink(missing_ok=True)
            _write_json(self.path / "config.json", {**new, "config": config.model_dump(mode="json")})
        except OSError as error:
            raise BadInput(f"Run folder {self.path}: cannot be written ({error.strerror}).") from error

    @contextmanager
    def failures_told(self, position: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Keep the sentence of a failure as the status "failed"; a full disk becomes a BadInput with its sentence.

        `position` gives (step, total) at that moment.
        """
        try:
            yield
        except (BadInput, TrainingFailed, OSError) as error:
            sentence = error
            if isinstance(error, OSError):
                reason = error.strerror or error
                sentence = BadInput(f"Run folder {self.path}: writing failed ({reason}); its checkpoints are kept.")
            try:
                self.set_status("failed", *position(), str(sentence))
            except OSError:  # the same full disk; "running" stays there, which is not "done" either
                pass
            if sentence is error:
                raise
            raise sentence from error

    def move_aside(self) -> Path | None:
        """Rename the folder to `<name>.previous-N` for a start over; nothing is lost. None where there was none."""
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.previous-{number}")).exists():
            number += 1
        os.replace(self.path, aside)
        return aside


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(beside, path)
