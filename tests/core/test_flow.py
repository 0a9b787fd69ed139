"""The residual flow: its states, its constants, its times and its sampler."""

import math

import pytest
import torch

from training.objectives.residual import flow


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def pair():
    """z, b, e of three samples, in float64 so that only the mathematics is measured."""
    z, e = draw(3, 2, 5, 4, seed=1), draw(3, 2, 5, 4, seed=2)
    return z, z + 0.4 * draw(3, 2, 5, 4, seed=3), e


def at(t):
    return torch.tensor([t] * 3, dtype=torch.float64)


def test_the_path_begins_at_the_noisy_base_and_ends_at_the_target(pair):
    z, b, e = pair
    assert torch.equal(flow.state(z, b, e, at(0.0), 0.7), z)
    assert torch.equal(flow.state(z, b, e, at(1.0), 0.7), b + 0.7 * e)


def test_each_sample_has_its_own_time(pair):
    z, b, e = pair
    x = flow.state(z, b, e, torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64), 0.7)
    assert torch.equal(x[0], z[0]) and torch.equal(x[2], b[2] + 0.7 * e[2])
    torch.testing.assert_close(x[1], 0.75 * z[1] + 0.25 * (b[1] + 0.7 * e[1]))


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
def test_velocity_is_the_derivative_of_the_state(pair, t):
    z, b, e = pair
    step = 1e-4
    slope = (flow.state(z, b, e, at(t + step), 0.7) - flow.state(z, b, e, at(t - step), 0.7)) / (2 * step)
    torch.testing.assert_close(flow.velocity(z, b, e, 0.7), slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("s", [0.0, 0.3, 2.0])
def test_the_velocity_scale_is_the_rms_of_the_velocity(s):
    z, e = draw(64, 4, 16, 16, seed=1), draw(64, 4, 16, 16, seed=2)
    b = z + 0.5 * draw(64, 4, 16, 16, seed=3)
    rms = float(flow.velocity(z, b, e, s).square().mean().sqrt())
    assert flow.velocity_scale(float((z - b).square().mean().sqrt()), s) == pytest.approx(rms, rel=0.01)


def test_a_network_that_answers_zero_has_a_loss_of_one():
    z, e = draw(16, 4, 16, 16, seed=1), draw(16, 4, 16, 16, seed=2)
    b = z + 0.5 * draw(16, 4, 16, 16, seed=3)
    v = flow.velocity(z, b, e, 0.5)
    c_v = flow.velocity_scale(0.5, 0.5)
    losses = flow.loss_per_sample(torch.zeros_like(v), v, c_v)
    assert losses.shape == (16,) and losses.mean() == pytest.approx(1.0, abs=0.02)
    assert flow.loss_per_sample(v / c_v, v, c_v).abs().max() < 1e-12


def test_the_loss_is_float32_whatever_the_network_computes_in():
    v = draw(2, 3, 8, 8, dtype=torch.float32)
    loss = flow.loss_per_sample(v.bfloat16(), v.bfloat16(), 1.0)
    assert loss.dtype == torch.float32 and float(loss.max()) == 0.0


def test_eight_sigmas_are_those_of_the_host():
    assert flow.sigmas(8).tolist() == [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]
    assert flow.sigmas(1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 16, 50])
def test_euler_with_the_exact_velocity_finds_the_target_in_any_number_of_steps(pair, steps):
    z, b, e = (x.float() for x in pair)
    v = flow.velocity(z, b, e, 0.7)
    found = flow.sample(lambda x, t: v, b, e, 0.7, flow.sigmas(steps))
    assert (found - z).abs().max() < 1e-5


def test_the_sampler_asks_at_the_sigmas_and_for_the_states_of_the_path(pair):
    z, b, e = (x.float() for x in pair)
    v, asked = flow.velocity(z, b, e, 0.7), []

    def v_of(x, t):
        asked.append(t.tolist())
        torch.testing.assert_close(x, flow.state(z, b, e, t, 0.7), rtol=0, atol=1e-5)
        return v

    flow.sample(v_of, b, e, 0.7, flow.sigmas(4))
    assert asked == [[t] * 3 for t in (1.0, 0.75, 0.5, 0.25)]


