"""The learning-rate schedule and the moving average, against numbers worked out by hand."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import Linear

from training.memory.meter import StorageMeter
from training.run.optim.ema import EMA, ema_decay
from training.run.optim.schedule import warmup_cosine


def test_the_rate_warms_up_in_a_line_and_falls_like_a_cosine():
    rates = [warmup_cosine(step, 4, 12) for step in range(15)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:12] == pytest.approx([(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)])
    assert rates[8] == pytest.approx(0.5) and 0 < rates[11] < 0.04
    assert rates[12:] == [0, 0, 0]


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert warmup_cosine(0, 0, 10) == 1.0


def test_the_first_step_always_moves():
    assert all(warmup_cosine(0, warmup, horizon) > 0 for warmup in (0, 1, 50) for horizon in (1, 10))


@pytest.mark.parametrize("warmup, horizon", [(20, 8), (8, 8), (100, 1)])
def test_past_the_horizon_the_rate_is_zero_even_where_the_warm_up_is_longer(warmup, horizon):
    assert [warmup_cosine(step, warmup, horizon) for step in range(horizon, horizon + 5)] == [0] * 5


def test_the_average_follows_young_weights_fast_and_old_ones_slowly():
    assert [ema_decay(n, 0.999) for n in (0, 1, 8)] == pytest.approx([1 / 10, 2 / 11, 9 / 18])
    assert ema_decay(10**6, 0.999) == 0.999
    assert ema_decay(0, 0.0) == 0.0


def test_the_average_equals_a_series_worked_out_by_hand():
    net = Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 5.0)
    ema = EMA(net, 0.3)
    expected = 5.0
    for n, value in enumerate([1.0, -2.0, 4.0, 0.5, 3.0]):
        nn.init.constant_(net.weight, value)
        ema.update(n)
        d = min(0.3, (1 + n) / (10 + n))
        expected = d * expected + (1 - d) * value
        assert float(ema.state_dict()["weight"]) == pytest.approx(expected, rel=1e-6)


def test_the_averages_are_tensors_of_their_own_in_float32():
    net = Linear(2, 2).bfloat16()
    ema = EMA(net, 0.9)
    average = ema.state_dict()["weight"]
    assert {tensor.dtype for tensor in ema.state_dict().values()} == {torch.float32} and not average.requires_grad
    before = average.clone()
    with torch.no_grad():
        net.weight += 1
    assert torch.equal(average, before)  # moves at update() alone
    ema.update(0)
    assert not torch.equal(average, before)
    assert net.weight.dtype == torch.bfloat16 and net.weight.requires_grad


@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: nn.Sequential(OrderedDict(module=net))])
def test_within_swapped_a_network_has_its_averages_and_afterwards_its_weights(wrap):
    net = Linear(2, 2).bfloat16()
    ema, outer = EMA(net, 0.9), wrap(net)
    weight, held = net.weight, net.weight.data_ptr()
    with torch.no_grad():
        net.weight += 1
    before = net.weight.detach().clone()
    with pytest.raises(KeyError), ema.swapped(outer) as swapped:
        assert swapped is outer and not net.training and net.weight is weight
        assert net.weight.dtype == torch.float32 and torch.equal(net.weight, ema.state_dict()["weight"])
        assert net.weight.data_ptr() == ema.state_dict()["weight"].data_ptr()  # no copy
        raise KeyError
    assert net.training and net.weight.data_ptr() == held and torch.equal(net.weight, before)


def test_an_average_of_float64_weights_is_float64():
    net = Linear(2, 2).double()
    ema = EMA(net, 0.9)
    with torch.no_grad():
        net.weight += 1e-12
    ema.update(0)
    assert ema.state_dict()["weight"].dtype == torch.float64
    assert not torch.equal(ema.state_dict()["weight"].float().double(), ema.state_dict()["weight"])


def test_a_restored_average_goes_on_as_if_never_stopped():
    torch.manual_seed(0)
    net = Linear(3, 3)
    ema = EMA(net, 0.9)
    ema.update(0)
    copy = EMA(Linear(3, 3), 0.9)
    copy.load_state_dict({k: t.clone() for k, t in ema.state_dict().items()})
    copy._live = dict(net.named_parameters())
    with torch.no_grad():
        net.weight.mul_(2)
    ema.update(1), copy.update(1)
    assert torch.equal(copy.state_dict()["weight"], ema.state_dict()["weight"])


def test_the_average_of_bf16_weights_needs_one_float32_copy_at_a_time():
    net = nn.Sequential(*(Linear(64, 64, bias=False) for _ in range(8))).bfloat16()
    ema = EMA(net, 0.9)
    with StorageMeter(*net.parameters(), *ema.state_dict().values()) as meter:
        held = meter.live
        ema.update(0)
    assert meter.peak - held == 4 * 64 * 64
