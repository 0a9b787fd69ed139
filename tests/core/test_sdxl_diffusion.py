"""SDXL's diffusion as its refiner sees it: sigmas, timesteps, the state, the walk; and its network."""

import json
import math

import pytest
import torch

from tests.core.test_sdxl_refiner import TINY
from training.config.network import UNetConfig
from training.objectives.histograms import TimestepHistogram
from training.objectives.residual import flow
from training.objectives.sdxl_refiner import diffusion
from training.objectives.sdxl_refiner.keys import PREFIX, original_names
from training.objectives.sdxl_refiner.unet import SHAPE, build


def test_the_sigmas_are_those_of_the_formula_and_the_hand_over_is_at_0_569():
    alpha_bar, expected = 1.0, []
    for k in range(1000):
        root = math.sqrt(0.00085) + (math.sqrt(0.012) - math.sqrt(0.00085)) * k / 999
        alpha_bar *= 1 - root**2
        expected.append(math.sqrt((1 - alpha_bar) / alpha_bar))
    assert diffusion.SIGMAS.tolist() == pytest.approx(expected, rel=1e-6)
    assert float(diffusion.SIGMAS[199]) == pytest.approx(0.569, abs=5e-4)
    assert float(diffusion.SIGMAS[0]) == pytest.approx(0.0292, abs=5e-5)


@pytest.mark.parametrize("last", [199, 99])
def test_timesteps_are_uniform_over_0_to_last_and_never_outside(last):
    generator = torch.Generator().manual_seed(3)
    drawn = [diffusion.draw_timesteps(7, last, generator) for _ in range(8000)]
    counts = torch.bincount(torch.cat(drawn), minlength=last + 1)
    assert len(counts) == last + 1 and counts.sum() == 56000
    expected = 56000 / (last + 1)
    assert float((counts - expected).abs().max()) < 6 * math.sqrt(expected)
    for k in drawn[:100]:  # one of each seventh
        assert sorted(int(7 * (i + 0.5) / (last + 1)) for i in k.tolist()) == pytest.approx(range(7), abs=1)


def test_a_draw_at_the_very_end_stays_inside(monkeypatch):
    almost_one = 1 - 2**-53
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.full((n,), almost_one, dtype=torch.float64))
    assert diffusion.draw_timesteps(1, 199, torch.Generator()).tolist() == [199]


def test_the_network_sees_the_variance_preserving_state():
    z, e = torch.randn(2, 3, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    k = torch.tensor([0, 100, 199])
    sigma = diffusion.SIGMAS[k]
    alpha_bar = (1 / (1 + sigma.double() ** 2)).reshape(3, 1, 1, 1)
    expected = alpha_bar.sqrt() * z + (1 - alpha_bar).sqrt() * e
    found = diffusion.network_input(diffusion.state(z, e, sigma), sigma)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert diffusion.timestep_of(sigma).tolist() == k.tolist()


def test_a_perfect_network_brings_the_noised_target_back_in_any_number_of_steps():
    z, e = torch.randn(2, 1, 4, 6, 6, generator=torch.Generator().manual_seed(1))
    for steps in (1, 3, 8, 16):
        times = diffusion.sigmas(steps)
        assert len(times) == steps + 1 and float(times[-1]) == 0 and times[0] == diffusion.SIGMAS[199]
        assert bool((times[:-1] > times[1:]).all())
        found = flow.sample(lambda x, sigma: (x - z) / sigma.reshape(-1, 1, 1, 1), z, e, 1.0, times)
        torch.testing.assert_close(found, z, rtol=0, atol=1e-5)


def test_the_histogram_refuses_no_state_and_counts_each_timestep():
    times = TimestepHistogram(24)
    times.add(torch.tensor([0, 9, 10, 24, 24]))
    assert times.as_json() == {"timesteps": {"0 to 9": 2, "10 to 19": 1, "20 to 24": 2}}
    again = TimestepHistogram(24)
    again.restore(json.loads(json.dumps(times.state())))
    assert again.as_json() == times.as_json()
    again.restore({"timesteps": [1, 2]})
    assert again.as_json() == times.as_json()
    with pytest.raises(RuntimeError):
        times.add(torch.tensor([25]))


# ---- the network ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    """The network of the published refiner, without its weights."""
    with torch.device("meta"):
        return build(UNetConfig(**SHAPE))


def test_the_network_has_the_published_size(published):
    net = published
    assert sum(p.numel() for p in net.parameters()) == 2_259_526_660
    assert net.add_embedding.linear_1.in_features == 2560


@pytest.mark.parametrize("kind", ["published", "tiny"])
def test_the_names_are_those_that_diffusers_own_converter_reads(published, kind):
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    net = published if kind == "published" else build(UNetConfig(**{**SHAPE, **TINY}))
    names = original_names(net.state_dict(), net.config["layers_per_block"])
    assert len(set(names.values())) == len(names) > 100
    read = convert_ldm_unet_checkpoint({PREFIX + other: name for name, other in names.items()}, dict(net.config))
    assert read == {name: name for name in names}
