"""One run from a dataset folder to a refiner file."""

import json
import math

import pytest
import torch
from PIL import Image

from training.data.batches import BatchSource
from training.data.seeds import seeded_generator
from training.data.shards import RefinerDataset
from training.objectives.residual import flow
from training.objectives.residual.file import load_meta, load_refiner
from training.objectives.residual.model import Refiner
from training.objectives.residual.unet import build_unet
from training.run.checkpoints.checkpoint import load_newest
from training.run.optim.schedule import warmup_cosine
from training.run.plan import make_plan
from training.run.report.journal import read as read_journal

ATTENTION = {
    "block_channels": [32], "layers_per_block": 1, "transformer_depth": [1], "middle_depth": 1, "heads": [1],
}
BRIEF = {"validation__pictures": 0, "epochs": 1}


def journal(folder):
    """The lines of the optimizer steps, without those of the validation."""
    return [line for line in read_journal(folder / "metrics.jsonl") if "learning_rate" in line]


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
        rate = 3e-3 * warmup_cosine(step, 2, 8)
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
    lines = journal(result.folder)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["loss"] for line in lines] == watcher.losses
    assert [line["learning_rate"] for line in lines] == pytest.approx(
        [3e-3 * warmup_cosine(step, 2, 12) for step in range(12)]
    )
    measured = [line for line in read_journal(result.folder / "metrics.jsonl") if "validation/loss" in line]
    assert [line["step"] for line in measured] == [4, 8, 12]
    assert {"validation/psnr", "validation/ssim", "validation/relative_residual"} <= set(measured[0])


def test_the_horizon_can_lie_beyond_the_run(configure, watch):
    result = watch().train(configure(optimizer__horizon_steps=40, **BRIEF))
    rates = [line["learning_rate"] for line in journal(result.folder)]
    assert rates == pytest.approx([3e-3 * warmup_cosine(step, 2, 40) for step in range(4)])


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


# ---- ways to train --------------------------------------------------------------------------------------------------


def test_one_shot_mode_is_trained_and_sampled_at_one_alone(configure, watch, monkeypatch):
    asked, draw = [], flow.draw_times
    monkeypatch.setattr(flow, "draw_times", lambda *given: asked.append(draw(*given)) or asked[-1])
    result = watch().train(configure(flow__noise_scale=0, **BRIEF))
    assert {float(t) for times in asked for t in times} == {1.0}
    meta = load_meta(result.refiner)
    assert (meta.noise_scale, meta.sigmas) == (0.0, [1.0, 0.0]) and meta.c_v == pytest.approx(meta.residual_rms)
    assert set(result.report["evaluation"]["measures"]) == {"base", "sharpening", "1 step"}
    assert set(result.report["evaluation"]["loss_per_sigma"]) == {"1"}


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_a_refiner_can_be_made_for_another_number_of_steps(configure, watch, steps):
    result = watch().train(configure(flow__steps=steps, **BRIEF))
    assert load_meta(result.refiner).sigmas == flow.sigmas(steps).tolist()
    assert len(result.report["evaluation"]["loss_per_sigma"]) == steps


def test_accumulation_takes_the_planned_number_of_steps(configure, watch, tmp_path):
    for accumulation, steps in ((5, 3), (16, 1)):  # 3 epochs of 4 micro-steps
        run = tmp_path / f"run-{accumulation}"
        config = configure(run=run, data__accumulation=accumulation, validation__pictures=0)
        watcher = watch()
        assert watcher.train(config).report["training"]["steps"] == steps
        assert watcher.steps == list(range(1, steps + 1))
        rates = [line["learning_rate"] for line in journal(run)]
        assert rates == pytest.approx([3e-3 * warmup_cosine(step, 2, steps) for step in range(steps)])


