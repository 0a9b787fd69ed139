"""The learning-rate schedule and the moving average, against numbers worked out by hand."""

import math

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
        assert float(ema.net.weight) == pytest.approx(expected, rel=1e-6)


def test_the_average_is_a_network_of_its_own_in_float32():
    net = Linear(2, 2).bfloat16()
    ema = EMA(net, 0.9)
    assert {p.dtype for p in ema.net.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in ema.net.parameters()) and not ema.net.training
    before = ema.net.weight.clone()
    with torch.no_grad():
        net.weight += 1
    assert torch.equal(ema.net.weight, before)  # moves at update() alone
    ema.update(0)
    assert not torch.equal(ema.net.weight, before)
    assert net.weight.dtype == torch.bfloat16 and net.weight.requires_grad


def test_a_restored_average_goes_on_as_if_never_stopped():
    torch.manual_seed(0)
    net = Linear(3, 3)
    ema = EMA(net, 0.9)
    ema.update(0)
    copy = EMA(Linear(3, 3), 0.9)
    copy.load_state_dict({k: t.clone() for k, t in ema.state_dict().items()})
    copy._live = list(net.parameters())
    with torch.no_grad():
        net.weight.mul_(2)
    ema.update(1), copy.update(1)
    assert torch.equal(copy.net.weight, ema.net.weight)


def test_the_average_of_bf16_weights_needs_one_float32_copy_at_a_time():
    net = nn.Sequential(*(Linear(64, 64, bias=False) for _ in range(8))).bfloat16()
    ema = EMA(net, 0.9)
    with StorageMeter(*net.parameters(), *ema.net.parameters()) as meter:
        held = meter.live
        ema.update(0)
    assert meter.peak - held == 4 * 64 * 64
