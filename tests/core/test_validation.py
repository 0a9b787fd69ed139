"""Held-out pairs are measured in float32 in every precision; what the network is told, and how often it is asked."""

import json
import math

import pytest
import torch

from tests.core.conftest import SHAPE, configuration, write_dataset
from tests.core.starts import TEXT, write_start
from training.config.network import UNetConfig
from training.data.batches import BatchSource
from training.data.shards import RefinerDataset
from training.objectives.evaluate import batches_of, evaluate
from training.objectives.residual import flow
from training.objectives.residual.model import Refiner
from training.objectives.residual.unet import build_unet
from training.run.checkpoints.checkpoint import list_steps
from training.run.report.journal import read as read_journal
from training.storage.checksums import write_checksums

LOW = ["bf16", "fp16", "pure_bf16"]


def validated(folder, step, name="loss"):
    return next(line[f"validation/{name}"] for line in read_journal(folder / "metrics.jsonl")
                if line["step"] == step and f"validation/{name}" in line)  # fmt: skip


def measure(refiner, data, indices, **options):
    given = dict(sigmas=flow.sigmas(8)[:-1].tolist(), crop=128, seed=0, device=torch.device("cpu"))
    empty = {"context": torch.zeros(1, 8)}
    return evaluate(refiner, data, indices, options.pop("empty", empty), **given | options)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("precision", LOW)
def test_validation_is_in_float32(configure, watch, dataset, tmp_path, precision, lora):
    """The last one is of the weights in the file, so it can be taken again from there."""
    start = write_start(tmp_path / "start" / "refiner.safetensors")
    config = configure(refiner={"start_from": str(start)}, precision=precision, lora=lora, epochs=1)
    result = watch().train(config)
    data, refiner = RefinerDataset.open(dataset), Refiner.from_file(result.refiner)[0]
    again = measure(refiner, data, data.held_out).loss
    assert validated(result.folder, 4) == pytest.approx(again, rel=2e-6)
    reported = list(result.report["evaluation"]["loss_per_sigma"].values())
    assert sum(reported) / 8 == pytest.approx(again, rel=2e-6)
    refiner.autocast = torch.float16 if precision == "fp16" else torch.bfloat16
    assert measure(refiner, data, data.held_out).loss != pytest.approx(again, rel=2e-6)  # else this would see nothing


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_weights_as_they_are_are_measured_in_float32_too(configure, watch, tmp_path, lora):
    """Without averaging, both are one and the same network."""
    start = write_start(tmp_path / "start" / "refiner.safetensors")
    config = configure(
        refiner={"start_from": str(start)}, precision="pure_bf16", lora=lora, ema_decay=0.0, validation__every=2,
    )
    result = watch().train(config)
    for step in (2, 6, 12):
        assert validated(result.folder, step, "loss_unaveraged") == validated(result.folder, step)


def test_a_run_begun_before_goes_on_measuring_as_it_began(configure, watch, tmp_path):
    first = watch(stop_after=2).train(configure(precision="bf16"))
    (path,) = list_steps(first.folder / ".checkpoints")
    state = json.loads((path / "state.json").read_text())
    assert state.pop("measures") == 2
    (path / "state.json").write_text(json.dumps(state))
    (path / "SHA256SUMS").unlink()
    write_checksums(path)
    watcher = watch()
    result = watcher.train(configure(precision="bf16"))
    new = watch().train(configure(run=tmp_path / "new", precision="bf16"))
    assert result.refiner.read_bytes() == new.refiner.read_bytes()
    assert sum("begun by an earlier version" in text for text in watcher.messages) == 1
    before, now = validated(result.folder, 12), validated(new.folder, 12)
    assert before != now and before == pytest.approx(now, rel=0.05)
    assert json.loads((list_steps(result.folder / ".checkpoints")[-1] / "state.json").read_text())["measures"] == 1


def test_an_sdxl_like_network_is_told_the_size_of_the_crop_as_in_training(tmp_path):
    latent = {"name": "SDXL", "channels": 4, "scale": 0.13025, "shift": 0.0, "downscale": 8}
    text = {**TEXT, "pooled": 6}
    data = RefinerDataset.open(write_dataset(tmp_path / "pairs", pairs=3, side=20, latent=latent, text=text))
    trained = BatchSource(tmp_path / "pairs", batch_size=2, crop=16)[0]["time_ids"]
    told = []

    class Asked(Refiner):
        def output(self, x, b, t, condition):
            told.append(condition["time_ids"])
            return torch.zeros_like(x)

    measure(Asked(None, 0.1, 0.2), data, [0], crop=16, step_counts=(1,), empty=data.empty_context())
    assert torch.equal(told[0][0], trained[0]) and told[0][0].tolist() == [128, 128, 0, 0, 128, 128]


