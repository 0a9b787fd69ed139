"""Stopped, killed and taken up again: the end is the same to the bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training.checkpoint import load_newest
from training.journal import read as read_journal

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
    assert load_newest(stopped.folder / "checkpoints")[0].step == stop_after

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
    from training.refiner.model import Refiner

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

    from training.refiner import flow

    loss = flow.loss_per_sample
    monkeypatch.setattr(flow, "loss_per_sample", lambda *given: loss(*given) * 1e5)  # overflows at the first scale
    changes = {"precision": "fp16", "data__crop": 8, "validation__pictures": 0, "epochs": 1}
    watch(stop_after=2).train(configure(**changes))
    kept = load_newest(configure().run / "checkpoints")[0].state["scaler"]
    assert kept["scale"] < 65536
    restored, load = [], torch.amp.GradScaler.load_state_dict
    monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", lambda self, s: restored.append(s) or load(self, s))
    assert watch().train(configure(**changes)).status == "done"
    assert restored == [kept]


def test_a_damaged_newest_checkpoint_costs_an_epoch_and_not_the_run(configure, watch, whole_run):
    watch(stop_after=10).train(configure())
    newest = configure().run / "checkpoints" / "step-00000010"
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
from training.config import TrainConfig
from training.run import train

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
    assert os.listdir(folder / "checkpoints").count("step-00000004") == 1
    assert not (folder / "checkpoints" / "step-00000008").exists()
    assert steps_on_disk(folder)[-1] == 8

    second = watch()
    result = second.train(configure())
    assert second.steps == list(range(5, 13))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    assert steps_on_disk(folder) == list(range(1, 13))
    assert sorted(os.listdir(folder / "checkpoints")) == ["step-00000008", "step-00000012"]


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
    from training import report

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
