"""One run from a dataset folder to a refiner file."""

import json
import math

import pytest
import torch
from PIL import Image

from tests.core.conftest import step_lines
from training.data.batches import BatchSource
from training.data.seeds import seeded_generator
from training.data.shards import RefinerDataset
from training.objectives.residual import flow
from training.objectives.residual.file import load_meta, load_refiner
from training.objectives.residual.unet import build_unet
from training.run.checkpoints.checkpoint import load_newest
from training.run.optim.schedule import warmup_schedule
from training.run.report.journal import read as read_journal

BRIEF = {"validation__pictures": 0, "epochs": 1}


def test_a_refiner_learns_to_come_nearer_to_its_targets(configure, watch, build_pairs):
    folder = build_pairs(base_of=lambda z: -z / 2)  # a negative in half the contrast: soon seen through
    config = configure(dataset=folder, epochs=20, optimizer__learning_rate=1e-2, validation__pictures=0)
    watcher = watch()
    result = watcher.train(config)
    assert result.status == "done" and watcher.steps == list(range(1, 81))
    assert watcher.losses[0] == pytest.approx(1, abs=0.2) and sum(watcher.losses[-10:]) / 10 < 0.4
    measures = result.report["evaluation"]["measures"]
    assert measures["base"]["relative_residual"] == 1
    assert measures["1 step"]["relative_residual"] < 0.8 and measures["8 steps"]["relative_residual"] < 0.8
    assert measures["1 step"]["psnr"] > measures["base"]["psnr"] + 2
    losses = result.report["evaluation"]["loss_per_sigma"].values()
    assert all(0 < loss < 0.7 for loss in losses)


def test_a_run_equals_a_loop_written_by_hand(configure, watch, dataset):
    """The same mathematics in the plainest form: gradients of one step, clipped; decay on kernels only; the average."""
    # Where a gradient is all but 0, AdamW makes its rounding as large as a step: with this seed there is none
    config = configure(
        seed=2, epochs=2, optimizer__weight_decay=0.1, optimizer__clip_norm=0.05, validation__pictures=0
    )
    trained = load_refiner(watch().train(config).refiner)[0]

    data = RefinerDataset.open(dataset)
    s = data.residual_rms
    c_v = math.sqrt(2) * s
    torch.manual_seed(config.seed)
    net = build_unet(load_meta(config.run / "refiner.safetensors").unet)
    averaged = {name: p.detach().clone() for name, p in net.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in net.named_parameters()}
    source = BatchSource(dataset, batch_size=2, seed=config.seed)
    for step in range(8):
        batch = source[step]
        z, b = batch["z"], batch["b"]
        generator = seeded_generator(config.seed, "noise", step)
        e = torch.randn(z.shape, generator=generator)
        t = flow.draw_times(2, flow.sigmas(8)[:-1], 0.5, generator)
        x = (1 - t)[:, None, None, None] * z + t[:, None, None, None] * (b + s * e)
        output = net(torch.cat([x, b], 1), 1000 * t, encoder_hidden_states=torch.zeros(2, 1, 8)).sample
        net.zero_grad()
        ((output - (b + s * e - z) / c_v) ** 2).mean().backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters()))
        assert norm > 0.05 or step == 0  # the clipping is in play
        rate = 3e-3 * warmup_schedule(step, 2, 8)
        for name, p in net.named_parameters():
            m, v = moments[name]
            g = p.grad * min(1, 0.05 / norm)
            m.lerp_(g, 0.1)
            v.lerp_(g * g, 0.01)
            decay = 0.1 if p.ndim > 1 else 0.0
            with torch.no_grad():
                p -= rate * decay * p
                p -= rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.99 ** (step + 1))).sqrt() + 1e-8)
                d = min(0.9, (1 + step) / (10 + step))
                averaged[name] = d * averaged[name] + (1 - d) * p
    for name, tensor in averaged.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=2e-5)


def test_every_micro_step_has_noise_and_times_of_its_own(configure, watch, monkeypatch, tmp_path):
    seen, state = [], flow.state

    def look(z, b, e, t, s):
        seen.append((e.flatten().tolist(), t.tolist()))
        return state(z, b, e, t, s)

    monkeypatch.setattr(flow, "state", look)
    for seed in (0, 1):
        watch().train(configure(run=tmp_path / f"run-{seed}", seed=seed, **BRIEF))
        seen = seen[: 4 * (seed + 1)]  # what the evaluation asked for is not training
    assert len(seen) == 8
    assert len({tuple(e) for e, _ in seen}) == 8 and len({tuple(t) for _, t in seen}) == 8
    noise = torch.tensor([e for e, _ in seen])
    assert abs(float(noise.mean())) < 0.03 and float(noise.std()) == pytest.approx(1, abs=0.03)