def test_a_run_split_in_two_ends_where_one_in_a_piece_does(pair):
    _, b, e = (x.float() for x in pair)

    def v_of(x, t):
        return torch.sin(3 * x) * flow.expand(t, x) + x

    times = flow.sigmas(8)
    *_, middle = flow.walk(v_of, b + 0.7 * e, times[:5])
    *_, end = flow.walk(v_of, middle, times[4:])
    assert torch.equal(end, flow.sample(v_of, b, e, 0.7, times))


def test_without_noise_the_input_gives_the_answer_away(pair):
    """Why s = 0 is trained at t = 1 alone: at every other time z can be read off [x_t, b] without learning anything."""
    z, b, e = pair
    for t in (0.125, 0.5, 0.875):
        x = flow.state(z, b, e, at(t), 0.0)
        torch.testing.assert_close((x - t * b) / (1 - t), z)
    assert torch.equal(flow.state(z, b, e, at(1.0), 0.0), b)  # and there is nothing of z in it at t = 1


def test_with_noise_the_input_does_not_give_the_answer_away():
    """The same reading is off by t s e / (1 - t): at t = 7/8 seven times the residual itself."""
    z, e = draw(64, 1, 16, 16, seed=1), draw(64, 1, 16, 16, seed=2)
    b = z + 0.5 * draw(64, 1, 16, 16, seed=3)
    t = torch.full((64,), 0.875, dtype=torch.float64)
    read = (flow.state(z, b, e, t, 0.5) - 0.875 * b) / 0.125
    assert float((read - z).square().mean().sqrt()) == pytest.approx(7 * 0.5, rel=0.02)


# ---- training times ------------------------------------------------------------------------------------------------

GRID = flow.sigmas(8)[:-1]


def times(count, on_grid, draws=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([flow.draw_times(count, GRID, on_grid, generator) for _ in range(draws)])


@pytest.mark.parametrize("on_grid", [0.0, 0.5, 1.0])
def test_times_lie_above_zero_and_reach_one(on_grid):
    t = times(4, on_grid, draws=5000)
    assert t.dtype == torch.float32 and t.shape == (5000, 4)
    assert float(t.min()) > 0 and float(t.max()) <= 1
    assert float(t.max()) > 0.999 and float(t.min()) <= 0.125


def test_a_uniform_draw_of_zero_becomes_one(monkeypatch):
    """rand is in [0, 1), times are in (0, 1]: the closed end must be the one that can be trained on."""
    monkeypatch.setattr(torch, "rand", lambda *size, **options: torch.zeros(*size, dtype=torch.float64))
    assert times(1, 0.0).tolist() == [[1.0]]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_the_asked_share_of_times_lies_on_the_grid(share):
    t = times(4, share, draws=5000).flatten()
    found = float(torch.isin(t, GRID).double().mean())
    assert found == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 20_000))


def test_grid_only_means_every_sigma_equally_often_and_no_other_time():
    t = times(4, 1.0, draws=4000).flatten()
    values, counts = t.unique(return_counts=True)
    assert values.tolist() == GRID.flip(0).tolist()
    assert float((counts / 2000 - 1).abs().max()) < 0.1


def test_no_grid_means_uniform_times():
    t = times(4, 0.0, draws=5000).flatten()
    assert not torch.isin(t, GRID).any()
    counts = torch.histc(t, 10, 0, 1)
    assert float((counts / 2000 - 1).abs().max()) < 0.1


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_times_of_a_batch_are_stratified(count):
    for batch in times(count, 0.0, draws=50):
        strata = torch.ceil(batch.double() * count).long() - 1
        assert sorted(strata.tolist()) == list(range(count))
    if count == 8:  # a batch as large as the grid meets each sigma once
        assert all(sorted(batch.tolist()) == sorted(GRID.tolist()) for batch in times(8, 1.0, draws=50))


