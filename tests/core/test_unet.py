"""The refiner's network: sizes, shapes that it refuses, and that it starts from nothing."""

import re

import pytest
import torch
from pydantic import ValidationError

from training.config.network import PRESETS, UNetConfig, preset
from training.errors import BadInput, first_error
from training.objectives.residual.size import BASE_PARAMETERS, check_size, count_parameters
from training.objectives.residual.unet import build_unet, call_unet

SMALL = dict(
    latent_channels=3, block_channels=(32, 64), layers_per_block=1, transformer_depth=(0, 1), middle_depth=1,
    heads=(2, 2), context_dim=16,
)


@pytest.mark.parametrize(
    "name, channels, base, parameters, percent",
    [("sd15-half", 4, "SD1.5", 219_795_044, "25.6 %"), ("sdxl-half", 4, "SDXL", 728_371_204, "28.4 %")],
)
def test_presets_have_the_documented_share_of_their_base(name, channels, base, parameters, percent):
    size = check_size(preset(name, channels), base, None, allow_larger=False)
    assert size.parameters == parameters
    assert f"{100 * size.ratio:.1f} %" == percent
    assert f"{parameters:,}" in size.sentence() and base in size.sentence()


def test_the_base_models_are_counted_from_their_own_shapes():
    """The same count, from the full-width shapes: two fewer input channels than a refiner's [x_t, b]."""
    full = preset("sd15-half", 4).model_dump() | {"block_channels": (320, 640, 1280, 1280), "heads": (8, 8, 8, 8)}
    extra_input = 4 * 320 * 9
    assert count_parameters(UNetConfig(**full)) - extra_input == BASE_PARAMETERS["SD1.5"]
    full = preset("sdxl-half", 4).model_dump() | {"block_channels": (320, 640, 1280), "heads": (5, 10, 20)}
    assert count_parameters(UNetConfig(**full)) - extra_input == BASE_PARAMETERS["SDXL"]


def test_counting_allocates_nothing():
    with torch.device("meta"):
        net = build_unet(preset("sdxl-half", 4))
    assert {p.device.type for p in net.parameters()} == {"meta"}


def test_every_preset_is_a_valid_shape_for_any_latent():
    for name in PRESETS:
        for channels in (3, 4, 16):
            assert preset(name, channels).latent_channels == channels


@pytest.mark.parametrize("channels", [3, 16])
def test_the_network_takes_state_and_base_and_gives_a_velocity(channels):
    net = build_unet(UNetConfig(**SMALL | {"latent_channels": channels}))
    x, context = torch.randn(2, channels, 16, 16), torch.randn(2, 5, 16)
    assert call_unet(net, x, torch.randn_like(x), torch.tensor([1.0, 0.5]), context).shape == x.shape


def test_an_untrained_refiner_predicts_nothing():
    torch.manual_seed(0)
    net = build_unet(UNetConfig(**SMALL))
    x, context = torch.randn(2, 3, 16, 16), torch.randn(2, 5, 16)
    output = call_unet(net, x, torch.randn_like(x), torch.tensor([1.0, 0.5]), context)
    assert torch.equal(output, torch.zeros_like(x))
    output.sum().backward()  # yet it can leave that state
    assert net.conv_out.weight.grad.abs().max() > 0


@pytest.fixture(scope="module")
def woken():
    """A network whose answers depend on all that it is given."""
    torch.manual_seed(0)
    net = build_unet(UNetConfig(**SMALL)).eval()
    torch.nn.init.normal_(net.conv_out.weight, std=0.1)
    return net


@torch.no_grad()
def test_the_answer_depends_on_state_base_time_and_text(woken):
    x, b, context = torch.randn(1, 3, 16, 16), torch.randn(1, 3, 16, 16), torch.randn(1, 5, 16)
    t = torch.tensor([0.5])
    answer = call_unet(woken, x, b, t, context)
    changed = [(x + 0.1, b, t, context), (x, b + 0.1, t, context), (x, b, t / 2, context), (x, b, t, -context)]
    assert all((call_unet(woken, *given) - answer).abs().max() > 1e-4 for given in changed)
    assert torch.equal(call_unet(woken, x, b, t, context), answer)


@torch.no_grad()
def test_the_network_is_told_a_thousand_times_the_time(woken):
    x, context = torch.randn(1, 3, 16, 16), torch.randn(1, 5, 16)
    direct = woken(torch.cat([x, x], 1), torch.tensor([875.0]), encoder_hidden_states=context).sample
    assert torch.equal(call_unet(woken, x, x, torch.tensor([0.875]), context), direct)