def test_accumulated_gradients_equal_those_of_the_large_batch(configure, watch, tmp_path, monkeypatch):
    """4 x 2 pairs against 8 at once: the same 8 pairs, with noise and times that do not depend on the batch."""
    monkeypatch.setattr(flow, "draw_times", lambda count, *_: torch.full((count,), 0.5))
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **options: torch.zeros_like(randn(*size, **options)))
    runs = []
    for batch, accumulation in ((8, 1), (2, 4)):
        run = tmp_path / f"run-{batch}"
        watch().train(
            configure(run=run, data__batch_size=batch, data__accumulation=accumulation, validation__pictures=0)
        )
        runs.append(journal(run))
    assert len(runs[0]) == len(runs[1]) == 3
    for large, small in zip(*runs, strict=True):
        assert small["loss"] == pytest.approx(large["loss"], rel=1e-4)
        assert small["gradient_norm"] == pytest.approx(large["gradient_norm"], rel=1e-3)


@pytest.mark.parametrize("pooled", [0, 6])
def test_text_is_learnt_with_some_captions_dropped(configure, watch, build_pairs, monkeypatch, pooled):
    text = {"tokens": 3, "dim": 8, "pooled": pooled, "fingerprint": "c0ffee"}
    folder = build_pairs(text=text)
    heard, output = [], Refiner.output

    def listen(self, x, b, t, condition):
        heard.append(condition)
        return output(self, x, b, t, condition)

    monkeypatch.setattr(Refiner, "output", listen)
    config = configure(dataset=folder, refiner__shape=ATTENTION, data__caption_dropout=0.5, **BRIEF)
    result = watch().train(config)
    weights, empty, meta = load_refiner(result.refiner)
    assert meta.context == text and meta.unet.context_dim == 8 and meta.unet.pooled_dim == pooled
    assert empty["context"].shape == (3, 8) and empty["context"].abs().max() > 0
    assert set(empty) == ({"context", "pooled"} if pooled else {"context"})
    trained = heard[:4]
    dropped = [torch.equal(row, empty["context"]) for condition in trained for row in condition["context"]]
    assert len(dropped) == 8 and 0 < sum(dropped) < 8
    if pooled:
        assert all(
            torch.equal(row, empty["pooled"]) == drop
            for row, drop in zip((row for c in trained for row in c["pooled"]), dropped, strict=True)
        )
        assert all(condition["time_ids"].tolist() == [[16, 16, 0, 0, 16, 16]] * 2 for condition in trained)


def test_text_without_an_empty_caption_can_be_trained_without_dropout(configure, watch, build_pairs):
    folder = build_pairs(text={"tokens": 3, "dim": 8, "pooled": 0, "fingerprint": "c0ffee"}, empty=False)
    config = configure(dataset=folder, refiner__shape=ATTENTION, data__caption_dropout=0, **BRIEF)
    result = watch().train(config)
    assert load_refiner(result.refiner)[1]["context"].shape[1] == 8  # and the file can be loaded


def test_a_text_refiner_without_text_in_the_data_hears_zeros(configure, watch):
    result = watch().train(configure(refiner__shape=ATTENTION | {"context_dim": 8, "pooled_dim": 4}, **BRIEF))
    empty = load_refiner(result.refiner)[1]
    assert torch.equal(empty["context"], torch.zeros(1, 8)) and torch.equal(empty["pooled"], torch.zeros(4))


@pytest.mark.parametrize("channels, downscale", [(4, 8), (16, 8)])
def test_a_latent_space_is_trained_and_measured_without_pictures_of_its_own(
    configure, watch, build_pairs, channels, downscale
):
    latent = {"name": "measured", "channels": channels, "scale": 1.0, "shift": 0.0, "downscale": downscale}
    result = watch().train(configure(dataset=build_pairs(latent=latent), validation__pictures=1, epochs=1))
    measures = result.report["evaluation"]["measures"]
    assert "sharpening" not in measures and set(measures["base"]) == {"relative_residual", "spectrum"}
    assert load_meta(result.refiner).unet.latent_channels == channels
    assert (result.folder / "grid.png").is_file()


