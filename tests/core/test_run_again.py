"""A run in the folder of an earlier one: reused, refused by name, or trained again."""

import json

import pytest

from training.config.train_config import TrainConfig
from training.errors import BadInput
from training.run.report.journal import read as read_journal

BRIEF = {"validation__pictures": 0, "epochs": 1}


def test_a_finished_run_is_reused_and_says_so(configure, watch):
    first = watch().train(configure(**BRIEF))
    data = first.refiner.read_bytes()
    again = watch()
    # where to look and how often does not matter
    result = again.train(configure(**BRIEF | {"validation__pictures": 2}, keep_checkpoints=5))
    assert result.status == "reused" and again.steps == []
    assert result.report == first.report and result.refiner.read_bytes() == data
    assert any("reused" in text for text in again.messages)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"seed": 3}, r"seed 0 -> 3"),
        ({"epochs": 2}, r"epochs 1 -> 2"),
        ({"optimizer__learning_rate": 0.5}, r"optimizer\.learning_rate 0\.003 -> 0\.5"),
    ],
)
def test_another_configuration_is_refused_and_names_the_field(configure, watch, change, said):
    first = watch().train(configure(**BRIEF))
    before = {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()}
    with pytest.raises(BadInput, match=said) as caught:
        watch().train(configure(**BRIEF | change))
    assert "another name" in str(caught.value) and "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in first.folder.rglob("*") if path.is_file()} == before


def test_other_data_are_refused(configure, watch, build_pairs):
    watch().train(configure(**BRIEF))
    with pytest.raises(BadInput, match="the dataset's content"):
        watch().train(configure(dataset=build_pairs(pairs=10), **BRIEF))


def test_the_same_data_in_another_folder_are_the_same(configure, watch, build_pairs):
    watch().train(configure(**BRIEF))
    assert watch().train(configure(dataset=build_pairs(), **BRIEF)).status == "reused"


def test_a_deleted_refiner_is_trained_again_from_the_start(configure, watch):
    first = watch().train(configure(**BRIEF))
    data = first.refiner.read_bytes()
    first.refiner.unlink()
    again = watch()
    result = again.train(configure(**BRIEF))
    assert result.status == "done" and again.steps == [1, 2, 3, 4]  # never silently on from trained weights
    assert result.refiner.read_bytes() == data
    lines = read_journal(result.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "learning_rate" in line] == [1, 2, 3, 4]


def test_a_folder_with_something_else_in_it_is_refused(configure, watch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "holiday.jpg").write_bytes(b"")
    with pytest.raises(BadInput, match="expected an empty folder or a run"):
        watch().train(configure())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["holiday.jpg"]


def test_a_file_in_the_folders_place_is_one_sentence(configure, watch, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        watch().train(configure())


def test_the_configuration_that_a_run_keeps_starts_the_same_run(configure, watch):
    result = watch().train(configure(**BRIEF))
    kept = json.loads((result.folder / "config.json").read_text())
    assert TrainConfig.build(kept["config"]) == configure(**BRIEF)
    assert watch().train(TrainConfig.build(kept["config"])).status == "reused"
