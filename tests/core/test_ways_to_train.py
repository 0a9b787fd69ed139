"""Ways to train: one shot, accumulation, text, latents, precisions, and what is remarked on before a run."""

import math

import pytest
import torch

from tests.core.conftest import step_lines
from training.data.batches import BatchSource
from training.objectives.residual import flow
from training.objectives.residual.file import load_meta, load_refiner
from training.objectives.residual.model import Refiner
from training.run.checkpoints.checkpoint import load_newest
from training.run.optim.schedule import warmup_schedule
from training.run.plan import make_plan

ATTENTION = {
    "block_channels": [32], "layers_per_block": 1, "transformer_depth": [1], "middle_depth": 1, "heads": [1],
}
BRIEF = {"validation__pictures": 0, "epochs": 1}

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
        rates = [line["learning_rate"] for line in step_lines(run)]
        assert rates == pytest.approx([3e-3 * warmup_schedule(step, 2, steps) for step in range(steps)])


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
        runs.append(step_lines(run))
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
    norms = [step_lines(folder)[0]["gradient_norm"] for folder in (result.folder, whole_run[0].folder)]
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
