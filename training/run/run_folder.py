"""A run's folder: what is in it, and what a second start with the same name means.

    config.json         the whole configuration, the identity that decides the weights, the data's hash, how it is
                        validated (training/run/cadence.py, CADENCE_VERSION), and the shorter runs that it was made of
    status.json         running | stopped | failed | done, with step and message
    metrics.jsonl       one line a step; tensorboard/ the same
    memory.jsonl        bytes in use, now and then
    validation/         pictures in mid-training
    report.png          the run on one page, when it is done, stopped or failed
    refiner.safetensors, report.json, loss.png, grid.png      at the end; with LoRA lora.safetensors, too
    .checkpoints/       whole states: the newest, and the best
    .lock               held by the process that trains here

The folder lies where ComfyUI looks for models, so what is no finished file is hidden: its Model Library lists nothing
in a folder whose name begins with a dot, and its asset scan hashes nothing there. Such names are kept free for more.
Runs that were begun before have `checkpoints`, which is read as it is, and renamed when the run is claimed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from ..config.identity import differences, without_length
from ..config.sections import OptimizerConfig
from ..config.train_config import TrainConfig
from ..data.loading import is_dead_loader
from ..errors import BadInput, TrainingFailed
from ..objectives.residual.file import load_meta
from ..objectives.residual.lora import load_lora_meta
from ..objectives.sdxl_refiner.file import load_meta as load_sdxl_meta
from ..storage.file_lock import LOCK, hold_lock, release_lock
from ..storage.files import beside_of, replace, write_whole
from ..storage.staged_folder import aside_name
from .cadence import CADENCE_VERSION
from .checkpoints.checkpoint import list_steps
from .layout import ADAPTERS, CHECKPOINTS, EARLIER_CHECKPOINTS, REFINER


class RunFolder:
    def __init__(self, path: Path):
        self.path = path
        self.refiner = path / REFINER
        self.lora = path / ADAPTERS
        self.report = path / "report.json"
        self._lock: IO[bytes] | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the whole states, also of a run that was begun before it was hidden."""
        hidden, earlier = self.path / CHECKPOINTS, self.path / EARLIER_CHECKPOINTS
        return earlier if earlier.is_dir() and not hidden.exists() else hidden

    def status(self) -> dict[str, Any]:
        """The last status written, {} for a folder without one."""
        return _read_json(self.path / "status.json")

    def set_status(self, state: str, step: int, total: int, message: str = "") -> None:
        _write_json(self.path / "status.json", {"state": state, "step": step, "total": total, "message": message})

    def is_finished(self) -> bool:
        """Whether the run was done, at its present length, and what it gave is still whole."""
        status, earlier = self.status(), self._earlier()
        done = status.get("state") == "done" and not (earlier and earlier[-1]["steps"] == status.get("step"))
        return done and self._has_refiner() and bool(_read_json(self.report))

    def holds(self, config: TrainConfig, data_hash: str) -> bool:
        """Whether the run in the folder, finished or not, is this very one."""
        stored = self._stored()
        return bool(stored) and not _changes(stored, this_run(self.as_begun(config), data_hash))

    def as_begun(self, config: TrainConfig) -> TrainConfig:
        """The configuration, with what it leaves open as the run that the folder holds was begun with."""
        stored = self._stored()
        config = config.as_begun(stored.get("identity"))
        if config.validation.every == 0 and stored and stored.get("looks", 1) < CADENCE_VERSION and self._has_learned():
            config = config.model_copy(update={"validation": config.validation.model_copy(update={"every": "epoch"})})
        return config

    def extended(self, config: TrainConfig, total_steps: int) -> TrainConfig:
        """The configuration, with the lengths that the run had before where the folder holds it finished and shorter.

        total_steps: of the run that is asked for. The same configuration where the rate does not depend on the length,
        where optimizer.extension refuses, and where the folder holds something else; `claim` then decides.
        """
        identity = self._stored().get("identity")
        if config.optimizer.extended_from or not (self.is_finished() and isinstance(identity, dict)):
            return config
        before = self._steps()
        lengths = _lengths_before(config.optimizer, identity, before)
        same = lengths and without_length(identity) == without_length(config.identity())
        if total_steps <= before or not same:
            return config
        return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"extended_from": lengths})})

    def earlier(self) -> list[dict[str, Any]]:
        """The shorter runs that the folder's run was made of, as `this_run` has them: their checkpoints are its own."""
        return [{"identity": each["identity"], "data": each["data"]} for each in self._earlier()]

    def claim(self, config: TrainConfig, data_hash: str, total_steps: int = 0) -> None:
        """Make the folder this run's own until `release`. A finished run becomes one of `total_steps` where they are
        more and nothing but its length differs; what it gave stays until the longer one is done.

        BadInput where another process trains in it, or where it holds a run of another configuration or other data of
        which something was learned. A finished run whose refiner has been deleted or damaged is trained again from the
        start: its checkpoints go, so that nothing goes on silently from trained weights.
        """
        new, stored = this_run(config, data_hash), self._stored()
        ours = {LOCK, beside_of(self.path / "config.json").name}  # a kill while a run begins leaves no more than these
        others = [file for file in self.path.iterdir() if file.name not in ours] if self.path.is_dir() else []
        if others and not stored:
            if (self.path / "config.json").exists():
                raise BadInput(
                    f"Run folder {self.path}: its config.json is empty or damaged, so which run this is cannot be "
                    "told: put the file back, or give the new run another name."
                )
            raise BadInput(f"Run folder {self.path}: expected an empty folder or a run, found other files in it.")
        changed = _changes(stored, new) if stored else []
        if not changed and self.is_finished():
            # nothing must be written: what is finished can be used from a folder that can only be read, too
            if (self.path / EARLIER_CHECKPOINTS).is_dir():
                with suppress(OSError, BadInput):
                    self._hold()
                    self._hide_checkpoints()
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
            self._hide_checkpoints()
            earlier, longer = self._earlier(), bool(changed) and self._is_made_longer(stored, config, new, total_steps)
            if longer:
                earlier.append({name: stored[name] for name in new} | {"steps": self._steps()})
            elif changed and self._has_learned():
                raise BadInput(
                    f"Run {self.path.name!r} exists with another configuration ({'; '.join(changed)}): "
                    f"give the new run another name, or set if_run_exists to start over{self._or_extend(stored, new)}."
                )
            elif changed:
                earlier = []
            if self.status().get("state") == "done" and not self._has_refiner():
                shutil.rmtree(self.checkpoints, ignore_errors=True)
                (self.path / "metrics.jsonl").unlink(missing_ok=True)
            looks = stored.get("looks", 1) if stored and self._has_learned() else CADENCE_VERSION
            added = {"looks": looks, **({"earlier": earlier} if earlier else {})}
            _write_json(self.path / "config.json", {**new, **added, "config": config.model_dump(mode="json")})
        except OSError as error:
            raise BadInput(f"Run folder {self.path}: cannot be written ({error.strerror}).") from error

    def release(self) -> None:
        """Let another process train here. Safe to call twice."""
        if self._lock is not None:
            release_lock(self._lock)
            self._lock = None

    def _stored(self) -> dict[str, Any]:
        """config.json; {} where there is none."""
        return _read_json(self.path / "config.json")

    def _steps(self) -> int:
        """Those of the run when its status was last written."""
        steps = self.status().get("step")
        return steps if isinstance(steps, int) else 0

    def _earlier(self) -> list[dict[str, Any]]:
        """{"identity", "data", "steps"} of each shorter run that the run was made of, the shortest first."""
        earlier = self._stored().get("earlier")
        kept = earlier if isinstance(earlier, list) else []
        return [each for each in kept if isinstance(each, dict) and {"identity", "data", "steps"} <= each.keys()]

    def _is_made_longer(
        self, stored: dict[str, Any], config: TrainConfig, new: dict[str, Any], total_steps: int
    ) -> bool:
        """Whether the folder's run is finished, and `new` is the same run but for a greater length."""
        if not (self.is_finished() and _differ_in_length_alone(stored, new)):
            return False
        before, options, theirs = self._steps(), config.optimizer, stored["identity"]["optimizer"]
        if theirs.get("extended_from") and theirs.get("extension") != options.extension:
            return False  # the rate of what was added first would be told wrongly
        if options.depends_on_length and options.extension == "refuse":
            return False
        return total_steps > before and options.extended_from == _lengths_before(options, stored["identity"], before)

    def _or_extend(self, stored: dict[str, Any], new: dict[str, Any]) -> str:
        """How the run could be made longer, where that is all that is asked for."""
        if not (self.is_finished() and _differ_in_length_alone(stored, new)):
            return ""
        if "extended_from" in new["identity"]["optimizer"] or "extended_from" in stored["identity"]["optimizer"]:
            return ""
        return (
            '; a finished run is made longer with optimizer.extension "constant" (the learning rate stays at its last '
            'value) or "stretch" (it goes on as that of a run of the whole length)'
        )

    def _hold(self) -> None:
        """Take the folder's lock, which ends with this process at the latest; BadInput where another one has it."""
        if self._lock is None:
            self._lock = hold_lock(self.path / LOCK)
        if self._lock is None:
            raise BadInput(
                f"Run {self.path.name!r} is being trained by another process: wait for it, or give the new run "
                "another name."
            )

    def _hide_checkpoints(self) -> None:
        """Rename the folder of an earlier version; what both have is the same state of the same run."""
        hidden, earlier = self.path / CHECKPOINTS, self.path / EARLIER_CHECKPOINTS
        if not earlier.is_dir():
            return
        if not hidden.exists():
            replace(earlier, hidden)
            return
        for folder in earlier.iterdir():
            if not (hidden / folder.name).exists():
                replace(folder, hidden / folder.name)
        shutil.rmtree(earlier)

    def _has_refiner(self) -> bool:
        """Whether refiner.safetensors, and a LoRA run's adapters, are there and whole (a header covers its file)."""
        for load in (load_meta, load_sdxl_meta):
            with suppress(BadInput, OSError):
                made = load(self.refiner)
                if "trainable_parameters" in made.training:
                    load_lora_meta(self.lora)
                return True
        return False

    def _has_learned(self) -> bool:
        """Whether anything would be lost if another configuration took the folder."""
        return self.status().get("state") == "done" or self.refiner.exists() or bool(list_steps(self.checkpoints))

    @contextmanager
    def failures_told(
        self, position: Callable[[], tuple[int, int]], tell: Callable[[str], None] = lambda sentence: None
    ) -> Iterator[None]:
        """Keep the sentence of a failure as the status "failed"; a full disk and a full memory become a BadInput.

        `position` gives (step, total) at that moment; `tell` gets the sentence, and must not raise.
        """
        try:
            yield
        except Exception as error:
            sentence = error
            if isinstance(error, OSError):
                sentence = BadInput(self._failed_with(error))
            elif is_dead_loader(error):
                sentence = TrainingFailed(
                    f"A loader process was ended from outside, most often as the memory ran out ({error}): take fewer "
                    "data.workers; the run's checkpoints are kept."
                )
            elif _is_out_of_memory(error):
                sentence = BadInput(
                    "The memory is not enough to train this network on these batches: take a smaller batch_size (with "
                    "data.accumulation), a crop, bf16 or a smaller network."
                )
            elif "CUBLAS_WORKSPACE_CONFIG" in str(error):
                sentence = BadInput(
                    "deterministic: this process has multiplied matrices on the GPU before, and torch looks but once "
                    "at whether cuBLAS may be deterministic: start ComfyUI with --deterministic, or train by the "
                    "command line."
                )
            said = str(sentence) or type(error).__name__
            with suppress(OSError):  # the same full disk; "running" stays there, which is not "done" either
                self.set_status("failed", *position(), said)
            tell(said)
            if sentence is error:
                raise
            raise sentence from error

    def _failed_with(self, error: OSError) -> str:
        """Which file could not be used, and why: one of the run's own, or another."""
        reason, file = error.strerror or error, error.filename
        if isinstance(file, (str, bytes)):
            path = Path(os.fsdecode(file))
            if not path.is_relative_to(self.path):
                return f"{path} could not be read or written ({reason}); the run's checkpoints are kept."
            return f"Run folder {self.path}: writing {path.name} failed ({reason}); its checkpoints are kept."
        return f"Run folder {self.path}: writing failed ({reason}); its checkpoints are kept."

    def move_aside(self) -> Path | None:
        """Rename the folder to `<name>.previous-N` for a start over; nothing is lost. None where there was none."""
        if not self.path.exists():
            return None
        aside = aside_name(self.path)
        try:
            self._hold()
            self._hide_checkpoints()
            self.release()  # Windows renames no folder that has an open file
            replace(self.path, aside)
        except OSError as error:
            raise BadInput(f"Run folder {self.path}: cannot be kept as {aside.name} ({error.strerror}).") from error
        return aside


