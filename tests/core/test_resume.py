"""Stopped, killed and taken up again: the end is the same to the bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from training.config.choices import Precision
from training.errors import BadInput
from training.run.checkpoints.checkpoint import load_newest
from training.run.report.journal import read as read_journal
from training.storage.checksums import write_checksums

ROOT = Path(__file__).resolve().parents[2]


def status(folder):
    return json.loads((folder / "status.json").read_text())


def steps_on_disk(folder):
    return [line["step"] for line in read_journal(folder / "metrics.jsonl") if "learning_rate" in line]


@pytest.mark.parametrize("stop_after", [1, 5, 8])
def test_a_stopped_run_goes_on_to_the_same_bytes(configure, watch, whole_run, stop_after):
    first = watch(stop_after=stop_after)
    stopped = first.train(configure())
    assert stopped.status == "stopped" and first.steps == list(range(1, stop_after + 1))  # not one step more
    assert not stopped.refiner.exists() and status(stopped.folder)["state"] == "stopped"
    assert f"step {stop_after} of 12" in stopped.message and first.messages[-1] == stopped.message
    assert load_newest(stopped.folder / ".checkpoints")[0].step == stop_after

    second = watch()
    result = second.train(configure())
    assert result.status == "done" and second.steps == list(range(stop_after + 1, 13))
    assert any(f"Resumed at step {stop_after} of 12" in text for text in second.messages)
    assert first.losses + second.losses == whole_run[1].losses
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    assert steps_on_disk(result.folder) == list(range(1, 13))
    assert result.report["training"]["steps_in_this_session"] == 12 - stop_after


def test_a_run_stopped_before_its_first_step_starts_like_any_other(configure, watch, whole_run):
    assert watch(stop_after=0).train(configure()).status == "stopped"
    result = watch().train(configure())
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_a_run_can_be_stopped_after_every_single_step(configure, watch, whole_run):
    for _ in range(12):
        assert watch(stop_after=1).train(configure(validation__pictures=0)).status in ("stopped", "done")
    result = watch().train(configure(validation__pictures=0))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_a_stop_during_validation_comes_before_the_next_pair(configure, watch, monkeypatch, build_pairs):
    from training.objectives.residual.model import Refiner

    walked, refine = [], Refiner.refine
    monkeypatch.setattr(Refiner, "refine", lambda self, *given: walked.append(0) or refine(self, *given))

    class Impatient(watch):
        def should_stop(self):
            return len(walked) >= 1

    watcher = Impatient()
    result = watcher.train(
        configure(dataset=build_pairs(held_out=2), validation__every=2, validation__pictures=2)
    )
    assert result.status == "stopped" and watcher.steps == [1, 2] and len(walked) == 1


def history(folder):
    """All that is told of a run and is no time: losses, rates, norms, and where it was validated with what result."""
    return read_journal(folder / "metrics.jsonl")


def last_state(folder):
    """The bytes of the newest checkpoint's tensors, and what its state says of the position."""
    path = sorted((folder / ".checkpoints").glob("step-*"))[-1]
    state = json.loads((path / "state.json").read_text())
    told = {name: state[name] for name in ("step", "epoch", "sampler", "schedule", "random", "journal", "scaler")}
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}, told


@pytest.mark.parametrize("precision", get_args(Precision))
def test_ten_steps_and_fifteen_and_five_are_thirty(configure, watch, tmp_path, build_pairs, precision):
    """With two loader processes, epochs of two and a half steps, and validations before and after the stops."""
    changes = {
        "precision": precision, "dataset": build_pairs(pairs=6, held_out=1), "epochs": 12, "flow__steps": 2,
        "data__workers": 2, "data__crop": 8, "data__batch_size": 1, "data__accumulation": 2,
        "validation__every": 4, "validation__crop": 8, "keep_checkpoints": 1, "keep_best": False,
    }
    whole = watch()
    finished = whole.train(configure(run=tmp_path / "whole", **changes))
    assert finished.status == "done" and whole.steps == list(range(1, 31))

    losses = []
    for part, (first, last) in enumerate(((1, 10), (11, 25), (26, 30))):
        torch.manual_seed(part)  # whatever the process drew before
        watcher = watch(stop_after=last - first + 1 if last < 30 else None)
        result = watcher.train(configure(**changes))
        assert watcher.steps == list(range(first, last + 1)) and result.status == ("stopped" if last < 30 else "done")
        losses += watcher.losses
    assert losses == whole.losses
    assert result.refiner.read_bytes() == finished.refiner.read_bytes()
    tensors, told = last_state(result.folder)
    assert (tensors, told) == last_state(finished.folder)
    assert len(tensors) == 3 and told["step"] == 30 and told["sampler"] == {"micro_step": 60} and told["epoch"] == 12
    assert history(result.folder) == history(finished.folder)
    validated = [line["step"] for line in history(result.folder) if "validation/loss" in line]
    assert validated == [4, 8, 12, 16, 20, 24, 28]


