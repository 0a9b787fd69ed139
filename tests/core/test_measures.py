"""The measures of an evaluation, against values that are known."""

import math

import pytest
import torch
from torch.nn import functional

from training.data import metrics
from training.data.shards import RefinerDataset
from training.objectives.evaluate import centre_crop, evaluate, fit_sharpening, sharpen, to_picture
from training.objectives.residual import flow


def noise(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def blurred(picture):
    return functional.avg_pool2d(picture[None], 5, 1, 2, count_include_pad=False)[0]


# ---- PSNR and SSIM ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error, decibel", [(0.1, 20.0), (0.01, 40.0), (0.5, 20 * math.log10(2))])
def test_psnr_of_a_constant_error_is_known(error, decibel):
    target = torch.full((3, 16, 16), 0.4)
    assert metrics.psnr(target + error, target) == pytest.approx(decibel, abs=1e-3)


def test_psnr_measures_all_channels_together():
    target = torch.zeros(3, 16, 16)
    picture = target.clone()
    picture[1] = 0.3  # mean square error 0.03
    assert metrics.psnr(picture, target) == pytest.approx(-10 * math.log10(0.03), abs=1e-3)


def test_ssim_is_one_for_equal_pictures_and_falls_with_damage():
    target = noise(3, 32, 32)
    assert metrics.ssim(target, target) == pytest.approx(1.0, abs=1e-6)
    little, much = (metrics.ssim((target + k * noise(3, 32, 32, seed=1)) / (1 + k), target) for k in (0.2, 1.0))
    assert 1 > little > much > 0


def test_ssim_of_two_flat_pictures_is_its_luminance_term():
    """Wang et al. 2004, equation 6: (2 a b + c1) / (a^2 + b^2 + c1), c1 = 0.01^2; contrast and structure are 1."""
    a, b = 0.2, 0.6
    found = metrics.ssim(torch.full((3, 16, 16), a), torch.full((3, 16, 16), b))
    assert found == pytest.approx((2 * a * b + 1e-4) / (a**2 + b**2 + 1e-4), abs=1e-4)


def test_ssim_is_that_of_the_paper():
    """Equation 13 in a Gaussian window of 11 x 11, sigma 1.5, averaged where the window fits (Wang et al. 2004)."""
    x, y = noise(3, 24, 30).double(), noise(3, 24, 30, seed=1).double()
    line = torch.exp(-((torch.arange(11, dtype=torch.float64) - 5) ** 2) / (2 * 1.5**2))
    window = (torch.outer(line, line) / line.sum() ** 2)[None, None]

    def mean(values):
        return functional.conv2d(values[:, None], window)[:, 0]

    mx, my = mean(x), mean(y)
    vx, vy, vxy = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    expected = (2 * mx * my + c1) * (2 * vxy + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
    assert metrics.ssim(x.float(), y.float()) == pytest.approx(float(expected.mean()), abs=1e-5)


@pytest.mark.parametrize("height, width", [(8, 8), (7, 20), (10, 64), (11, 11)])
def test_pictures_smaller_than_the_window_are_measured_too(height, width):
    target = noise(3, height, width)
    assert metrics.ssim(target, target) == pytest.approx(1.0, abs=1e-6)
    assert metrics.ssim(1 - target, target) < 0.5


# ---- the radial spectrum ---------------------------------------------------------------------------------------------


def test_the_spectrum_distance_of_equal_pictures_is_zero():
    assert metrics.spectrum_distance(noise(3, 64, 64), noise(3, 64, 64)) == 0


def test_a_blurred_picture_is_far_in_spectrum_and_a_more_blurred_one_farther():
    target = noise(3, 64, 64)
    once = metrics.spectrum_distance(blurred(target), target)
    twice = metrics.spectrum_distance(blurred(blurred(target)), target)
    assert 1 < once < twice


def test_other_noise_of_the_same_kind_is_near_in_spectrum():
    """What PSNR cannot see: invented detail of the right strength counts as detail."""
    target, other = noise(3, 64, 64), noise(3, 64, 64, seed=1)
    assert metrics.spectrum_distance(other, target) < 0.5 < metrics.spectrum_distance(blurred(target), target) / 2


def test_brightness_is_no_detail():
    target = noise(3, 64, 64) / 2
    assert metrics.spectrum_distance(target + 0.3, target) < 1e-6


def test_half_the_contrast_is_the_same_distance_at_every_scale():
    target = noise(3, 64, 64)
    assert metrics.spectrum_distance(target / 2, target) == pytest.approx(math.log(4), rel=1e-3)


@pytest.mark.parametrize("period", [4, 8, 16])
def test_a_wave_shows_in_the_ring_of_its_frequency(period):
    wave = torch.sin(2 * math.pi * torch.arange(64) / period).expand(3, 64, 64)
    ring = int(torch.argmax(metrics.radial_spectrum(wave, bands=32)))
    assert abs(ring - 64 / period) <= 1  # 32 rings up to 1/2 cycle a pixel: ring = 64 / period
    upright = metrics.radial_spectrum(wave.transpose(-1, -2), bands=32)
    assert torch.allclose(upright, metrics.radial_spectrum(wave, bands=32))


# ---- the best fixed filter -------------------------------------------------------------------------------------------


def smooth_filter(size=3):
    kernel = torch.full((size, size), 0.05)
    kernel[size // 2, size // 2] = 0.6
    return kernel


def test_the_identity_kernel_leaves_a_picture_as_it_is():
    kernel = torch.zeros(9, 9)
    kernel[4, 4] = 1
    b = noise(3, 16, 20)
    assert torch.equal(sharpen(b, kernel), b)


def test_a_filter_is_applied_to_each_channel_and_not_turned_around():
    b = torch.zeros(3, 16, 16)
    b[1, 8, 8] = 1
    kernel = torch.zeros(3, 3)
    kernel[1, 2] = 1  # takes the value from the right
    found = sharpen(b, kernel)
    assert found[1, 8, 7] == 1 and found.sum() == 1


def test_the_fit_finds_a_filter_that_relates_base_and_target(tmp_path, build_pairs):
    """Targets that ARE a filtered base: the fit must give that very filter, padded with zeros."""
    known = torch.tensor([[0.0, -0.3, 0.1], [-0.2, 1.9, -0.4], [0.0, -0.2, 0.1]])
    from training.data.shards import DatasetWriter

    latent = {"name": "pixels", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}
    with DatasetWriter(tmp_path / "filtered", latent=latent, vae=None, base={"kind": "x"}) as writer:
        for i in range(3):
            b = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(i))
            writer.add(sharpen(b, known), b, source=f"{i}", sha256="0", group=f"{i}", split="train")
        # what is held out has no say
        writer.add(b, 5 * b, source="x", sha256="0", group="x", split="held_out")
    found = fit_sharpening(RefinerDataset.open(tmp_path / "filtered"), None)
    assert found.shape == (9, 9)
    assert (found - functional.pad(known, (3,) * 4)).abs().max() < 1e-4


def test_the_fit_undoes_a_blur_as_well_as_a_fixed_filter_can(dataset):
    data = RefinerDataset.open(dataset)
    kernel = fit_sharpening(data, None)
    left = sum(float((sharpen(p["b"], kernel) - p["z"]).square().mean()) for p in map(data.read, data.train))
    base = sum(float((p["b"] - p["z"]).square().mean()) for p in map(data.read, data.train))
    assert left < 0.7 * base
    # no neighbour in filter space does better on the same pairs: it is the least-squares answer
    for seed in range(3):
        other = kernel + 1e-2 * torch.randn(9, 9, generator=torch.Generator().manual_seed(seed))
        worse = sum(float((sharpen(p["b"], other) - p["z"]).square().mean()) for p in map(data.read, data.train))
        assert worse > left


# ---- crops and pictures ----------------------------------------------------------------------------------------------


def test_the_measured_crop_is_the_centre_of_both():
    places = torch.arange(10 * 12.0).reshape(1, 10, 12)
    z, b = centre_crop({"z": places, "b": -places}, 4)
    assert torch.equal(z, places[:, 3:7, 4:8]) and torch.equal(b, -z)
    assert centre_crop({"z": places, "b": places}, None)[0].shape == (1, 10, 12)
    assert centre_crop({"z": places, "b": places}, 11)[0].shape == (1, 10, 11)


def test_pixels_and_previews_become_pictures_in_their_range():
    rgb = torch.tensor([-2.0, -1.0, 0.0, 1.0, 3.0]).expand(3, 1, 5)
    assert torch.equal(to_picture(rgb, None)[0, 0], torch.tensor([0, 0, 0.5, 1, 1]))
    preview = {"weight": [[0.5, 0, 0], [0, 0.5, 0], [0, 0, 0.5], [0.1, 0.1, 0.1]], "bias": [0.2, 0.0, -0.2]}
    latent = torch.ones(4, 2, 2)
    expected = torch.tensor([0.8, 0.6, 0.4]) / 2 + 0.5
    torch.testing.assert_close(to_picture(latent, preview)[:, 0, 0], expected)
    assert to_picture(latent, None).shape == (3, 2, 2)  # latents without a preview: something grey


# ---- an evaluation ---------------------------------------------------------------------------------------------------


class Oracle:
    """A refiner that knows the answer up to a share: it ends at z + (1 - share) (b + s e - z)."""

    def __init__(self, answers, s=0.5, share=1.0):
        self.answers, self.s, self.share, self.asked = answers, s, share, []

    def remembering(self):
        return self

    def refine(self, b, e, condition, times):
        self.asked.append((e.clone(), len(times) - 1, condition))
        z = next(z for z, base in self.answers if torch.equal(base, b[0]))[None]
        return flow.sample(lambda x, t: self.share * flow.velocity(z, b, e, self.s), b, e, self.s, times)

    def loss_at(self, z, b, e, condition, times):
        return [float(t) for t in times]


def run(data, oracle, indices, **options):
    given = dict(sigmas=[1.0, 0.5], crop=None, seed=3, device=torch.device("cpu"))
    return evaluate(oracle, data, indices, {"context": torch.zeros(1, 8)}, **given | options)


@pytest.fixture
def data(dataset):
    return RefinerDataset.open(dataset)


def answers(data):
    return [(pair["z"], pair["b"]) for pair in map(data.read, range(len(data.pairs)))]


def test_a_perfect_refiner_measures_perfectly(data):
    measured = run(data, Oracle(answers(data)), [0, 1])
    assert measured.count == 2 and measured.rows["base"]["relative_residual"] == 1
    for steps in ("1 step", "2 steps", "4 steps", "8 steps"):
        row = measured.rows[steps]
        assert row["relative_residual"] < 1e-5 and row["ssim"] == pytest.approx(1, abs=1e-4)
        assert row["psnr"] > 80 and row["spectrum"] < 1e-2
    assert measured.loss_per_sigma == {"1": 1.0, "0.5": 0.5}
    assert measured.rows["sharpening"]["psnr"] > measured.rows["base"]["psnr"]


def test_the_measures_are_means_over_the_pairs(data):
    oracle = Oracle(answers(data), share=0.5)
    both = run(data, oracle, [0, 1], sharpening=False)
    single = [run(data, oracle, [k], sharpening=False) for k in (0, 1)]
    for name, row in both.rows.items():
        for measure, value in row.items():
            assert value == pytest.approx(sum(one.rows[name][measure] for one in single) / 2)


def test_a_pair_has_its_own_noise_whoever_else_is_measured(data):
    oracle = Oracle(answers(data))
    run(data, oracle, [0, 1], step_counts=(1,))
    run(data, oracle, [1], step_counts=(4,))
    run(data, oracle, [1], step_counts=(4,), seed=4)
    (first, *_), (second, *_), (again, steps, _), (other, *_) = oracle.asked
    assert torch.equal(again, second) and steps == 4
    assert not torch.equal(first, second) and not torch.equal(other, second)


def test_the_pictures_shown_are_those_of_the_refiners_own_steps(data):
    oracle = Oracle(answers(data))
    measured = run(data, oracle, [0], step_counts=(1, 8))
    z, b = answers(data)[0]
    (shown,) = measured.pictures
    assert torch.equal(shown["target"], to_picture(z, None)) and torch.equal(shown["base"], to_picture(b, None))
    assert (shown["refined"] - shown["target"]).abs().max() < 1e-5


def test_an_evaluation_stops_where_it_is_told(data):
    stops = iter([False, True])
    measured = run(data, Oracle(answers(data)), [0, 1], should_stop=lambda: next(stops))
    assert measured.count == 1 and len(measured.pictures) == 1