@torch.no_grad()
@pytest.mark.parametrize("height, width", [(85, 97), (97, 85), (16, 17)])
def test_odd_sizes_keep_their_size(woken, height, width):
    x = torch.randn(1, 3, height, width)
    answer = call_unet(woken, x, x, torch.tensor([0.5]), torch.randn(1, 5, 16))
    assert answer.shape == x.shape and answer.isfinite().all()


@torch.no_grad()
def test_pooled_text_and_size_numbers_are_heard():
    torch.manual_seed(0)
    config = UNetConfig(**SMALL | {"pooled_dim": 12})
    assert config.adm_dim == 12 + 6 * 256
    net = build_unet(config).eval()
    torch.nn.init.normal_(net.conv_out.weight, std=0.1)
    x, context, t = torch.randn(1, 3, 16, 16), torch.randn(1, 5, 16), torch.tensor([0.5])
    pooled, ids = torch.randn(1, 12), torch.tensor([[128.0, 128, 0, 0, 128, 128]])
    answer = call_unet(net, x, x, t, context, pooled, ids)
    assert (call_unet(net, x, x, t, context, -pooled, ids) - answer).abs().max() > 1e-5
    assert (call_unet(net, x, x, t, context, pooled, 2 * ids) - answer).abs().max() > 1e-5


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"block_channels": (32, 80)}, r"block_channels must be multiples of 32, got 80"),
        ({"block_channels": (64, 96)}, r"block_channels must be whole multiples of the first level \(64\), got 96"),
        ({"transformer_depth": (0,)}, r"transformer_depth needs one entry per level \(2\), but has 1: \[0\]"),
        ({"heads": (2, 2, 2)}, r"heads needs one entry per level \(2\), but has 3"),
        ({"heads": (2, 5)}, r"heads must divide the level's width: 64 channels, 5 heads"),
        ({"heads": (0, 2)}, r"heads must divide the level's width: 32 channels, 0 heads"),
        ({"transformer_depth": (-1, 1)}, r"transformer_depth must be 0 or more, got \[-1, 1\]"),
        ({"middle_depth": 2}, r"middle_depth must equal the last level's transformer_depth \(1\)"),
        (
            {"block_channels": (32, 64, 64), "transformer_depth": (1, 1, 1), "heads": (1, 4, 4)},
            r"heads must be the same on every level with attention, or give one head size",
        ),
        ({"latent_channels": 0}, r"latent_channels: .*greater than or equal to 1 \(got 0\)"),
        ({"layers": 2}, r"layers: .*not permitted"),
        ({"context_dim": "wide"}, r"context_dim: .*\(got 'wide'\)"),
    ],
)
def test_a_shape_that_does_not_work_names_its_field(change, sentence):
    with pytest.raises(ValidationError) as caught:
        UNetConfig(**SMALL | change)
    assert re.search(sentence, first_error(caught.value)), first_error(caught.value)


def test_one_head_size_or_one_number_of_heads_is_enough():
    UNetConfig(**SMALL | {"transformer_depth": (1, 1), "heads": (2, 2)})
    UNetConfig(**SMALL | {"transformer_depth": (1, 1), "heads": (2, 4)})
    # a level without attention has no say in it
    UNetConfig(**SMALL | {"transformer_depth": (0, 1), "heads": (1, 4)})


# ---- size against the base ------------------------------------------------------------------------------------------


def test_a_refiner_above_three_tenths_of_its_base_is_refused():
    config = UNetConfig(**SMALL)
    parameters = count_parameters(config)
    base = int(parameters / 0.31)
    with pytest.raises(BadInput, match=r"at most 30% of the base's parameters, got .*31\.0% of Mine") as caught:
        check_size(config, "Mine", base, allow_larger=False)
    assert "allow_larger" in str(caught.value) and f"{base:,}" in str(caught.value)
    assert check_size(config, "Mine", base, allow_larger=True).ratio == pytest.approx(0.31, abs=1e-4)
    assert check_size(config, "Mine", int(parameters / 0.29), allow_larger=False).ratio < 0.30


def test_without_a_base_there_is_no_ratio_and_no_limit():
    size = check_size(UNetConfig(**SMALL), None, None, allow_larger=False)
    assert size.ratio is None and "no base model named" in size.sentence()


def test_an_unknown_base_name_needs_a_count():
    with pytest.raises(BadInput, match="refiner.base: expected one of SD1.5, SDXL or none, got 'SD9'"):
        check_size(UNetConfig(**SMALL), "SD9", None, allow_larger=False)
