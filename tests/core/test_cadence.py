"""How often a run looks at held-out pairs, and when it saves: by steps, by minutes, and by default at little cost."""

import json

import pytest

from training.config.sections import CheckpointConfig
from training.data.batches import BatchSource
from training.data.shards import RefinerDataset
from training.run.cadence import CheckpointCadence, validation_cadence
from training.run.checkpoints.checkpoint import list_steps, step_of
from training.run.plan import make_plan
from training.run.report.journal import read as read_journal


def looks(folder):
    """The steps at which a run looked at its held-out pairs."""
    return [line["step"] for line in read_journal(folder / "metrics.jsonl") if "validation/loss" in line]


def forward_cells(config, data, every, total):
    """(of the steps, of the looks) of a run, in latent cells that go forward through the network, counted anew."""
    cells = sum(data.pairs[i].height * data.pairs[i].width for i in data.train) / len(data.train)
    looked = sum(data.pairs[i].height * data.pairs[i].width for i in data.held_out[: config.validation.pictures])
    return total * 3 * cells * config.data.batch_size, (total // every if every else 0) * 3 * 8 * looked


# ---- validation ------------------------------------------------------------------------------------------------------


def test_eight_pictures_and_twelve_epochs_spend_no_time_on_validating(configure, watch, build_pairs):
    """C4 of the findings: 12 looks and 12 checkpoints took nearly all of the time."""
    dataset = build_pairs(pairs=8, held_out=1)
    config = configure(dataset=dataset, epochs=12, data__batch_size=8, validation={"pictures": 4}, checkpoint={})
    watcher = watch()
    result = watcher.train(config)
    assert result.status == "done" and watcher.steps == list(range(1, 13))
    assert looks(result.folder) == []
    (said,) = [choice for choice in result.report["choices"] if choice.startswith("no validation in mid-training")]
    assert "validation.every sets it" in said
    # asked for, it looks
    assert looks(watch().train(configure(run=config.run.with_name("two"), dataset=dataset, epochs=2,
                                         data__batch_size=8, validation={"every": "epoch"})).folder) == [1, 2]


@pytest.mark.parametrize("epochs", [1, 30, 100, 400])
@pytest.mark.parametrize("batch, accumulation", [(1, 1), (2, 1), (4, 3)])
def test_by_default_validation_is_at_most_a_twentieth_of_the_work(configure, dataset, epochs, batch, accumulation):
    config = configure(
        epochs=epochs, data__batch_size=batch, data__accumulation=accumulation, validation={"pictures": 1}
    )
    data = RefinerDataset.open(dataset)
    source = BatchSource(dataset, batch_size=batch)
    plan = make_plan(config, data, source.per_epoch)
    steps, looked = forward_cells(config, data, plan.validation.every, plan.total_steps)
    assert looked <= 0.05 * (steps * accumulation + looked)
    assert plan.validation.every % max(1, round(source.per_epoch / accumulation)) == 0  # at an epoch's end
    if epochs >= 100:  # long enough for more than one
        assert 0 < plan.validation.every < plan.total_steps


def test_where_a_look_is_cheap_it_comes_once_an_epoch_or_every_thousand_steps(configure, dataset):
    data = RefinerDataset.open(dataset)
    config = configure(validation={"pictures": 1}, data__batch_size=64)
    found = {
        epoch: validation_cadence(config, data, micro_per_epoch=epoch, total=10**6, walk=8).every
        for epoch in (10, 500, 1000, 1001, 50_000)
    }
    assert found == {10: 10, 500: 500, 1000: 1000, 1001: 1000, 50_000: 1000}


def test_a_look_in_float32_counts_more_where_training_computes_in_half_precision(configure, dataset):
    data = RefinerDataset.open(dataset)
    every = {
        precision: validation_cadence(
            configure(validation={"pictures": 1}, precision=precision), data, micro_per_epoch=1, total=10**6, walk=8
        ).every
        for precision in ("fp32", "bf16", "pure_bf16")
    }
    assert every["bf16"] == every["pure_bf16"] == 4 * every["fp32"]


def test_a_number_of_steps_and_once_an_epoch_are_taken_as_they_are(configure, dataset):
    data = RefinerDataset.open(dataset)

    def every(**validation):
        config = configure(validation=validation, data__accumulation=3)
        return validation_cadence(config, data, micro_per_epoch=7, total=100, walk=8).every

    assert [every(every=5), every(every="epoch"), every(every=5, pictures=0)] == [5, 2, 0]


def test_a_run_that_is_resumed_looks_at_the_steps_of_one_that_was_not(configure, watch, tmp_path):
    settings = {"validation": {"pictures": 1}, "epochs": 40, "data__batch_size": 1}
    whole = watch().train(configure(run=tmp_path / "whole", **settings))
    for stop in (130, 200):
        watch(stop_after=stop).train(configure(**settings))
    resumed = watch().train(configure(**settings))
    assert looks(resumed.folder) == looks(whole.folder) != []
    assert (resumed.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    assert resumed.refiner.read_bytes() == whole.refiner.read_bytes()


def test_a_run_begun_by_an_earlier_version_goes_on_looking_once_an_epoch(configure, watch, whole_run):
    config = configure(validation={"pictures": 1})
    watch(stop_after=5).train(configure())  # which asks for every epoch, as the default was
    kept = json.loads((config.run / "config.json").read_text())
    del kept["looks"]
    (config.run / "config.json").write_text(json.dumps(kept))
    watch(stop_after=3).train(config)
    result = watch().train(config)
    assert looks(result.folder) == [4, 8, 12]
    assert (result.folder / "metrics.jsonl").read_bytes() == (whole_run[0].folder / "metrics.jsonl").read_bytes()


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def due(options, step=1, now=0.0, ended=True, cost=0.0, writing=False, last=0.0):
    cadence = CheckpointCadence(CheckpointConfig(**options), last)
    return cadence.is_due(step, now, epoch_ended=ended, cost=cost, writing=writing)


def test_by_default_saving_takes_at_most_a_twentieth_of_the_time():
    assert due({}, now=1.0)  # the first, of which nobody knows the cost
    assert not due({}, now=18.9, cost=1.0) and due({}, now=19.1, cost=1.0)
    assert not due({}, now=100.0, cost=1.0, writing=True)
    assert not due({}, now=100.0, cost=1.0, ended=False)
    assert due({}, now=1800.0, ended=False) and not due({}, now=1799.0, ended=False)  # an epoch of hours


def test_steps_epochs_and_minutes_are_taken_as_they_are():
    assert [step for step in range(1, 13) if due({"every": 5}, step=step, ended=False)] == [5, 10]
    assert due({"every": "epoch"}, cost=100.0) and not due({"every": "epoch"}, now=1e6, ended=False)
    assert due({"every": 5, "minutes": 2}, now=120.0) and not due({"every": 5, "minutes": 2}, now=119.0)
    assert not due({"minutes": 2}, now=119.0, ended=False) and due({"minutes": 2}, now=121.0, ended=False)


def test_minutes_are_counted_from_the_last_time_for_whatever_reason():
    cadence = CheckpointCadence(CheckpointConfig(every=1000, minutes=1), 0.0)
    cadence.saved(50.0)
    assert not cadence.is_due(1, 100.0, epoch_ended=False, cost=0.0, writing=False)
    assert cadence.is_due(1, 110.0, epoch_ended=False, cost=0.0, writing=False)


def test_a_run_saves_every_so_many_steps_and_at_its_end(configure, watch):
    config = configure(checkpoint={"every": 5}, keep_checkpoints=9, validation__pictures=0)
    result = watch().train(config)
    assert [step_of(path) for path in list_steps(result.folder / ".checkpoints")] == [5, 10, 12]


def test_how_often_a_run_saves_changes_none_of_its_bytes(configure, watch, whole_run):
    result = watch().train(configure(checkpoint={"every": 1, "minutes": 0.001}))
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
