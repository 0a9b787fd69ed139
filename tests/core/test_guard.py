"""The first layer whose result is not finite, and why it is the first."""

import math

import pytest
import torch
from torch import autocast, nn
from torch.nn import Conv1d, Linear

from training.precision.guard import FirstBadLayer, is_finite, tensors

LIMIT = "fp16's limit, 65504"


class Block(nn.Module):
    """A layer, a sum outside of any layer, and another layer."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.first, self.second, self.gain = Linear(4, 4), Linear(4, 4), gain

    def forward(self, x):
        return self.second(self.first(x) * self.gain + x)


class Network(nn.Module):
    def __init__(self, **gains):
        super().__init__()
        torch.manual_seed(0)
        self.stem = Conv1d(4, 4, 1)
        self.blocks = nn.ModuleList([Block(), Block(**gains)])
        self.act = nn.SiLU()

    def forward(self, x):
        x = self.act(self.stem(x)).movedim(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


def look(network, x=None, dtype=None):
    x = torch.ones(1, 4, 3) if x is None else x
    if dtype is not None:
        network, x = network.to(dtype), x.to(dtype)
    with torch.no_grad(), FirstBadLayer(network) as bad:
        network(x)
    return bad


def hooks(network):
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in network.modules())


@pytest.mark.parametrize(("value", "holds"), [(math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "infinity")])
@pytest.mark.parametrize("key", ["weight", "bias"])
def test_a_poisoned_weight_is_named_with_its_layer(value, holds, key):
    network = Network()
    network.blocks[0].second.get_parameter(key).data.view(-1)[1] = value
    bad = look(network)
    assert bad.name == "blocks.0.second" and bad.found.weight == f"blocks.0.second.{key}"
    said = f"layer blocks.0.second (Linear, fp32): its weight blocks.0.second.{key} holds {holds}"
    assert str(bad.found) == said and not bad.found.overflowed


def test_an_overflow_gives_the_dtype_its_limit_and_what_went_in():
    network = Network().half()
    network.blocks[1].first.weight.data.fill_(30000.0)
    network.blocks[0].second.bias.data.fill_(50.0)
    bad = look(network, dtype=torch.float16)
    assert bad.name == "blocks.1.first" and bad.found.dtype == torch.float16 and bad.found.overflowed
    said = str(bad.found)
    assert said.startswith(f"layer blocks.1.first (Linear, fp16): the result passed {LIMIT}")
    assert 49 < bad.found.largest < 52 and f"it was given is {bad.found.largest:.4g}" in said
    assert look(network, dtype=torch.bfloat16).found is None  # bf16 holds it


def test_a_fault_between_layers_is_not_blamed_on_the_next_one():
    network = Network(gain=1e5).half()
    network.blocks[1].first.bias.data.fill_(40.0)
    found = look(network, dtype=torch.float16).found
    assert (found.after, found.name, found.inside) == ("blocks.1.first", "blocks.1.second", "blocks.1")
    assert str(found).startswith(
        "what blocks.1 (Block, fp16) computes after layer blocks.1.first and before layer blocks.1.second, outside of "
        f"any layer: the result passed {LIMIT}"
    )


def test_a_container_that_spoils_its_own_result_is_named():
    class Spoils(nn.Sequential):
        def forward(self, x):
            return super().forward(x) - math.inf

    network = nn.Sequential(Linear(4, 4), Spoils(Linear(4, 4)))
    found = look(network, torch.ones(1, 4)).found
    assert (found.name, found.after, found.inside) == ("", "1.0", "1") and "Spoils" in str(found)
    assert "computes after layer 1.0, outside of any layer" in str(found)


def test_nan_from_finite_numbers_says_so():
    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x)

    network = nn.Sequential(nn.Identity(), Root())
    said = str(look(network, torch.full((2,), -3.0)).found)
    assert said.startswith("layer 1 (Root, fp32): it gave NaN from finite numbers; the largest") and "is 3 (" in said


def test_what_autocast_does_is_said():
    network = Network()
    network.blocks[0].first.bias.data[0] = math.nan
    with autocast("cpu", torch.bfloat16):
        found = look(network).found
    assert found.autocast
    assert str(found) == "layer blocks.0.first (Linear, bf16 by autocast): its weight blocks.0.first.bias holds NaN"


def test_a_weight_that_its_cast_makes_infinite_is_named():
    network = Network()
    network.stem.weight.data[0, 0, 0] = 70000.0  # fits the fp32 that it is kept in
    with autocast("cpu", torch.float16):
        found = look(network).found
    assert found.overflowed
    said = f"layer stem (Conv1d, fp16 by autocast): its weight stem.weight reaches 7e+04, past {LIMIT}"
    assert str(found) == said


def test_a_weight_that_is_computed_belongs_to_the_layer_that_uses_it():
    network = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(Linear(4, 4)))
    network[0].parametrizations.weight.original0.data[0] = math.nan
    bad = look(network, torch.ones(1, 4))
    assert bad.name == "0" and bad.found.weight == "0.parametrizations.weight.original0"


def test_layers_that_are_shared_without_being_registered_are_seen():
    network = Network()
    alien = Linear(4, 4)
    alien.bias.data.fill_(math.nan)
    network.__dict__["act"] = alien
    del network._modules["act"]
    assert look(network, torch.ones(1, 4, 4)).name == "act"


def test_an_attention_mask_may_hold_infinity():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Linear(3, 3)

        def forward(self, x, mask, *, bias=None):
            return self.inner(torch.softmax(x + mask, -1))

    network = nn.Sequential()
    network.layer = Masked()
    with FirstBadLayer(network) as bad:
        mask = torch.tensor([0.0, 0.0, -math.inf])
        network.layer(torch.ones(1, 3), mask, bias=mask)
    assert bad.found is None and bad.name == ""


def test_nothing_stays_on_the_network():
    network = Network()
    with FirstBadLayer(network) as bad:
        assert hooks(network) == 2 * (sum(1 for _ in network.modules()) - 1)
        network(torch.ones(1, 4, 3))
    assert hooks(network) == 0 and bad.found is None
    with pytest.raises(ZeroDivisionError), FirstBadLayer(network):
        raise ZeroDivisionError
    assert hooks(network) == 0


def test_finite_looks_into_what_a_network_may_give():
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    assert is_finite(None) and is_finite(good) and is_finite([good, None, (good, {"a": torch.tensor([1])})])
    for value in (bad, [good, bad], (None, {"a": [bad]}), bad.to(torch.float8_e5m2), torch.complex(bad, bad)):
        assert not is_finite(value)
    assert is_finite(good.to(torch.float8_e4m3fn)) and [t is good for t in tensors({"a": [good], "b": 3})] == [True]
