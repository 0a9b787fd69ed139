"""python -m training export: a refiner file from a checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file

from training.__main__ import main
from training.errors import BadInput
from training.objectives.residual.file import load_refiner
from training.objectives.residual.model import Refiner
from training.run.checkpoints.export import export_checkpoint


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.fixture
def stopped(configure, watch):
    """The folder of a run that was stopped at step 6 of 12; it was validated at step 4."""
    assert watch(stop_after=6).train(configure()).status == "stopped"
    return configure().run


def test_the_last_of_a_finished_run_is_its_refiner_to_the_byte(whole_run, tmp_path, capsys):
    out = tmp_path / "last.safetensors"
    assert main(["export", "--run", str(whole_run[0].folder), "--checkpoint", "last", "--out", str(out)]) == 0
    assert out.read_bytes() == whole_run[0].refiner.read_bytes()
    assert f"step 12 to {out}" in capsys.readouterr().out


def test_another_step_has_its_own_weights_and_says_its_step(whole_run, tmp_path):
    out = tmp_path / "eight.safetensors"
    export_checkpoint(whole_run[0].folder, "8", out)
    weights, empty, meta = load_refiner(out)
    kept = load_file(whole_run[0].folder / ".checkpoints" / "step-00000008" / "ema.safetensors")
    assert weights.keys() == kept.keys() and all(torch.equal(weights[name], kept[name]) for name in kept)
    finished, empty_of_finished, meta_of_finished = load_refiner(whole_run[0].refiner)
    assert not torch.equal(weights["conv_out.weight"], finished["conv_out.weight"])
    assert torch.equal(empty["context"], empty_of_finished["context"])
    assert meta.training == {**meta_of_finished.training, "steps": 8}
    assert meta.model_copy(update={"training": {}}) == meta_of_finished.model_copy(update={"training": {}})


def test_a_stopped_run_gives_what_an_uninterrupted_one_had_at_that_step(stopped, watch, configure, tmp_path):
    out = tmp_path / "stopped.safetensors"
    assert "step 6" in export_checkpoint(stopped, "last", out)[-1]
    refiner, empty, meta = Refiner.from_file(out)
    assert meta.training["steps"] == 6 and meta.training["pairs"] == 8
    b = torch.zeros(1, 3, 16, 16)
    refined = refiner.refine(b, b, {"context": empty["context"][None]}, torch.tensor(meta.sigmas))
    assert refined.shape == b.shape and refined.isfinite().all() and refined.abs().max() > 0
    # where the dataset was moved to can be said
    config = json.loads((stopped / "config.json").read_text())
    moved = config["config"]["dataset"]
    config["config"]["dataset"] = "nowhere"
    (stopped / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="nowhere"):
        export_checkpoint(stopped, "last", tmp_path / "b.safetensors")
    export_checkpoint(stopped, "last", tmp_path / "b.safetensors", dataset=moved)
    assert (tmp_path / "b.safetensors").read_bytes() == out.read_bytes()


def test_a_run_on_a_device_that_this_machine_lacks_can_be_exported(stopped, tmp_path):
    config = json.loads((stopped / "config.json").read_text())
    config["config"]["device"] = "cuda:77"
    (stopped / "config.json").write_text(json.dumps(config))
    export_checkpoint(stopped, "last", tmp_path / "a.safetensors")
    assert load_refiner(tmp_path / "a.safetensors")[2].training["steps"] == 6


def test_the_best_is_that_of_the_lowest_validation_loss(configure, watch, tmp_path, monkeypatch):
    from training.run.report.journal import Journal

    write = Journal.write

    def lowest_at_four(self, step, **values):
        write(self, step, **{k: 0.1 + abs(step - 4) if k == "validation/loss" else v for k, v in values.items()})

    monkeypatch.setattr(Journal, "write", lowest_at_four)
    folder = watch().train(configure(keep_checkpoints=1)).folder
    said = export_checkpoint(folder, "best", tmp_path / "best.safetensors")
    assert said[0] == "The lowest validation loss, 0.1, was at step 4."
    weights, _, meta = load_refiner(tmp_path / "best.safetensors")
    kept = load_file(folder / ".checkpoints" / "step-00000004" / "ema.safetensors")
    assert meta.training["steps"] == 4 and torch.equal(weights["conv_out.weight"], kept["conv_out.weight"])


def test_a_damaged_checkpoint_is_named_and_last_takes_the_one_before(stopped, tmp_path):
    flip(stopped / ".checkpoints" / "step-00000006" / "optimizer.safetensors")
    with pytest.raises(BadInput, match="step-00000006 cannot be used: optimizer.safetensors is damaged"):
        export_checkpoint(stopped, "6", tmp_path / "a.safetensors")
    said = export_checkpoint(stopped, "last", tmp_path / "a.safetensors")
    assert said[0].startswith("step-00000006 passed over: optimizer.safetensors is damaged") and "step 4" in said[1]
    flip(stopped / ".checkpoints" / "step-00000004" / "ema.safetensors")
    with pytest.raises(BadInput, match="none of 'run' can be used: step-00000006 .* step-00000004 passed over: ema"):
        export_checkpoint(stopped, "last", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


def test_a_file_that_is_there_is_replaced_only_by_force(stopped, tmp_path, capsys):
    out = tmp_path / "mine.safetensors"
    out.write_bytes(b"holiday")
    command = ["export", "--run", str(stopped), "--checkpoint", "last", "--out", str(out)]
    assert main(command) == 1 and out.read_bytes() == b"holiday"
    assert capsys.readouterr().err.startswith(f"error: --out: {out} is there already")
    assert main([*command, "--force"]) == 0
    assert load_refiner(out)[2].training["steps"] == 6


@pytest.mark.parametrize(
    "which, out, said",
    [
        ("7", "a.safetensors", "--checkpoint: there is none of step 7; 4, 6 are there"),
        ("newest", "a.safetensors", "--checkpoint: expected best, last or a step, got 'newest'"),
        ("last", "a.pt", "--out: expected a file name that ends in .safetensors, got 'a.pt'"),
        ("last", "no/a.safetensors", "--out: expected a folder that exists"),
    ],
)
def test_what_does_not_fit_is_one_sentence(stopped, tmp_path, which, out, said):
    with pytest.raises(BadInput) as caught:
        export_checkpoint(stopped, which, tmp_path / out)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_without_validations_or_without_checkpoints_says_so(configure, watch, tmp_path):
    folder = watch(stop_after=6).train(configure(validation__pictures=0)).folder
    with pytest.raises(BadInput, match=r"this run was never validated; take last, or a step \(4, 6 are there\)"):
        export_checkpoint(folder, "best", tmp_path / "a.safetensors")
    for path in (folder / ".checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(BadInput, match="expected checkpoints in .*checkpoints, found none"):
        export_checkpoint(folder, "last", tmp_path / "a.safetensors")
    with pytest.raises(BadInput, match="--run: expected the folder of a run"):
        export_checkpoint(tmp_path / "nowhere", "last", tmp_path / "a.safetensors")


def test_a_best_that_was_not_kept_and_another_dataset_are_said(configure, watch, stopped, build_pairs, tmp_path):
    for path in (stopped / ".checkpoints").glob("step-00000004"):
        path.rename(tmp_path / path.name)
    with pytest.raises(BadInput, match="the lowest validation loss was at step 4, of which no checkpoint was kept"):
        export_checkpoint(stopped, "best", tmp_path / "a.safetensors")
    with pytest.raises(BadInput, match="--dataset: expected the dataset that this run was trained on"):
        export_checkpoint(stopped, "last", tmp_path / "a.safetensors", dataset=build_pairs(pairs=5))


def test_a_run_that_was_stopped_before_its_first_step_says_so(configure, watch, tmp_path):
    assert watch(stop_after=0).train(configure()).status == "stopped"
    export_checkpoint(configure().run, "last", tmp_path / "none.safetensors")
    assert Refiner.from_file(tmp_path / "none.safetensors")[2].training["steps"] == 0


def test_where_the_start_was_moved_to_can_be_said(configure, watch, tmp_path):
    start = tmp_path / "earlier" / "refiner.safetensors"
    start.parent.mkdir()
    start.write_bytes(watch().train(configure(run=tmp_path / "first")).refiner.read_bytes())
    config = configure(run=tmp_path / "second", refiner={"start_from": start})
    assert watch(stop_after=2).train(config).status == "stopped"
    start.rename(tmp_path / "moved.safetensors")
    with pytest.raises(BadInput, match="refiner.start_from: expected a file, cannot read"):
        export_checkpoint(config.run, "last", tmp_path / "a.safetensors")
    export_checkpoint(config.run, "last", tmp_path / "a.safetensors", start_from=tmp_path / "moved.safetensors")
    assert Refiner.from_file(tmp_path / "a.safetensors")[2].training["steps"] == 2
