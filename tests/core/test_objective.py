"""What is minimised: Min-SNR weighting, and the times a run was trained on."""

import json
import math

import pytest
import torch

from training.errors import BadInput
from training.objectives.histograms import BINS, TimesHistogram
from training.objectives.residual import flow
from training.run.optim.schedule import warmup_schedule
from training.run.report.journal import read as read_journal

BRIEF = {"validation__pictures": 0, "epochs": 1}


@pytest.mark.parametrize("s, residual, gamma", [(0.1, 0.1, 5.0), (0.3, 0.1, 1.0), (0.05, 0.2, 20.0)])
def test_the_weight_is_that_of_min_snr(s, residual, gamma):
    t = torch.linspace(0.01, 1, 100)
    expected = [x**2 * min(((1 - x) * residual / (x * s)) ** 2, gamma) for x in t.double().tolist()]
    assert flow.min_snr_weight(t, s, residual, gamma).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-8)
    assert float(flow.min_snr_weight(torch.ones(1), s, residual, gamma)) == 0


def test_the_snr_is_the_measured_one_of_the_state():
    """Given the base, the residual is the signal and the noise is the rest."""
    generator = torch.Generator().manual_seed(0)
    z, b, e = (torch.randn(1, 1, 500, 500, generator=generator) for _ in range(3))
    b = z + 0.2 * b
    t, s = torch.tensor([0.4]), 0.3
    known = flow.state(z, b, torch.zeros_like(e), t, s) - b  # (1 - t)(z - b)
    noise = flow.state(z, b, e, t, s) - b - known
    snr = float(known.square().mean() / noise.square().mean())
    residual = float((z - b).square().mean().sqrt())
    assert float(flow.min_snr_weight(t, s, residual, 1e6) / t**2) == pytest.approx(snr, rel=0.01)


def test_a_weighted_run_learns_otherwise_and_its_curve_stays_the_plain_loss(configure, watch, whole_run, tmp_path):
    watcher = watch()
    result = watcher.train(configure(flow__min_snr_gamma=5.0, validation__pictures=0))
    plain = whole_run[1].losses
    assert watcher.losses[0] == plain[0] and watcher.losses[1:] != plain[1:]
    assert result.refiner.read_bytes() != whole_run[0].refiner.read_bytes()
    assert any("Min-SNR" in choice for choice in result.report["choices"])


def test_the_gradient_is_that_of_the_weighted_loss(configure, watch, dataset, monkeypatch):
    """Every sample at one time: the gradient is the plain one times that time's weight."""
    monkeypatch.setattr(flow, "draw_times", lambda count, *_: torch.full((count,), 0.5))
    norms = []
    for gamma, name in ((None, "plain"), (0.3, "weighted")):
        config = configure(run=configure().run.with_name(name), flow__min_snr_gamma=gamma, **BRIEF)
        watch(stop_after=1).train(config)
        norms.append(read_journal(config.run / "metrics.jsonl")[0]["gradient_norm"])
    assert norms[1] == pytest.approx(norms[0] * 0.25 * 0.3, rel=1e-4)  # s = RMS(z - b): the SNR at 0.5 is 1


def test_min_snr_without_noise_is_refused(configure, watch):
    with pytest.raises(BadInput, match="flow.min_snr_gamma: expected a noise scale above 0, got 0"):
        watch().train(configure(flow__noise_scale=0, flow__min_snr_gamma=5.0))
    assert not configure().run.exists()


# ---- Huber's loss ---------------------------------------------------------------------------------------------------


def test_hubers_loss_is_the_square_up_to_delta_and_a_line_beyond():
    r = torch.tensor([[-3.0, -0.5, 0.0, 0.25], [0.5, 0.6, 1.0, 10.0]])[:, :, None, None].requires_grad_()
    v, delta = torch.zeros_like(r), 0.5
    expected = [
        sum(x * x if abs(x) <= delta else 2 * delta * abs(x) - delta**2 for x in row) / 4
        for row in r.detach().flatten(1).tolist()
    ]
    found = flow.huber_per_sample(r, v, 0.7, delta)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    found.sum().backward()
    assert r.grad.flatten().abs().max() == 2 * delta / 4  # no error pulls harder than one of delta
    within = torch.linspace(-0.5, 0.5, 8).reshape(1, 8, 1, 1)
    square = flow.loss_per_sample(within, within * 0, 1.0)
    assert torch.equal(flow.huber_per_sample(within, within * 0, 1.0, 0.5), square)


