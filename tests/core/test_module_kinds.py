"""Which modules stay in FP32: by kind, in the networks of the host and of the training core, and by name."""

import pytest
import torch
from torch import nn
from torch.nn import Conv2d, GroupNorm, LayerNorm, Linear

from training.config.network import preset
from training.objectives.residual.unet import build_unet
from training.precision.module_kinds import EMBEDDINGS, IN_OUT, NORMS, find_modules, split_patterns


class TimestepEmbedSequential(nn.Sequential):
    """As in the host: the network calls the children one by one."""


class RMSNorm(nn.Module):
    """Written by hand, as most networks have it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.time_embed = nn.Sequential(Linear(4, 4), nn.SiLU(), Linear(4, 4))
        self.input_blocks = nn.ModuleList([TimestepEmbedSequential(Conv2d(4, 4, 3)), Linear(4, 4)])
        self.middle = nn.ModuleDict({"norm": RMSNorm(), "attn2": nn.Sequential(LayerNorm(4), Linear(4, 4))})
        self.out = nn.Sequential(GroupNorm(2, 4), nn.SiLU(), Conv2d(4, 4, 3))


def test_norms_are_found_by_class_also_those_written_by_hand():
    assert find_modules(Network(), [NORMS]).modules == dict.fromkeys(["middle.norm", "middle.attn2.0", "out.0"], NORMS)


def test_of_modules_within_each_other_only_the_outer_one_is_named():
    found = find_modules(Network(), [NORMS, EMBEDDINGS, IN_OUT]).modules
    assert found == {
        "middle.norm": NORMS,
        "middle.attn2.0": NORMS,
        "time_embed": EMBEDDINGS,
        "input_blocks.0.0": IN_OUT,  # not the container, which is never called
        "out": IN_OUT,
    }


def test_patterns_find_by_name_and_say_what_they_miss():
    found = find_modules(Network(), [], split_patterns("*.attn2, input_blocks\n nothing*,*.attn2"))
    assert found.modules == {
        "middle.attn2": "*.attn2",
        "input_blocks.0.0": "input_blocks",
        "input_blocks.1": "input_blocks",
    }
    assert found.missing == ("nothing*",)


def test_a_kind_that_a_network_lacks_is_missing():
    assert find_modules(nn.Sequential(Linear(2, 2)), [NORMS, EMBEDDINGS]).missing == (NORMS, EMBEDDINGS)


@pytest.mark.parametrize("text", ["", " ,\n, "])
def test_no_patterns(text):
    assert split_patterns(text) == ()


def test_the_network_that_we_train_has_all_kinds():
    with torch.device("meta"):
        network = build_unet(preset("sdxl-half", 4))
    found = find_modules(network, [NORMS, EMBEDDINGS, IN_OUT])
    assert not found.missing
    kept = {kind: {name for name, by in found.modules.items() if by == kind} for kind in (EMBEDDINGS, IN_OUT)}
    assert kept == {EMBEDDINGS: {"time_embedding", "add_embedding"}, IN_OUT: {"conv_in", "conv_out"}}
    norms = {name for name, module in network.named_modules() if isinstance(module, (nn.GroupNorm, nn.LayerNorm))}
    assert norms == {name for name, by in found.modules.items() if by == NORMS} and "conv_norm_out" in norms