def test_nothing_in_a_run_draws_from_the_generators_of_torch(configure, watch, whole_run):
    """So that there is no state of them to keep: moved at every step, they change nothing, and are not moved."""

    class Restless(watch):
        def on_step(self, step, *given):
            super().on_step(step, *given)
            assert step == 1 or torch.equal(torch.get_rng_state(), self.left)
            torch.rand(step)
            self.left = torch.get_rng_state()

    result = Restless().train(configure())
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"sampler": {"micro_step": 99}}, "goes on with batch 99, and this version of the program with 5"),
        ({"schedule": {"learning_rate": 0.5}}, "goes on with learning rate 0.5, and this version of the program with"),
    ],
)
def test_a_checkpoint_from_which_this_program_would_go_on_otherwise_is_refused(configure, watch, change, said):
    watch(stop_after=5).train(configure())
    rewrite_state(configure().run, 5, change)
    with pytest.raises(BadInput, match=f"The checkpoint of step 5 {said}"):
        watch().train(configure())
    assert load_newest(configure().run / ".checkpoints")[0].step == 5


def rewrite_state(folder, step, change):
    path = folder / ".checkpoints" / f"step-{step:08d}"
    (path / "state.json").write_text(json.dumps({**json.loads((path / "state.json").read_text()), **change}))
    (path / "SHA256SUMS").unlink()
    write_checksums(path)


def test_other_conditions_are_told_and_not_called_equal(configure, watch):
    watch(stop_after=5).train(configure())
    made = load_newest(configure().run / ".checkpoints")[0].state["made_with"]
    rewrite_state(configure().run, 5, {"made_with": {**made, "torch": "1.0", "threads": 7}})
    second = watch(stop_after=1)
    second.train(configure())
    assert (
        "Resumed at step 5 of 12; under other conditions (threads 7 -> 1, torch 1.0 -> "
        f"{torch.__version__}), so its last bits may differ from an uninterrupted run's."
    ) in second.messages


def test_a_history_with_a_gap_is_told(configure, watch, whole_run):
    watch(stop_after=5).train(configure())
    metrics = configure().run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    second = watch()
    result = second.train(configure())
    # five steps and the validation at the fourth
    said = "metrics.jsonl lacks 4 of the 6 lines up to this step: the curves of this run will have a gap."
    assert said in second.messages
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


@pytest.mark.parametrize("keep_best", [True, False])
def test_the_checkpoint_of_the_lowest_validation_loss_is_kept(configure, watch, monkeypatch, keep_best):
    """Also where it was validated between two checkpoints; the validation losses are made to rise after step 3."""
    from training.run.report.journal import Journal

    write = Journal.write

    def rising(self, step, **values):
        write(self, step, **{name: abs(step - 3) if name == "validation/loss" else v for name, v in values.items()})

    monkeypatch.setattr(Journal, "write", rising)
    config = configure(validation__every=3, keep_checkpoints=1, keep_best=keep_best)
    watch(stop_after=7).train(config)
    assert watch().train(config).status == "done"
    kept = ["step-00000003", "step-00000012"] if keep_best else ["step-00000012"]
    assert sorted(os.listdir(config.run / ".checkpoints")) == kept


