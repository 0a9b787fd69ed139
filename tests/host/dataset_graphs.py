"""Prompts that build a dataset, and what of it lies on the disk."""

import importlib.util
from pathlib import Path

from PIL import Image

from tests.host.checkpoints import MIN
from training.data.shards import RefinerDataset

PIXELS = {"class_type": "VAELoader", "inputs": {"vae_name": "pixel_space"}}
THIRD = {"class_type": "Ref2VDegradeBase", "inputs": {"kind": "resize", "amount": 3.0}}
SAMPLING = {"steps": 4, "cfg": 1.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 0.3, "seed": 5}


def checkpoint(name=MIN):
    return {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": name}}


def prompt(name, *, base=THIRD, vae=("pixels", 0), size=64, nodes=None, **inputs):
    """The smallest prompt that builds a dataset `name`."""
    build = {"base": ["base", 0], "name": name, "width": size, "height": size, **inputs}
    if vae:
        build["vae"] = list(vae)
    return {
        "pixels": PIXELS,
        "base": base,
        **(nodes or {}),
        "build": {"class_type": "Ref2VBuildRefinerDataset", "inputs": build},
    }


def report(result) -> str:
    return result.expect_success().outputs["build"]["text"][0]


def datasets(host, name) -> list[Path]:
    """Everything in the datasets' folder that belongs to `name`, hidden leftovers included."""
    folder = host.base / "output" / "refiner_datasets"
    return sorted(path for path in folder.glob("*") if path.name.lstrip(".").startswith(f"{name}-"))


def dataset(host, name) -> RefinerDataset:
    (folder,) = datasets(host, name)
    return RefinerDataset.open(folder, verify=True)


def real_stills() -> list[Path]:
    """Real pictures that nobody here made: the stills of the host's template package."""
    package = importlib.util.find_spec("comfyui_workflow_templates_media_image")
    found = sorted(Path(package.submodule_search_locations[0]).rglob("*.webp"))
    return [path for path in found if not getattr(Image.open(path), "is_animated", False)]


def small_pictures(folder: Path, stills: list[Path]) -> Path:
    """Eight small pictures cut from stills, in `folder`, which is made."""
    folder.mkdir(parents=True)
    for i, still in enumerate(stills[:24:3]):
        picture = Image.open(still).convert("RGB").resize((160, 160), Image.Resampling.BICUBIC)
        picture.crop((0, 0, 144, 96) if i % 2 else (0, 0, 96, 128)).save(folder / f"{'abcdefgh'[i] * 3}.png")
    return folder
