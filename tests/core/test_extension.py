"""A finished run that is made longer: it goes on from its own state, at the rate that was asked for."""

import json
import shutil

import pytest
import torch

from training.__main__ import main
from training.config.train_config import TrainConfig
from training.errors import BadInput
from training.objectives.residual.file import load_meta, load_refiner
from training.run.checkpoints.checkpoint import list_steps
from training.run.report.journal import read as read_journal
from training.run.run_folder import RunFolder

LOW = {"precision": "pure_bf16", "optimizer__rounding": "kahan"}


def rates(folder):
    return [line["learning_rate"] for line in read_journal(folder / "metrics.jsonl") if "learning_rate" in line]


@pytest.mark.parametrize(
    "precision, longer", [({}, {"epochs": 3}), (LOW, {"max_steps": 12})], ids=["fp32", "pure_bf16"]
)
def test_at_a_constant_rate_it_ends_with_the_bytes_of_a_run_that_was_this_long_from_the_start(
    configure, watch, tmp_path, precision, longer
):
    settings = {"optimizer__schedule": "constant", **precision}
    short = {name: value // 3 for name, value in longer.items()}
    first = watch().train(configure(**settings, **short))
    watcher = watch()
    result = watcher.train(configure(**settings, **longer))
    assert first.status == result.status == "done" and watcher.steps == list(range(5, 13))
    assert any("Resumed at step 4 of 12" in text for text in watcher.messages)
    whole = watch().train(configure(run=tmp_path / "whole", **settings, **longer))
    for name in ("refiner.safetensors", "metrics.jsonl"):
        assert (result.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert watch().train(configure(**settings, **longer)).status == "reused"


def test_by_epochs_and_then_by_steps_is_the_same_run_made_longer(configure, watch):
    settings = {"optimizer__schedule": "constant"}
    watch().train(configure(epochs=1, **settings))
    watcher = watch()
    watcher.train(configure(max_steps=6, **settings))
    assert watcher.steps == [5, 6]


@pytest.mark.parametrize(
    "schedule, precision, extension",
    [("cosine", {}, "stretch"), ("cosine", LOW, "stretch"), ("linear", {}, "constant"), ("cosine", LOW, "constant")],
    ids=["cosine, stretched", "cosine in pure_bf16, stretched", "linear, then constant", "pure_bf16, then constant"],
)
def test_a_falling_rate_goes_on_as_asked_and_says_so(configure, watch, tmp_path, schedule, precision, extension):
    settings = {"optimizer__schedule": schedule, "optimizer__floor": 0.1, **precision}
    first = watch().train(configure(epochs=2, **settings))
    before = rates(first.folder)
    longer = {**settings, "epochs": 3, "optimizer__extension": extension}
    watcher = watch()
    result = watcher.train(configure(**longer))
    assert watcher.steps == [9, 10, 11, 12] and rates(result.folder)[:8] == before
    after = rates(result.folder)[8:]
    if extension == "constant":
        assert after == [before[-1]] * 4
    else:
        whole = watch().train(configure(run=tmp_path / "whole", epochs=3, **settings))
        assert after == rates(whole.folder)[8:] and after[0] > before[-1]
    (said,) = [choice for choice in result.report["choices"] if "finished after 8 steps is made longer" in choice]
    assert ("its last rate" in said) == (extension == "constant")
    # the identity says it: a run of that identity from the start has the same bytes
    told = configure(run=tmp_path / "told", **longer, optimizer__extended_from=[8])
    assert load_meta(result.refiner).training["config"]["optimizer"]["extended_from"] == [8]
    assert watch().train(told).refiner.read_bytes() == result.refiner.read_bytes()
    assert watch().train(configure(**longer)).status == "reused"


@pytest.mark.parametrize("extension", ["constant", "stretch"])
def test_an_extension_that_is_stopped_goes_on_and_can_be_made_longer_again(configure, watch, tmp_path, extension):
    settings = {"optimizer__extension": extension}
    watch().train(configure(epochs=1, **settings))
    assert watch(stop_after=2).train(configure(epochs=2, **settings)).status == "stopped"
    # config.json of the run's folder, and the configuration without the word, both mean this run
    kept = json.loads((configure().run / "config.json").read_text())["config"]
    assert watch(stop_after=1).train(TrainConfig.build(kept)).status == "stopped"
    watcher = watch()
    watcher.train(configure(epochs=2))
    assert watcher.steps == [8]
    result = watch().train(configure(epochs=3, **settings))
    lengths = [4] if extension == "constant" else [4, 8]
    assert load_meta(result.refiner).training["config"]["optimizer"]["extended_from"] == lengths
    told = configure(run=tmp_path / "told", epochs=3, **settings, optimizer__extended_from=lengths)
    assert watch().train(told).refiner.read_bytes() == result.refiner.read_bytes()


def test_the_refiner_of_the_shorter_run_stays_until_the_longer_one_is_done(configure, watch):
    first = watch().train(configure(epochs=1, optimizer__schedule="constant"))
    data = first.refiner.read_bytes()
    stopped = watch(stop_after=2).train(configure(epochs=2, optimizer__schedule="constant"))
    assert stopped.refiner.read_bytes() == data and not RunFolder(first.folder).is_finished()
    done = watch().train(configure(epochs=2, optimizer__schedule="constant"))
    assert done.refiner.read_bytes() != data and RunFolder(first.folder).is_finished()


def test_a_kill_as_the_extension_begins_leaves_a_run_that_goes_on(configure, watch):
    """config.json says the new length, and nothing else was written."""
    config = configure(epochs=2, optimizer__schedule="constant")
    watch().train(configure(epochs=1, optimizer__schedule="constant"))
    folder = RunFolder(config.run)
    folder.claim(config, json.loads((config.run / "config.json").read_text())["data"], 8)
    folder.release()
    assert folder.status()["state"] == "done" and not folder.is_finished()
    watcher = watch()
    assert watcher.train(config).status == "done" and watcher.steps == [5, 6, 7, 8]


def test_without_checkpoints_it_is_trained_from_the_start_to_the_same_bytes(configure, watch):
    settings = {"optimizer__extension": "stretch"}
    watch().train(configure(epochs=1, **settings))
    first = watch().train(configure(epochs=2, **settings))
    data = first.refiner.read_bytes()
    first.refiner.unlink()
    shutil.rmtree(first.folder / ".checkpoints")
    watcher = watch()
    assert watcher.train(configure(epochs=2, **settings)).refiner.read_bytes() == data
    assert watcher.steps == list(range(1, 9))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"epochs": 3}, r"epochs 2 -> 3\).*made longer with optimizer.extension \"constant\" .* or \"stretch\""),
        ({"epochs": 1, "optimizer__extension": "stretch"}, r"epochs 2 -> 1\): give the new run another name"),
        ({"epochs": 3, "optimizer__extension": "stretch", "seed": 1}, r"seed 0 -> 1"),
    ],
)
def test_what_is_no_extension_is_refused_and_nothing_changes(configure, watch, change, said):
    first = watch().train(configure(epochs=2))
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match=said) as caught:
        watch().train(configure(**change))
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == before


