"""The learning-rate schedule and the moving average, against numbers worked out by hand."""

import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import Linear

from training.config.sections import OptimizerConfig
from training.memory.meter import StorageMeter
from training.run.optim.build import build_optimizer
from training.run.optim.ema import EMA, ema_decay
from training.run.optim.schedule import Schedule, schedule_of, warmup_schedule


def test_the_rate_warms_up_in_a_line_and_falls_like_a_cosine():
    rates = [warmup_schedule(step, 4, 12) for step in range(15)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[4:12] == pytest.approx([(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)])
    assert rates[8] == pytest.approx(0.5) and 0 < rates[11] < 0.04
    assert rates[12:] == [0, 0, 0]


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert warmup_schedule(0, 0, 10) == 1.0


def test_the_first_step_always_moves():
    assert all(warmup_schedule(0, warmup, horizon) > 0 for warmup in (0, 1, 50) for horizon in (1, 10))


@pytest.mark.parametrize("warmup, horizon", [(20, 8), (8, 8), (100, 1)])
def test_past_the_horizon_the_rate_is_zero_even_where_the_warm_up_is_longer(warmup, horizon):
    assert [warmup_schedule(step, warmup, horizon) for step in range(horizon, horizon + 5)] == [0] * 5


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


# ---- other schedules, and runs that were made longer -----------------------------------------------------------------


def test_linear_and_cosine_fall_to_the_floor_and_stay_there():
    linear = [warmup_schedule(step, 2, 10, "linear", 0.2) for step in range(13)]
    assert linear == pytest.approx([1 / 3, 2 / 3, *(1 - 0.8 * k / 8 for k in range(8)), 0.2, 0.2, 0.2])
    cosine = [warmup_schedule(step, 2, 10, "cosine", 0.2) for step in range(13)]
    assert cosine[2:10] == pytest.approx([0.2 + 0.4 * (1 + math.cos(math.pi * k / 8)) for k in range(8)])
    assert cosine[10:] == [0.2] * 3 and cosine[6] == pytest.approx(0.6)


def test_the_constant_rate_knows_no_horizon():
    assert [warmup_schedule(step, 2, 4, "constant") for step in range(8)] == pytest.approx([1 / 3, 2 / 3, *[1] * 6])


def test_a_schedule_that_names_nothing_is_the_one_of_before_to_the_bit():
    for warmup, horizon in [(0, 7), (3, 7), (20, 8)]:
        options = OptimizerConfig(learning_rate=3e-4, warmup_steps=warmup)
        rates = [schedule_of(options, horizon).rate(step) for step in range(10)]
        assert rates == [3e-4 * former_cosine(step, warmup, horizon) for step in range(10)]


def former_cosine(step, warmup, horizon):
    """As it was before there were others."""
    if step >= horizon:
        return 0.0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(horizon - warmup, 1)))


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_longer_run_has_the_rates_of_the_shorter_ones_up_to_their_ends(kind):
    base = dict(peak=1.0, warmup=2, kind=kind, floor=0.1)
    first, second = Schedule(horizon=10, **base), Schedule(horizon=16, **base)
    stretched = Schedule(horizon=24, earlier=(10, 16), extension="stretch", **base)
    assert [stretched.rate(s) for s in range(10)] == [first.rate(s) for s in range(10)]
    assert [stretched.rate(s) for s in range(10, 16)] == [second.rate(s) for s in range(10, 16)]
    assert [stretched.rate(s) for s in range(16, 26)] == [Schedule(horizon=24, **base).rate(s) for s in range(16, 26)]
    flat = Schedule(horizon=24, earlier=(10,), extension="constant", **base)
    assert [flat.rate(s) for s in range(10)] == [first.rate(s) for s in range(10)]
    assert {flat.rate(s) for s in range(10, 26)} == {first.rate(9)} and first.rate(9) > 0.1


def test_a_schedule_says_what_is_not_usual():
    assert Schedule(1e-4, 20, 100).sentences(100) == []
    assert Schedule(1e-4, 20, 100, "constant").sentences(100) == ["learning rate: constant, stays at its peak"]
    assert Schedule(1e-4, 20, 50).sentences(100) == [
        "from step 50 (optimizer.horizon_steps) on the learning rate is 0, and nothing is learnt any more"
    ]
    (said,) = Schedule(1e-4, 0, 200, earlier=(100,), extension="stretch").sentences(200)
    assert "finished after 100 steps" in said and "over all 200 steps, so it jumps to 5e-05" in said
    (said,) = Schedule(1e-4, 0, 200, earlier=(100,), extension="constant").sentences(200)
    assert "goes on at its last rate, 2.47e-08" in said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eps_reaches_the_optimizer(dtype):
    """With an eps far above the gradient the first step is rate x gradient / eps instead of the rate itself."""
    moved = []
    for eps in (1e-8, 1.0):
        weight = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
        options = OptimizerConfig(learning_rate=0.5, weight_decay=0, eps=eps, rounding="master")
        optimizer = build_optimizer(options, {"w": weight}, 0)
        weight.grad = torch.full_like(weight, 2**-10)
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        optimizer.step()
        moved.append(float(weight[0, 0].detach()))
    assert moved == pytest.approx([-0.5, -0.5 * 2**-10 / (1 + 2**-10)], rel=1e-2)


def test_eps_of_a_configuration_that_names_none_is_adamws_own():
    (default,) = {group["eps"] for group in torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups}
    assert OptimizerConfig().eps == default