def test_the_place_in_the_batch_says_nothing_about_the_time():
    means = times(4, 0.5, draws=5000).mean(0)
    assert float((means - means.mean()).abs().max()) < 0.02


def test_times_follow_from_the_generator_alone():
    torch.manual_seed(1)
    first = times(6, 0.5, seed=3)
    torch.manual_seed(2)
    assert torch.equal(times(6, 0.5, seed=3), first)
    assert not torch.equal(times(6, 0.5, seed=4), first)


# ---- the sampler as a sampler of distributions ----------------------------------------------------------------------


def test_sampling_draws_from_the_posterior():
    """Targets z = b + r, r ~ N(m, q^2): the exact mean velocity is linear in x, and the walk must end in N(b + m, q^2).

    With d = x_t - b = (1 - t) r + t s e, E[r | d] = m + k (d - (1 - t) m), k = (1 - t) q^2 / ((1-t)^2 q^2 + t^2 s^2),
    and E[v | x] = s E[e | x] - E[r | x] = (d - E[r | x]) / t.
    """
    m, q, s = 0.3, 0.5, 0.6

    def posterior_velocity(x, t):
        t = flow.expand(t.double(), x)
        d = x - b
        gain = (1 - t) * q**2 / ((1 - t) ** 2 * q**2 + t**2 * s**2)
        return (d - (m + gain * (d - (1 - t) * m))) / t

    b, e = draw(20_000, 1, 1, 1, seed=4), draw(20_000, 1, 1, 1, seed=5)
    residual = flow.sample(posterior_velocity, b, e, s, flow.sigmas(400)) - b
    assert float(residual.mean()) == pytest.approx(m, abs=0.02)
    assert float(residual.std()) == pytest.approx(q, rel=0.02)
    # one step lands on the mean of all answers: that is why several steps are worth their time
    one = flow.sample(posterior_velocity, b, e, s, flow.sigmas(1)) - b
    assert float(one.mean()) == pytest.approx(m, abs=0.01) and float(one.std()) < 1e-6


# ---- strength -------------------------------------------------------------------------------------------------------


def test_strength_changes_no_bit_at_its_ends():
    b, refined = draw(2, 3, 8, 8, seed=1, dtype=torch.float32), draw(2, 3, 8, 8, seed=2, dtype=torch.float32)
    assert torch.equal(flow.blend(b, refined, 0.0), b)
    assert torch.equal(flow.blend(b, refined, 1.0), refined)


def test_more_strength_is_never_further_from_the_refined_latent():
    b, refined = draw(2, 3, 8, 8, seed=1, dtype=torch.float32), draw(2, 3, 8, 8, seed=2, dtype=torch.float32)
    strengths = [k / 64 for k in range(65)]
    moved = [float((flow.blend(b, refined, k) - b).double().square().mean().sqrt()) for k in strengths]
    left = [float((flow.blend(b, refined, k) - refined).double().square().mean().sqrt()) for k in strengths]
    assert moved == sorted(moved) and left == sorted(left, reverse=True)
    assert moved[32] == pytest.approx(moved[64] / 2, rel=1e-5)


def test_a_mask_of_ones_changes_no_bit_and_one_of_zeros_hides_what_it_covers():
    output, v = torch.randn(2, 3, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    plain = flow.loss_per_sample(output, v, 0.7)
    assert torch.equal(flow.loss_per_sample(output, v, 0.7, torch.ones(3, 1, 6, 6)), plain)
    mask = torch.zeros(3, 1, 6, 6)
    mask[:, :, :2] = 1
    hidden = output.clone()
    hidden[:, :, 2:] = 1e3
    masked = flow.loss_per_sample(hidden, v, 0.7, mask)
    assert torch.allclose(masked, flow.loss_per_sample(output[:, :, :2], v[:, :, :2], 0.7))
    assert torch.allclose(flow.loss_per_sample(output, v, 0.7, mask / 2), masked)
    assert torch.equal(flow.loss_per_sample(output, v, 0.7, 0 * mask), torch.zeros(3))
