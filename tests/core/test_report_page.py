"""report.png: what the page of a run shows, and that it never costs the run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from training.errors import TrainingFailed
from training.objectives.histograms import TimestepHistogram
from training.objectives.residual import flow
from training.run.report.charts import chart_times
from training.run.report.journal import read as read_journal
from training.run.report.labels import duration, measure_label, row_label
from training.run.report.memory_log import MemoryLog
from training.run.report.page import RunPage
from training.run.report.report import read_grid, save_grid


@pytest.fixture
def pages(monkeypatch):
    """The figures that runs have drawn, as they were when they were written."""
    drawn, figure = [], RunPage.figure
    monkeypatch.setattr(RunPage, "figure", lambda *given: drawn.append(figure(*given)) or drawn[-1])
    return drawn


def axes_of(figure):
    """{title: axes} of the charts."""
    found = {}
    for axes in figure.get_axes():
        title = axes.get_title() or axes.get_title(loc="left")
        found.setdefault(title, axes)
    return found


def line(axes, label):
    (found,) = [line for line in axes.get_lines() if line.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def text_of(figure):
    """All text of the figure in one line, without the marks of a list."""
    said = [text.get_text() for axes in figure.get_axes() for text in axes.texts]
    said += [axes.get_title(loc=place) for axes in figure.get_axes() for place in ("left", "center")]
    return re.sub(r"\s+", " ", " ".join(said).replace("•", ""))


def column(lines, name):
    found = [(entry["step"], entry[name]) for entry in lines if entry.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def test_the_page_of_a_finished_run_shows_what_the_journal_and_the_report_hold(configure, watch, pages):
    result = watch().train(configure())
    (figure,) = pages
    charts, lines = axes_of(figure), read_journal(result.folder / "metrics.jsonl")
    loss = charts["loss (1 = predicts nothing)"]
    assert line(loss, "each step") == column(lines, "loss")
    averaged = "held-out, averaged weights (EMA): what is saved"
    assert line(loss, averaged) == column(lines, "validation/loss") and line(loss, averaged)[0] == [4, 8, 12]
    assert line(loss, "held-out, weights as they are") == column(lines, "validation/loss_unaveraged")
    (rate,) = charts["learning rate"].get_lines()
    assert (list(rate.get_xdata()), list(rate.get_ydata())) == column(lines, "learning_rate")
    norm = charts["gradient norm, before clipping"].get_lines()[0]
    assert (list(norm.get_xdata()), list(norm.get_ydata())) == column(lines, "gradient_norm")
    (sigma,) = charts["loss at each sigma, at the end"].get_lines()
    per_sigma = result.report["evaluation"]["loss_per_sigma"]
    assert dict(zip(sigma.get_xdata(), sigma.get_ydata(), strict=True)) == {float(t): x for t, x in per_sigma.items()}
    drawn = sum(patch.get_height() for patch in charts["training times drawn"].patches)
    assert drawn == 12 * 2  # steps of two pairs
    assert "loss scale (fp16)" not in charts

    said = text_of(figure)
    assert said.count("run: done") == 1 and "12 of 12 steps (3 epochs) of 2 pairs in" in said and "on cpu" in said
    for choice in result.report["choices"]:
        assert re.sub(r"\s+", " ", choice) in said
    for name, row in result.report["evaluation"]["measures"].items():
        assert row_label(name) in said and f"{row['psnr']:.2f}" in said
    assert "Means over 1 held-out pair" in said
    with Image.open(result.folder / "report.png") as page:
        page.load()
        assert page.format == "PNG" and page.width == 1600


def test_the_unaveraged_weights_are_measured_on_the_same_pairs(configure, watch):
    """With a decay of 0 the average is the weights themselves, so both losses are one."""
    lines = read_journal(watch().train(configure(ema_decay=0)).folder / "metrics.jsonl")
    averaged, plain = (column(lines, f"validation/{name}")[1] for name in ("loss", "loss_unaveraged"))
    assert len(plain) == 3 and plain == pytest.approx(averaged, rel=1e-6)
    result = watch().train(configure(ema_decay=0.9, run=configure().run.parent / "averaged"))
    lines = read_journal(result.folder / "metrics.jsonl")
    averaged, plain = (column(lines, f"validation/{name}")[1] for name in ("loss", "loss_unaveraged"))
    assert plain != pytest.approx(averaged, rel=1e-3)


def test_pictures_over_time_are_those_of_the_validations(configure, watch, pages, build_pairs):
    config = configure(dataset=build_pairs(held_out=2), validation__pictures=2, validation__every=2, epochs=4)
    folder = watch().train(config).folder
    shown = [axes for axes in pages[0].get_axes() if axes.get_images()]
    titles = ["base", "step 2", "step 6", "step 10", "step 12", "step 16", "target"]
    # the eight validations at steps 2 to 16, of which five are shown, the first and the last among them; two pairs
    assert [axes.get_title() for axes in shown] == titles + [""] * 7
    rows = {step: read_grid(folder / "validation" / f"step-{step:08d}.png") for step in range(2, 17, 2)}
    for place, axes in enumerate(shown):
        title, pair = shown[place % 7].get_title(), place // 7
        step = int(title.split()[-1]) if title.startswith("step") else 16
        name = "refined" if title.startswith("step") else title
        assert np.array_equal(axes.get_images()[0].get_array(), np.asarray(rows[step][pair][name]))


def test_skipped_steps_of_fp16_are_marked(configure, watch, pages, monkeypatch):
    loss = flow.loss_per_sample
    monkeypatch.setattr(flow, "loss_per_sample", lambda *given: loss(*given) * 1e3)  # overflows at the first scales
    result = watch().train(configure(precision="fp16", data__crop=8, validation__pictures=0))
    skipped = result.report["watched"]["loss_scale"]["skipped"]
    scale = axes_of(pages[0])["loss scale (fp16)"]
    steps, scales = line(scale, f"skipped steps: {skipped}")
    assert skipped >= 3 and steps == list(range(1, skipped + 1))
    assert scales == [65536 / 2**k for k in range(1, skipped + 1)]


def test_a_run_of_one_step_without_held_out_pairs_has_a_page(configure, watch, pages, build_pairs):
    config = configure(dataset=build_pairs(held_out=0), epochs=1, data__batch_size=9)
    watch().train(config)
    said = text_of(pages[0])
    assert "1 of 1 steps (1 epoch) of 9 pairs" in said and "Means over 4 training pairs" in said
    shown = [axes.get_title() for axes in pages[0].get_axes() if axes.get_images()]
    assert shown[:3] == ["base", "at the end", "target"]
    assert any("Training pairs (none were held out)" in text.get_text() for text in pages[0].texts)


def test_a_stopped_run_has_a_page_and_the_finished_one_replaces_it(configure, watch, pages):
    stopped = watch(stop_after=5).train(configure())
    first = (stopped.folder / "report.png").read_bytes()
    assert "run: stopped" in text_of(pages[0]) and stopped.message in text_of(pages[0])
    watch().train(configure())
    assert "run: done" in text_of(pages[1]) and (stopped.folder / "report.png").read_bytes() != first
    assert line(axes_of(pages[1])["loss (1 = predicts nothing)"], "each step")[0] == list(range(1, 13))


@pytest.mark.parametrize("good_steps", [0, 5])
def test_a_failed_run_has_a_page_with_its_sentence(configure, watch, pages, monkeypatch, good_steps):
    loss, calls = flow.loss_per_sample, []

    def spoil(*given):
        calls.append(0)
        return loss(*given) * (float("nan") if len(calls) > good_steps else 1)

    monkeypatch.setattr(flow, "loss_per_sample", spoil)
    with pytest.raises(TrainingFailed) as caught:
        watch().train(configure(validation__pictures=0))
    assert "run: failed" in text_of(pages[0]) and re.sub(r"\s+", " ", str(caught.value)) in text_of(pages[0])
    assert (configure().run / "report.png").stat().st_size > 10_000


def test_a_page_that_cannot_be_drawn_costs_nothing_and_is_told(configure, watch, monkeypatch, whole_run):
    def broken(*_):
        raise ValueError("no such colour")

    monkeypatch.setattr(RunPage, "figure", broken)
    watcher = watch()
    result = watcher.train(configure())
    assert result.status == "done" and result.refiner.read_bytes() == whole_run[0].refiner.read_bytes()
    assert any("report.png could not be written (ValueError: no such colour)" in text for text in watcher.messages)
    assert not (result.folder / "report.png").exists()


def test_a_name_that_looks_like_mathematics_is_shown_as_it_is(configure, watch, pages, tmp_path):
    watcher = watch()
    watcher.train(configure(run=tmp_path / "100$ of $x_{", epochs=1))
    assert "100$ of $x_{: done" in text_of(pages[0])
    assert (tmp_path / "100$ of $x_{" / "report.png").exists()


# ---- what it is made from ------------------------------------------------------------------------------------------


def test_a_strip_of_pictures_is_taken_apart_as_it_was_put_together(tmp_path):
    generator = torch.Generator().manual_seed(0)
    sizes = [(16, 24), (30, 10)]
    pictures = [
        {name: torch.rand(3, *size, generator=generator) for name in ("base", "refined", "target")} for size in sizes
    ]
    save_grid(pictures, tmp_path / "strip.png")
    for row, before in zip(read_grid(tmp_path / "strip.png"), pictures, strict=True):
        for name, picture in row.items():
            expected = (before[name] * 255).round().byte().permute(1, 2, 0).numpy()
            assert np.array_equal(np.asarray(picture), expected)
    Image.new("RGB", (56, 16)).save(tmp_path / "older.png")  # one that does not say how it was put together
    assert read_grid(tmp_path / "older.png") == []
    (tmp_path / "cut.png").write_bytes((tmp_path / "strip.png").read_bytes()[:200])
    assert read_grid(tmp_path / "cut.png") == []


def test_the_memory_log_goes_on_where_the_run_does(tmp_path):
    log = MemoryLog(tmp_path, 0, 800, lambda: {"allocated": 7, "reserved": 9})
    for step in range(1, 13):
        log.look(step)
    assert log.series() == {"allocated": ([4, 8, 12], [7, 7, 7]), "reserved": ([4, 8, 12], [9, 9, 9])}
    again = MemoryLog(tmp_path, 8, 800, lambda: {"allocated": 5, "reserved": 6})
    again.look(12)
    lines = [json.loads(text) for text in (tmp_path / "memory.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["allocated"]) for entry in lines] == [(4, 7), (8, 7), (12, 5)]
    new = tmp_path / "new"
    new.mkdir()
    assert MemoryLog(new, 0, 1, dict).series() == {}


def test_measures_are_called_as_in_the_readme():
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    for name in ("psnr", "ssim", "spectrum"):
        assert f"| {measure_label(name)} |" in text
    for name in ("base", "sharpening", "1 step", "8 steps"):
        assert f"\n| {row_label(name)} |" in text


def test_timesteps_of_sdxls_refiner_are_drawn():
    from matplotlib.figure import Figure

    times = TimestepHistogram(199)
    times.add(torch.arange(0, 200, 3))
    axes = Figure().add_subplot()
    chart_times(axes, times.as_json())
    assert sum(patch.get_height() for patch in axes.patches) == 67 and axes.get_xlabel() == "timestep"


def test_pictures_of_steps_that_are_not_trained_yet_are_left_out(configure, watch, pages):
    config = configure()
    watch(stop_after=6).train(config)
    later = config.run / "validation" / "step-00000008.png"
    later.write_bytes((config.run / "validation" / "step-00000004.png").read_bytes())
    watch(stop_after=1).train(config)
    assert "step 4" in text_of(pages[-1]) and "step 8" not in text_of(pages[-1])


def test_a_duration_is_written_one_way():
    seconds = [0.04, 8.24, 9.97, 45.4, 59.7, 75, 3599.6, 3700, 7325]
    assert [duration(each) for each in seconds] == [
        "0.0 s", "8.2 s", "10 s", "45 s", "1 min 0 s", "1 min 15 s", "1 h 0 min", "1 h 1 min", "2 h 2 min",
    ]  # fmt: skip
