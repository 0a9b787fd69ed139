"""Names and shapes of a refiner's weights from its configuration, held to diffusers' own network."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.core.test_refiner_file import EMPTY, UNET, meta, weights
from training.config.network import PRESETS, UNetConfig, preset
from training.errors import BadInput
from training.objectives.residual.file import load_meta, load_refiner
from training.objectives.residual.shapes import weight_shapes, what_does_not_fit
from training.objectives.residual.unet import build_unet

SHAPES = {
    **{name: preset(name, 4) for name in PRESETS},
    "one level": UNET,
    "uneven": UNetConfig(
        latent_channels=3, block_channels=(32, 64, 128), layers_per_block=2, transformer_depth=(0, 2, 3),
        middle_depth=3, heads=(1, 2, 4), context_dim=40, linear_projection=True, pooled_dim=20,
    ),
    "middle alone": UNetConfig(
        latent_channels=16, block_channels=(32, 96, 64, 64), layers_per_block=3, transformer_depth=(1, 1, 1, 0),
        middle_depth=1, heads=(4, 4, 4, 4), context_dim=8,
    ),
    "no middle": UNetConfig(
        latent_channels=4, block_channels=(32, 64), layers_per_block=1, transformer_depth=(2, 0), middle_depth=0,
        heads=(2, 2), context_dim=8, pooled_dim=7,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_they_are_those_of_diffusers_network(name):
    with torch.device("meta"):
        net = build_unet(SHAPES[name])
    assert weight_shapes(SHAPES[name]) == {key: tuple(tensor.shape) for key, tensor in net.state_dict().items()}


def test_what_does_not_fit_is_told_with_the_first_name():
    found = weight_shapes(UNET)
    assert what_does_not_fit(UNET, found) is None
    assert "(1 differ; the first, conv_in.bias, is [3] instead of [32])" in what_does_not_fit(
        UNET, {**found, "conv_in.bias": (3,)}
    )
    lacking = {name: shape for name, shape in found.items() if name != "conv_out.bias"}
    assert "(1 missing, 0 too many, the first one conv_out.bias)" in what_does_not_fit(UNET, lacking)
    assert "(0 missing, 1 too many, the first one more)" in what_does_not_fit(UNET, {**found, "more": (1,)})


def test_a_file_that_promises_a_larger_network_than_it_holds_is_refused_before_it_is_built(tmp_path):
    """712 bytes of metadata made the process map 134 GB."""
    path = tmp_path / "refiner.safetensors"
    said = meta().model_dump(mode="json")
    said["unet"] |= {"block_channels": [8192] * 6, "transformer_depth": [32] * 6, "middle_depth": 32, "heads": [64] * 6}
    tensors = {f"unet.{name}": tensor for name, tensor in weights().items()}
    save_file({**tensors, "empty.context": EMPTY["context"]}, path, {"ref2v": json.dumps(said)})
    for load in (load_meta, load_refiner):
        with pytest.raises(BadInput, match="do not have the shapes that its metadata says") as caught:
            load(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "field, value",
    [("block_channels", [2**20]), ("transformer_depth", [10**6]), ("context_dim", 10**9), ("pooled_dim", 10**9)],
)
def test_no_network_is_larger_than_any_that_there_is(field, value):
    with pytest.raises(ValueError, match=field):
        UNetConfig.model_validate({**UNET.model_dump(), field: value})