def test_loader_workers_change_nothing(configure, watch, whole_run):
    with_workers = configure(data__workers=2, validation__pictures=0)
    assert watch(stop_after=5).train(with_workers).status == "stopped"
    result = watch().train(with_workers)
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_validation_changes_nothing(configure, watch, whole_run):
    result = watch().train(configure(validation__every=5, validation__pictures=1, validation__crop=12))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"data__accumulation": 3}, {"precision": "bf16"}, {"data__crop": 12}, {"precision": "pure_bf16"},
        {"precision": "pure_bf16", "optimizer__rounding": "kahan", "optimizer__moments": "bf16"},
    ],
)
def test_other_ways_to_train_resume_exactly_too(configure, watch, tmp_path, changes):
    changes |= {"validation__pictures": 0, "epochs": 2}
    whole = watch().train(configure(run=tmp_path / "whole", **changes))
    assert watch(stop_after=2).train(configure(**changes)).status == "stopped"
    assert watch().train(configure(**changes)).refiner.read_bytes() == whole.refiner.read_bytes()


def test_the_loss_scale_of_fp16_is_resumed(configure, watch, monkeypatch):
    import torch

    from training.objectives.residual import flow

    loss = flow.loss_per_sample
    monkeypatch.setattr(flow, "loss_per_sample", lambda *given: loss(*given) * 10)  # overflows at the first scale
    changes = {"precision": "fp16", "data__crop": 8, "validation__pictures": 0, "epochs": 1}
    watch(stop_after=2).train(configure(**changes))
    kept = load_newest(configure().run / ".checkpoints")[0].state["scaler"]
    assert kept["scale"] < 65536
    restored, load = [], torch.amp.GradScaler.load_state_dict
    monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", lambda self, s: restored.append(s) or load(self, s))
    assert watch().train(configure(**changes)).status == "done"
    assert restored == [kept]


def test_a_damaged_newest_checkpoint_costs_an_epoch_and_not_the_run(configure, watch, whole_run):
    watch(stop_after=10).train(configure())
    newest = configure().run / ".checkpoints" / "step-00000010"
    (newest / "weights.safetensors").write_bytes(b"")
    second = watch()
    result = second.train(configure())
    assert second.steps == [9, 10, 11, 12]
    assert any("step-00000010 passed over" in text for text in second.messages)
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    assert steps_on_disk(result.folder) == list(range(1, 13))


KILLED_IN_A_CHECKPOINT = """
import os, signal, sys
sys.path.append(sys.argv[1])
from training.config.train_config import TrainConfig
from training.run.train import train

replace = os.replace
def kill(source, target):
    if str(target).endswith("step-00000008"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = kill
train(TrainConfig.parse(sys.argv[2]))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_a_run_killed_while_it_saves_goes_on_to_the_same_bytes(configure, watch, whole_run, environment):
    command = [sys.executable, "-c", KILLED_IN_A_CHECKPOINT, str(ROOT), configure().to_json()]
    assert subprocess.run(command, capture_output=True, env=environment).returncode == -signal.SIGKILL
    folder = configure().run
    assert os.listdir(folder / ".checkpoints").count("step-00000004") == 1
    assert not (folder / ".checkpoints" / "step-00000008").exists()
    assert steps_on_disk(folder)[-1] == 8

    second = watch()
    result = second.train(configure())
    assert second.steps == list(range(5, 13))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    assert steps_on_disk(folder) == list(range(1, 13))
    # as after the run that was not killed: the newest two, and the best one
    kept = sorted(os.listdir(folder / ".checkpoints"))
    assert kept[-2:] == ["step-00000008", "step-00000012"]
    assert kept == sorted(os.listdir(whole_run[0].folder / ".checkpoints"))


def test_a_stop_while_the_result_is_measured_is_heard_and_made_up_for(configure, watch, whole_run):
    class Impatient(watch):
        def should_stop(self):
            return any("Measuring" in text for text in self.messages)

    stopped = Impatient().train(configure())
    assert stopped.status == "stopped" and status(stopped.folder)["state"] == "stopped"
    assert not (stopped.folder / "report.json").exists()
    second = watch()
    result = second.train(configure())
    assert result.status == "done" and second.steps == []
    assert result.report["evaluation"]["pairs"] == 1
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_a_run_killed_before_its_report_is_not_taken_for_finished(configure, watch, whole_run, monkeypatch):
    from training.run.report import report

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(report, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            watch().train(configure())
    second = watch()
    result = second.train(configure())
    assert result.status == "done" and second.steps == []  # it was trained: only the report was missing
    assert result.report["training"]["steps"] == 12
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