def this_run(config: TrainConfig, data_hash: str) -> dict[str, Any]:
    """What decides the trained weights, as config.json keeps it."""
    return {"identity": config.identity(), "data": data_hash}


def _lengths_before(options: OptimizerConfig, identity: dict[str, Any], before: int) -> tuple[int, ...]:
    """optimizer.extended_from of a run of `identity` that was finished after `before` steps and is made longer."""
    theirs = identity.get("optimizer")
    if not options.depends_on_length or options.extension == "refuse" or not isinstance(theirs, dict):
        return ()
    lengths = theirs.get("extended_from") or ()
    return tuple(lengths) if lengths and options.extension == "constant" else (*lengths, before)


def _differ_in_length_alone(stored: dict[str, Any], new: dict[str, Any]) -> bool:
    identity = stored.get("identity")
    if not isinstance(identity, dict) or not isinstance(identity.get("optimizer"), dict):
        return False
    return without_length(identity) == without_length(new["identity"]) and stored.get("data") == new["data"]


def _changes(stored: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What sets a run apart from the one that the folder holds, field by field."""
    identity = stored.get("identity")
    changed = differences(identity if isinstance(identity, dict) else {}, new["identity"])
    return changed if stored.get("data") == new["data"] else [*changed, "the dataset's content"]


def _is_out_of_memory(error: Exception) -> bool:
    # By this name torch has it from 2.0 on, by that of torch.OutOfMemoryError from 2.5 on. On a CPU it has none.
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=1, sort_keys=True) + "\n")