def test_a_run_leaves_everything_that_a_person_needs(whole_run):
    result, _ = whole_run
    found = {path.name for path in result.folder.iterdir() if not path.name.startswith(".")}
    assert found == {
        "refiner.safetensors", "report.json", "loss.png", "grid.png", "config.json", "status.json", "metrics.jsonl",
        "tensorboard", "validation", "report.png", "memory.jsonl", "speed.jsonl",
    }
    assert json.loads((result.folder / "status.json").read_text())["state"] == "done"
    grid = Image.open(result.folder / "grid.png")
    assert grid.size == (3 * 16 + 2 * 4, 16)  # base | refined | target of the held-out pair
    assert Image.open(result.folder / "loss.png").size == (640, 400)
    measured = [line for line in read_journal(result.folder / "metrics.jsonl") if "validation/loss" in line]
    looked = {line["step"]: line["validation/loss"] for line in measured}
    best = min(looked, key=looked.__getitem__)
    kept = sorted(p.name for p in (result.folder / ".checkpoints").iterdir())
    assert kept[-2:] == ["step-00000008", "step-00000012"] and f"step-{best:08d}" in kept and len(kept) <= 3
    assert sorted(p.name for p in (result.folder / "validation").iterdir()) == [
        f"step-{step:08d}.png" for step in (4, 8, 12)
    ]


def test_the_report_tells_what_was_trained_and_how_it_does(whole_run):
    result, watcher = whole_run
    report = json.loads((result.folder / "report.json").read_text(), parse_constant=pytest.fail)
    assert report == result.report
    assert report["training"]["steps"] == report["training"]["steps_in_this_session"] == 12
    assert report["training"]["first_loss"] == watcher.losses[0]
    assert set(report["evaluation"]["measures"]) == {
        "base", "sharpening", "1 step", "2 steps", "4 steps", "8 steps",
    }
    assert list(report["evaluation"]["loss_per_sigma"]) == [
        "1", "0.875", "0.75", "0.625", "0.5", "0.375", "0.25", "0.125",
    ]
    assert report["evaluation"]["on"] == "held-out pairs" and report["evaluation"]["pairs"] == 1
    assert any("RMS(z - b)" in choice for choice in report["choices"])


def test_the_observer_is_told_every_step_and_shown_pictures(whole_run):
    _, watcher = whole_run
    assert watcher.steps == list(range(1, 13))
    assert all(eta >= 0 and math.isfinite(eta) for eta in watcher.etas) and watcher.etas[-1] == 0
    sizes = {picture.size for picture in watcher.shown}
    assert (640, 400) in sizes and (3 * 16 + 2 * 4, 16) in sizes  # loss curve and validation sample in turn
    assert any("parameters" in text for text in watcher.messages)


def test_the_file_holds_the_averaged_weights_and_the_constants_of_the_flow(whole_run, dataset):
    result, _ = whole_run
    weights, empty, meta = load_refiner(result.refiner)
    newest, _ = load_newest(result.folder / ".checkpoints")
    assert newest.step == 12
    assert all(torch.equal(weights[name], tensor) for name, tensor in newest.ema.items())
    assert not torch.equal(weights["conv_out.weight"], newest.weights["conv_out.weight"])
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert meta.noise_scale == meta.residual_rms and meta.c_v == pytest.approx(math.sqrt(2) * meta.noise_scale)
    assert meta.sigmas == flow.sigmas(8).tolist()
    assert meta.context is None and torch.equal(empty["context"], torch.zeros(1, 8))
    assert meta.training["steps"] == 12 and meta.training["pairs"] == 8


def test_nothing_in_the_file_says_where_it_was_made(whole_run, dataset):
    result, _ = whole_run
    data = result.refiner.read_bytes()
    assert str(result.folder).encode() not in data and str(dataset).encode() not in data


def test_the_journal_has_the_planned_learning_rates(whole_run):
    result, watcher = whole_run
    lines = step_lines(result.folder)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["loss"] for line in lines] == watcher.losses
    assert [line["learning_rate"] for line in lines] == pytest.approx(
        [3e-3 * warmup_schedule(step, 2, 12) for step in range(12)]
    )
    measured = [line for line in read_journal(result.folder / "metrics.jsonl") if "validation/loss" in line]
    assert [line["step"] for line in measured] == [4, 8, 12]
    assert {"validation/psnr", "validation/ssim", "validation/relative_residual"} <= set(measured[0])


def test_the_horizon_can_lie_beyond_the_run(configure, watch):
    result = watch().train(configure(optimizer__horizon_steps=40, **BRIEF))
    rates = [line["learning_rate"] for line in step_lines(result.folder)]
    assert rates == pytest.approx([3e-3 * warmup_schedule(step, 2, 40) for step in range(4)])


def test_the_same_configuration_gives_the_same_bytes(configure, watch, whole_run):
    torch.manual_seed(123)  # whatever the caller did before
    result = watch().train(configure())
    assert result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()


def test_another_seed_gives_another_refiner(configure, watch, tmp_path):
    files = [
        watch().train(configure(run=tmp_path / f"run-{seed}", seed=seed, **BRIEF)).refiner.read_bytes()
        for seed in (0, 1)
    ]
    assert files[0] != files[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_callers_random_numbers_are_left_alone(configure, watch, workers):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    watch().train(configure(data__workers=workers, **BRIEF))
    assert torch.equal(torch.get_rng_state(), before)


def test_measuring_is_told_pair_by_pair(whole_run):
    assert whole_run[1].measured == [(0, 1), (1, 1)]