def test_a_run_that_is_not_finished_is_not_made_longer(configure, watch):
    watch(stop_after=3).train(configure(epochs=2, optimizer__schedule="constant"))
    with pytest.raises(BadInput, match="epochs 2 -> 3"):
        watch().train(configure(epochs=3, optimizer__schedule="constant"))


def test_other_data_are_no_extension(configure, watch, build_pairs):
    watch().train(configure(epochs=1, optimizer__schedule="constant"))
    with pytest.raises(BadInput, match="the dataset's content"):
        watch().train(configure(epochs=2, optimizer__schedule="constant", dataset=build_pairs(pairs=10)))


def test_another_way_to_go_on_is_refused_the_second_time(configure, watch):
    watch().train(configure(epochs=1))
    watch().train(configure(epochs=2, optimizer__extension="constant"))
    with pytest.raises(BadInput, match="optimizer.extension 'constant' -> 'stretch'"):
        watch().train(configure(epochs=3, optimizer__extension="stretch"))


def test_lengths_that_the_run_does_not_reach_are_refused(configure, watch):
    with pytest.raises(BadInput, match=r"extended_from: expected lengths below the 4 steps of the run, got \[4\]"):
        watch().train(configure(epochs=1, optimizer={"extension": "stretch", "extended_from": [4]}))


def test_a_checkpoint_of_the_shorter_run_can_still_be_exported(configure, watch, tmp_path):
    settings = {"optimizer__extension": "stretch", "keep_checkpoints": 9}
    first = watch().train(configure(epochs=1, **settings))
    weights = load_refiner(first.refiner)[0]
    watch().train(configure(epochs=2, **settings))
    assert [path.name for path in list_steps(first.folder / ".checkpoints")] == ["step-00000004", "step-00000008"]
    out = tmp_path / "four.safetensors"
    assert main(["export", "--run", str(first.folder), "--checkpoint", "4", "--out", str(out)]) == 0
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_refiner(out)[0].items())


def test_the_command_line_makes_a_run_longer(configure, watch, tmp_path):
    config = configure(max_steps=2, optimizer__schedule="constant", validation__pictures=0)
    path = tmp_path / "config.json"
    for steps in (2, 5):
        path.write_text(json.dumps({**json.loads(config.to_json()), "max_steps": steps}))
        assert main(["train", "--config", str(path)]) == 0
    assert json.loads((config.run / "status.json").read_text())["step"] == 5