def test_a_run_with_hubers_loss_learns_otherwise_and_its_curve_stays_the_square(configure, watch, whole_run):
    watcher = watch()
    result = watcher.train(configure(flow={"loss": "huber", "huber_delta": 0.2}, validation__pictures=0))
    plain = whole_run[1].losses
    assert watcher.losses[0] == plain[0] and watcher.losses[1:] != plain[1:]
    assert any("Huber's loss: errors beyond 0.2" in choice for choice in result.report["choices"])


def test_a_delta_that_no_error_reaches_is_the_square(configure, watch, whole_run):
    from training.objectives.residual.file import load_refiner

    result = watch().train(configure(flow={"loss": "huber", "huber_delta": 1e3}, validation__pictures=0))
    one, other = (load_refiner(path)[0] for path in (result.refiner, whole_run[0].refiner))
    assert all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)


# ---- the histogram of the times -------------------------------------------------------------------------------------


def test_times_are_counted_on_the_sigmas_and_beside_them():
    times = TimesHistogram(flow.sigmas(4)[:-1])
    times.add(torch.tensor([1.0, 0.75, 0.75, 0.25, 0.05, 0.0500001, 0.999, 1e-6]))
    found = times.as_json()
    assert found["on_sigmas"] == {"1": 1, "0.75": 2, "0.5": 0, "0.25": 1}
    assert {edge: count for edge, count in found["beside_them_up_to"].items() if count} == {"0.05": 2, "0.1": 1, "1": 1}
    again = TimesHistogram(flow.sigmas(4)[:-1])
    again.restore(json.loads(json.dumps(times.state())))
    assert again.as_json() == found
    again.restore({})
    assert again.as_json() == found


def test_the_report_has_every_time_of_the_run_also_after_a_stop(configure, watch, whole_run):
    assert watch(stop_after=5).train(configure()).status == "stopped"
    found = watch().train(configure()).report["watched"]["times"]
    assert found == whole_run[0].report["watched"]["times"]
    assert sum(found["on_sigmas"].values()) + sum(found["beside_them_up_to"].values()) == 12 * 2
    assert len(found["beside_them_up_to"]) == BINS and sum(found["on_sigmas"].values()) > 4


@pytest.mark.parametrize("steps", [8, 5])
def test_a_run_on_the_grid_alone_is_trained_on_exactly_the_sigmas_of_the_sampler(configure, watch, steps):
    result = watch().train(configure(flow__on_grid=1.0, flow__steps=steps, data__repeats=3, **BRIEF))
    found = result.report["watched"]["times"]
    assert list(found["on_sigmas"]) == [f"{t:g}" for t in flow.sigmas(steps)[:-1].tolist()]
    assert all(count > 0 for count in found["on_sigmas"].values())
    assert not any(found["beside_them_up_to"].values())


# ---- the learning rate ----------------------------------------------------------------------------------------------


def test_the_rate_goes_by_optimizer_steps_whatever_the_accumulation(configure, watch, tmp_path):
    rates = []
    for accumulation in (1, 4):  # 4 micro-steps an epoch: 8 optimizer steps each
        config = configure(
            run=tmp_path / f"run-{accumulation}", data__accumulation=accumulation, epochs=2 * accumulation,
            data__crop=8, validation__pictures=0,
        )
        result = watch().train(config)
        rates.append([line["learning_rate"] for line in read_journal(result.folder / "metrics.jsonl")])
    assert rates[0] == rates[1] == [3e-3 * warmup_schedule(step, 2, 8) for step in range(8)]
    assert math.isclose(rates[0][-1], 3e-3 * 0.5 * (1 + math.cos(math.pi * 5 / 6)))