def test_without_held_out_pairs_the_report_says_what_it_measured_on(configure, watch, build_pairs):
    result = watch().train(configure(dataset=build_pairs(held_out=0), epochs=1))
    assert "training pairs" in result.report["evaluation"]["on"]


def test_crops_too_small_for_ssim_do_not_end_a_run(configure, watch):
    result = watch().train(configure(data__crop=8, validation__crop=8, epochs=1))
    assert math.isfinite(result.report["evaluation"]["measures"]["base"]["psnr"])


@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure_bf16"])
def test_half_precision_gives_float32_weights(configure, watch, precision, whole_run):
    watcher = watch()
    result = watcher.train(configure(precision=precision, optimizer__horizon_steps=12, **BRIEF))
    assert result.status == "done" and all(math.isfinite(loss) for loss in watcher.losses)
    # the same course as in float32, but not the same bits: it did compute in half precision
    full = whole_run[1].losses[:4]
    assert watcher.losses != full and watcher.losses == pytest.approx(full, abs=0.05)
    norms = [journal(folder)[0]["gradient_norm"] for folder in (result.folder, whole_run[0].folder)]
    assert norms[0] == pytest.approx(norms[1], rel=0.05)  # of the unscaled gradients: what is clipped is their norm
    weights = load_refiner(result.refiner)[0]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in weights.values())
    assert any(choice.startswith(precision) for choice in result.report["choices"])
    kept = load_newest(result.folder / ".checkpoints")[0].weights
    trained_in = torch.bfloat16 if precision == "pure_bf16" else torch.float32
    assert {tensor.dtype for tensor in kept.values()} == {trained_in}


@pytest.mark.parametrize("batch, said", [(8, False), (12, False), (16, True), (4096, True)])
def test_a_batch_far_too_large_for_the_dataset_is_remarked_on(dataset, configure, batch, said):
    """Eight pairs of one size: 8 fit exactly, 12 repeat half of them, 16 all of them."""
    config = configure(data__batch_size=batch)
    source = BatchSource(dataset, batch_size=batch, seed=config.seed)
    choices = make_plan(config, source.data, source.per_epoch).choices
    found = [choice for choice in choices if choice.startswith(f"batch_size {batch} is large for this dataset")]
    assert len(found) == said
    if said:
        assert f"an epoch draws {batch} samples where 8 would do" in found[0]


def choices_of(config, dataset):
    source = BatchSource(dataset, batch_size=2, crop=config.data.crop)
    return make_plan(config, source.data, source.per_epoch).choices


def test_a_crop_that_pictures_are_too_small_for_is_remarked_on(configure, dataset, build_pairs):
    said = {crop: [c for c in choices_of(configure(data__crop=crop), dataset) if "crop" in c] for crop in (8, 16, 1024)}
    assert said[8] == said[16] == []
    assert said[1024] == ["crop 1024 is larger than every picture (the largest has 16 x 16 cells): they are whole"]


def test_a_large_network_on_a_cpu_is_remarked_on_and_its_pace_told(configure, dataset, monkeypatch, watch):
    from training.run import plan as plans

    assert not any("made for a GPU" in choice for choice in choices_of(configure(device="cpu"), dataset))
    monkeypatch.setattr(plans, "LARGE_FOR_A_CPU", 100_000)
    assert any("0 million parameters is made for a GPU" in c for c in choices_of(configure(device="cpu"), dataset))
    monkeypatch.setattr(plans, "LONG", 1e-6)
    watcher = watch(stop_after=2)
    watcher.train(configure(device="cpu"))
    (said,) = [text for text in watcher.messages if text.startswith("The first step took")]
    assert "at this pace the other 11 take" in said


def test_measuring_is_told_pair_by_pair(whole_run):
    assert whole_run[1].measured == [(0, 1), (1, 1)]