def test_a_run_begun_before_is_told_the_size_of_each_whole_pair(tmp_path):
    """Also of those that have one size after the crop, and are measured together."""
    latent = {"name": "SDXL", "channels": 4, "scale": 0.13025, "shift": 0.0, "downscale": 8}
    text = {**TEXT, "pooled": 6}
    data = RefinerDataset.open(write_dataset(tmp_path / "pairs", pairs=2, side=[20, 24], latent=latent, text=text))
    told = []

    class Asked(Refiner):
        def output(self, x, b, t, condition):
            told.append(condition["time_ids"][:, :2].tolist())
            return torch.zeros_like(x)

    options = {"crop": 16, "step_counts": (1,), "empty": data.empty_context(), "cells": 2 * 256}
    measure(Asked(None, 0.1, 0.2), data, [0, 1], told_whole=True, **options)
    assert told[0] == [[160, 160], [192, 192]]
    measure(Asked(None, 0.1, 0.2), data, [0, 1], **options)
    assert told[-1] == [[128, 128], [128, 128]]


def test_pairs_of_one_size_are_measured_together_and_the_figures_are_the_same(dataset):
    torch.manual_seed(3)
    net = build_unet(UNetConfig(latent_channels=3, **SHAPE))
    torch.nn.init.normal_(net.conv_out.weight, std=0.05)
    asked = []
    net.register_forward_pre_hook(lambda _, given: asked.append(len(given[0])))
    data, told = RefinerDataset.open(dataset), []
    alone = measure(Refiner(net, 0.1, 0.15), data, [0, 1, 2], on_pair=lambda *given: told.append(given))
    # 1 + 2 + 4 + 8 steps and 8 losses, of which four and one begin at the same state
    assert asked == [1] * (3 * 19) and told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    asked.clear()
    together = measure(Refiner(net, 0.1, 0.15), data, [0, 1, 2], cells=2 * 16 * 16)
    assert asked == [2] * 19 + [1] * 19
    assert together.loss_per_sigma == pytest.approx(alone.loss_per_sigma, rel=1e-5)
    for name, row in alone.rows.items():
        assert together.rows[name] == pytest.approx(row, rel=1e-4)
    for one, other in zip(alone.pictures, together.pictures, strict=True):
        assert (one["refined"] - other["refined"]).abs().max() < 1e-5


def test_batches_keep_the_order_and_mix_no_sizes(tmp_path):
    data = RefinerDataset.open(write_dataset(tmp_path / "pairs", pairs=5, side=16))
    assert list(batches_of(data, [4, 0, 1, 2, 3], None, 2 * 256)) == [[4, 0], [1, 2], [3]]
    assert list(batches_of(data, [0, 1], None, 0)) == [[0], [1]]


def test_the_first_answer_is_given_for_the_very_same_state_alone():
    from training.objectives.first_answer import FirstAnswer

    first, asked = FirstAnswer(), []

    def ask(x, t):
        asked.append(float(t))
        return x * t

    x, t = torch.tensor([2.0]), torch.tensor([1.0])
    assert first.of(x, t, ask) is first.of(x.clone(), t.clone(), ask)
    assert float(first.of(x, t / 2, ask)) == 1 and float(first.of(x + 1, t, ask)) == 3
    assert asked == [1, 0.5, 1] and not math.isnan(float(first.of(x, t, ask)))


def test_the_grid_of_many_pairs_has_the_shape_of_a_screen():
    from training.run.report.report import BETWEEN, GAP, screen_grid

    rows = [{name: torch.full((3, 128, 128), i / 24) for name in ("base", "refined", "target")} for i in range(24)]
    grid = screen_grid(rows)
    assert grid.size == (4 * (3 * 128 + 2 * GAP) + 3 * BETWEEN, 6 * 128 + 5 * GAP)  # it was one column, 392 x 3164
    # down the columns, then across: the seventh pair is at the top of the second one
    assert grid.getpixel((3 * 128 + 2 * GAP + BETWEEN, 0)) == (round(255 * 6 / 24),) * 3
    assert grid.getpixel((0, 5 * (128 + GAP))) == (round(255 * 5 / 24),) * 3


def test_a_one_shot_run_is_validated_too(watch, dataset, tmp_path):
    config = configuration(dataset, tmp_path / "run", flow__noise_scale=0, epochs=1)
    result = watch().train(config)
    assert validated(result.folder, 4) > 0 and validated(result.folder, 4, "loss_unaveraged") > 0
