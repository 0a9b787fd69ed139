"""A refiner file from a checkpoint: the step of the best validation loss, or what a stopped run has got so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.train_config import TrainConfig
from ...errors import BadInput
from ..report.journal import lowest
from ..report.journal import read as read_journal
from ..run_folder import RunFolder, this_run
from .checkpoint import list_steps, load_newest, load_step, step_of

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["export_checkpoint"]


def export_checkpoint(
    run: Path,
    which: str,
    out: Path,
    *,
    dataset: Path | None = None,
    start_from: Path | None = None,
    force: bool = False,
) -> list[str]:
    """Write the averaged weights of a checkpoint in `run` as a refiner file; returns what a person should know.

    which: best (lowest validation loss), last (the newest that is whole) or a step. dataset, start_from: where the
    run's dataset is now, and the refiner that it went on from, if they were moved. BadInput where a checkpoint is
    missing or damaged, and where `out` is there already and `force` is not given.
    """
    import torch

    from ...data.shards import RefinerDataset
    from ...objectives.base import Compute
    from ...objectives.choose import choose_objective, plan_objective

    if out.suffix != ".safetensors":
        raise BadInput(f"--out: expected a file name that ends in .safetensors, got {out.name!r}.")
    if not out.parent.is_dir():
        raise BadInput(f"--out: expected a folder that exists, found none at {out.parent}.")
    if out.exists() and not force:
        raise BadInput(f"--out: {out} is there already: give another name, or --force to replace it.")
    folder = RunFolder(run)
    config, data_hash = _read_config(run)
    if start_from is not None:  # what is in it is compared with the checkpoint
        config = config.model_copy(update={"refiner": config.refiner.model_copy(update={"start_from": start_from})})
    found, said = _choose(folder, which, config, data_hash)
    place = dataset or config.dataset
    data = RefinerDataset.open(place)
    if data.content_hash != data_hash:
        raise BadInput(f"--dataset: expected the dataset that this run was trained on, found another one at {place}.")
    compute = Compute(torch.device("cpu"), None, torch.float32)
    objective = choose_objective(config, plan_objective(config, data, []), data, compute)
    objective.save(out, found.ema, steps=found.step)
    return [*said, f"Exported the averaged weights of step {found.step} to {out}."]


def _read_config(run: Path) -> tuple[TrainConfig, str]:
    try:
        stored = json.loads((run / "config.json").read_text(encoding="utf-8-sig"))
        return TrainConfig.build(stored["config"]), stored["data"]
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--run: expected the folder of a run, found no config.json to read in {run}.") from error


def _choose(folder: RunFolder, which: str, config: TrainConfig, data_hash: str) -> tuple[Checkpoint, list[str]]:
    run, earlier = this_run(config, data_hash), folder.earlier()
    steps = {step_of(path): path for path in list_steps(folder.checkpoints)}
    if not steps:
        raise BadInput(f"--run: expected checkpoints in {folder.checkpoints}, found none.")
    if which == "last":
        found, passed_over = load_newest(folder.checkpoints, run, parts=("ema",), earlier=earlier)
        if found is None:
            raise BadInput(f"--checkpoint: none of {folder.path.name!r} can be used: {' '.join(passed_over)}")
        return found, passed_over
    said = []
    there = f"{', '.join(map(str, steps))} {'are' if len(steps) > 1 else 'is'} there"
    if which == "best":
        best = lowest(read_journal(folder.path / "metrics.jsonl"), "validation/loss")
        if best is None:
            raise BadInput(f"--checkpoint best: this run was never validated; take last, or a step ({there}).")
        step, loss = best
        if step not in steps:
            raise BadInput(
                f"--checkpoint best: the lowest validation loss was at step {step}, of which no checkpoint was kept; "
                f"take last, or a step ({there})."
            )
        said.append(f"The lowest validation loss, {loss:.4g}, was at step {step}.")
    elif not which.isdecimal():
        raise BadInput(f"--checkpoint: expected best, last or a step, got {which!r}.")
    else:
        step = int(which)
        if step not in steps:
            raise BadInput(f"--checkpoint: there is none of step {step}; {there}.")
    return load_step(steps[step], run, parts=("ema",), earlier=earlier), said
