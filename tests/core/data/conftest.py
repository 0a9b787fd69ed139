"""Real pictures (the template stills that come with the host) and small datasets."""

import importlib.util
from pathlib import Path

import pytest
import torch

from training.data.shards import DatasetWriter

PIXELS = {"name": "pixels", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1}
SD15 = {"name": "SD15", "channels": 4, "scale": 0.18215, "shift": 0.0, "downscale": 8}
SIZES = [(4, 6), (6, 4), (4, 6), (5, 5)]
GIVEN = {"source": "a.png", "sha256": "0", "group": "a", "split": "train"}
TEXT = {"tokens": 5, "dim": 6, "pooled": 7, "fingerprint": "c0ffee"}


@pytest.fixture(scope="session")
def template_stills() -> Path:
    """The folder of the pictures that the host's template package brings."""
    spec = importlib.util.find_spec("comfyui_workflow_templates_media_image")
    if spec is None:
        pytest.skip("the host's template pictures are not installed here")
    return Path(spec.submodule_search_locations[0]) / "templates"


def writer_for(folder, **options) -> DatasetWriter:
    return DatasetWriter(folder, **({"latent": SD15, "vae": None, "base": {"kind": "latents"}} | options))


def pair(height=4, width=4, channels=4, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random z and b, [C, h, w]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, channels, height, width, generator=generator).unbind()


def text(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"context": torch.randn(5, 6, generator=generator), "pooled": torch.randn(7, generator=generator)}


def fill(writer: DatasetWriter, sizes, *, channels: int = 4, with_text: bool = False, held_out: int = 1) -> None:
    """One pair per (height, width), the first `held_out` of them held out; z holds its own pair's number plus noise."""
    for i, (height, width) in enumerate(sizes):
        generator = torch.Generator().manual_seed(i)
        z = i + 0.1 * torch.randn(channels, height, width, generator=generator)
        b = z + 0.1 * torch.randn(channels, height, width, generator=generator)
        writer.add(
            z,
            b,
            source=f"picture-{i}.png",
            sha256=f"{i:064x}",
            group=f"group {i}",
            split="held_out" if i < held_out else "train",
            caption=f"caption {i}",
            **(text(i) if with_text else {}),
        )


@pytest.fixture
def build(tmp_path):
    """build(sizes, latent=..., with_text=..., ...) -> folder of a finished dataset."""

    def build(sizes, *, name="dataset", latent=SD15, with_text=False, held_out=1, **options):
        folder = tmp_path / name
        described = {"context": TEXT, "empty": text(99)} if with_text else {"context": None, "empty": None}
        with DatasetWriter(
            folder,
            latent=latent,
            vae={"fingerprint": "beef", "dtype": "float32"},
            base={"kind": "degradation"},
            **described,
            **options,
        ) as writer:
            fill(writer, sizes, channels=latent["channels"], with_text=with_text, held_out=held_out)
        return folder

    return build
