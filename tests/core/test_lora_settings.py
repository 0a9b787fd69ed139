"""LoRA: which adapters are asked for and made, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from training.__main__ import main
from training.config.sections import LoRAConfig
from training.config.train_config import TrainConfig
from training.errors import BadInput
from training.objectives.plain_names import plain_names
from training.objectives.residual.file import load_meta, load_refiner
from training.objectives.residual.lora import add_adapters, choose_adapters, merge
from training.objectives.residual.unet import build_unet
from training.objectives.trainables import fill, trainables


def test_without_a_start_it_is_refused_with_the_reason():
    with pytest.raises(BadInput, match="lora needs refiner.start_from: .* random weights would never learn"):
        TrainConfig.build({"dataset": "data", "run": "run", "lora": {}})


@pytest.mark.parametrize(
    "lora, said",
    [
        ({"rank": 0}, "lora.rank"),
        ({"alpha": 0}, "lora.alpha"),
        ({"alpha": float("inf")}, "lora.alpha"),
        ({"targets": "convolutions"}, "lora.targets: must be 'all', 'attention' or a list of endings"),
        ({"targets": []}, "lora.targets: must be"),
        ({"targets": [""]}, "lora.targets: must be"),
        ({"targets": [3]}, "lora.targets: must be"),
        ({"dropout": 0.1}, "lora.dropout"),
    ],
)
def test_an_error_names_its_field(lora, said):
    with pytest.raises(BadInput, match=said) as caught:
        TrainConfig.build({"dataset": "d", "run": "r", "refiner": {"start_from": "a"}, "lora": lora})
    assert "\n" not in str(caught.value)


def test_what_is_asked_survives_json():
    values = {"rank": 2, "alpha": 4.0, "targets": ["to_q", "conv1"]}
    config = TrainConfig.build({"dataset": "d", "run": "r", "refiner": {"start_from": "a"}, "lora": values})
    assert TrainConfig.parse(config.to_json()) == config
    assert json.loads(config.to_json())["lora"] == values


def test_targets_by_word_and_by_ending(material):
    shape = load_meta(material[0]).unet
    net = build_unet(shape)
    layers = {n for n, m in net.named_modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))}
    assert set(choose_adapters(LoRAConfig(), shape).layers) == layers
    some = choose_adapters(LoRAConfig(targets=["conv1", "resnets.0.conv2"]), shape).layers
    assert set(some) == {n for n in layers if n.endswith((".conv1", ".resnets.0.conv2"))} and len(some) > 2
    assert choose_adapters(LoRAConfig(targets=["conv_in"]), shape).layers == ("conv_in",)
    for end in ("onv1", "conv_norm_out", "nothing"):  # half a name; a norm; no layer at all
        with pytest.raises(BadInput, match=f"lora.targets: expected endings .*'conv1'.*got '{end}'"):
            choose_adapters(LoRAConfig(targets=["conv1", end]), shape)
    if any(shape.depths()):
        attention = choose_adapters(LoRAConfig(targets="attention"), shape).layers
        assert set(attention) == {n for n in layers if n.endswith((".to_q", ".to_k", ".to_v", ".to_out.0"))}
        assert len(attention) % 8 == 0
    else:
        with pytest.raises(BadInput, match="'attention' means no layer of this network, .* expected 'all'"):
            choose_adapters(LoRAConfig(targets="attention"), shape)


@pytest.mark.parametrize("targets", ["all", ["conv1"], ["conv_in", "conv_out"]])
def test_adapters_are_where_they_were_asked_for_and_as_many_as_told(material, targets):
    shape = load_meta(material[0]).unet
    adapters, net = choose_adapters(LoRAConfig(rank=3, targets=targets), shape), build_unet(shape)
    add_adapters(net, adapters)
    trained = trainables(net)
    for end in (".lora_A.weight", ".lora_B.weight"):
        assert {name.removesuffix(end) for name in trained if name.endswith(end)} == set(adapters.layers)
    assert sum(p.numel() for p in trained.values()) == adapters.parameters
    assert f"{adapters.parameters:,} parameters are trained" in adapters.sentence(1000)


def test_alpha_is_the_rank_where_none_is_given_and_scales_what_is_added(conv_start):
    shape, (weights, _, _) = load_meta(conv_start).unet, load_refiner(conv_start)
    net = build_unet(shape)
    once = choose_adapters(LoRAConfig(rank=4, targets=["conv1"]), shape)
    add_adapters(net, once)
    trained = trainables(net)
    fill(trained, {name: torch.ones_like(p) for name, p in trained.items()})
    assert once.alpha == 4 and once.scale == 1
    half = choose_adapters(LoRAConfig(rank=4, alpha=2, targets=["conv1"]), shape)
    for adapters, added in ((once, 4.0), (half, 2.0)):
        merged = merge(weights, trained, adapters)
        for name, weight in weights.items():
            change = merged[name] - weight
            expected = added if name.removesuffix(".weight") in adapters.layers else 0.0
            torch.testing.assert_close(change, torch.full_like(change, expected))


def test_the_same_seed_gives_the_same_adapters(conv_start, dataset, adapt, watch, tmp_path):
    made = []
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        torch.manual_seed(len(made))
        result = watch().train(adapt(conv_start, dataset, run=tmp_path / name, seed=seed, epochs=1))
        made.append((result.folder / "lora.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


def test_names_of_adapters_are_plain_whatever_wraps_the_network():
    tensors = {"module.conv1._orig_mod.lora_A.default.weight": 1, "module.default.weight": 2}
    assert plain_names(tensors) == {"conv1.lora_A.weight": 1, "default.weight": 2}


def test_the_command_line_gives_the_same_bytes(conv_start, dataset, adapt, watch, tmp_path, capsys):
    expected = watch().train(adapt(conv_start, dataset, run=tmp_path / "here"))
    path = tmp_path / "run.json"
    path.write_text(adapt(conv_start, dataset).to_json())
    assert main(["train", "--config", str(path)]) == 0
    folder = Path(capsys.readouterr().out.split("\n")[-2]).parent
    for name in ("refiner.safetensors", "lora.safetensors"):
        assert (folder / name).read_bytes() == (expected.folder / name).read_bytes()
