"""What is measured of the pairs as they are written: the residual, a preview."""


import pytest
import torch

from tests.core.data.conftest import GIVEN, PIXELS, SIZES, pair, writer_for
from training.data.shards import DatasetWriter, RefinerDataset, estimate_bytes
from training.errors import BadInput


def test_residual_rms_is_over_every_element_of_the_training_pairs(build):
    data = RefinerDataset.open(build(SIZES))
    residuals = torch.cat([(read["z"] - read["b"]).flatten() for read in map(data.read, data.train)]).double()
    assert data.residual_rms == pytest.approx(residuals.square().mean().sqrt().item(), rel=1e-6)
    splits = data.info["splits"]
    assert splits["train"] == {"pairs": 3, "bytes": estimate_bytes(SIZES[1:], 4)}
    assert splits["held_out"] == {"pairs": 1, "bytes": estimate_bytes(SIZES[:1], 4)}


def test_the_preview_fit_finds_a_linear_decoder(tmp_path):
    weight, bias = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0.1, -0.2, 0.3])
    with writer_for(tmp_path / "data") as writer:
        for i in range(3):
            z, b = pair(8, 8, seed=i)
            rgb = torch.einsum("chw,cr->rhw", z, weight) + bias[:, None, None]
            writer.add(z, b, rgb=rgb, **GIVEN)
    preview = RefinerDataset.open(tmp_path / "data").info["preview"]
    assert torch.allclose(torch.tensor(preview["weight"]), weight, atol=1e-4)
    assert torch.allclose(torch.tensor(preview["bias"]), bias, atol=1e-4)


def test_pixel_space_needs_no_preview(build):
    assert RefinerDataset.open(build([(4, 4)] * 2, latent=PIXELS)).info["preview"] is None


def test_bases_that_differ_by_rounding_alone_leave_nothing_to_learn(tmp_path):
    """Flat pictures, shrunk and enlarged: float32 leaves 1e-7, and a network would be trained to paint that noise."""
    z = torch.full((3, 8, 8), 0.3)
    latent = {"name": "pixels", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}
    with (
        pytest.raises(BadInput, match="equals its target"),
        DatasetWriter(tmp_path / "flat", latent=latent, vae=None, base={"kind": "degradation"}) as writer,
    ):
        for i in range(3):
            writer.add(z, z + 2e-7, source=f"{i}.png", sha256=f"{i:064x}", group=f"{i}", split="train")
    assert list(tmp_path.iterdir()) == []
