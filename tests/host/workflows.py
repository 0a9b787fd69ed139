"""The shipped workflows as the tests run them: few pictures, short training, a checkpoint that the tests make."""

import copy
import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.host.checkpoints import MIN
from tests.host.server import PACK

WORKFLOWS = PACK / "workflows"
NAMES = sorted(path.stem for path in (WORKFLOWS / "api").glob("*.json"))

# Another workflow whose refiner it uses.
NEEDS = {
    "refine": "train_refiner",
    "refine_split": "train_refiner",
    "refine_custom_sampler": "train_refiner",
    "generate_and_refine": "train_from_model",
}

VAE = "workflow_vae.safetensors"
PICTURES, HELD_OUT_PICTURE = "workflow_pictures", "workflow_picture.png"
SHORT = {"epochs": 2, "batch_size": 4, "precision": "fp32", "options": '{"data": {"repeats": 2}, "ema_decay": 0.9}'}
PIXELS = {**SHORT, "crop": 32, "run_name": "workflow pixels"}
SIDE = 120
REFINE = {
    "Ref2VLoadRefiner": {"refiner": "workflow pixels/refiner.safetensors"},
    "LoadImage": {"image": HELD_OUT_PICTURE},
    "Down to a third (lanczos)": {"width": SIDE // 3, "height": SIDE // 3},
    "Up again (bicubic): the base": {"width": SIDE, "height": SIDE},
    "The original, to compare": {"width": SIDE, "height": SIDE},
}
DATASET = {"folder": PICTURES, "width": 64, "height": 64, "held_out": 2}
LATENTS = {**SHORT, "preset": "pixel-small", "run_name": "workflow latents", "learning_rate": 0.001}

# workflow -> title or type of a node -> inputs that the test replaces
OVERRIDES: dict[str, dict[str, dict]] = {
    "train_refiner": {
        "Ref2VBuildRefinerDataset": DATASET,
        "Ref2VSetTrainingOptions": {"repeats": 2, "mirror": False, "ema_decay": 0.9},
        "Ref2VTrainRefiner": {name: value for name, value in PIXELS.items() if name != "options"},
    },
    "train_and_refine": {
        "Ref2VBuildRefinerDataset": {**DATASET, "name": "workflow both"},
        "Ref2VTrainRefiner": {**PIXELS, "run_name": "workflow both"},
        **REFINE,
    },
    "refine": REFINE,
    "refine_split": REFINE,
    "refine_custom_sampler": REFINE,
    "train_from_model": {
        "CheckpointLoaderSimple": {"ckpt_name": MIN},
        "Ref2VSampleBase": {"steps": 2},
        "Ref2VBuildRefinerDataset": DATASET,
        "Ref2VTrainRefiner": {**LATENTS, "run_name": "workflow model"},
    },
    "generate_and_refine": {
        "CheckpointLoaderSimple": {"ckpt_name": MIN},
        "EmptyLatentImage": {"width": 128, "height": 64},
        "The base paints": {"steps": 2},
        "Ref2VLoadRefiner": {"refiner": "workflow model/refiner.safetensors"},
    },
    "train_from_pairs": {
        "Ref2VPairBase": {"before_folder": "workflow_pairs/before"},
        "Ref2VBuildRefinerDataset": {**DATASET, "folder": "workflow_pairs/after"},
        "Ref2VTrainRefiner": {**PIXELS, "run_name": "workflow pairs"},
    },
    "precision_plan": {
        "CheckpointLoaderSimple": {"ckpt_name": MIN},
        "KSampler": {"steps": 2},
        "EmptyLatentImage": {"width": 64, "height": 64},
    },
    "vae_split_precision": {
        "Ref2VLoadVAE": {"file": VAE},
        "LoadImage": {"image": HELD_OUT_PICTURE},
    },
    "precision_audit": {
        "LoadImage": {"image": HELD_OUT_PICTURE},
        "CheckpointLoaderSimple": {"ckpt_name": MIN},
        "Ref2VAuditPrecision": {"sigmas": "middle", "dtypes": "bf16"},
    },
    "train_from_latents": {
        "Targets": {"latent": "workflow_target.latent"},
        "Bases, in the same order": {"latent": "workflow_base.latent"},
        "Ref2VTrainRefiner": {**LATENTS, "run_name": "workflow 16 channels"},
    },
    "memory_768p": {
        "CheckpointLoaderSimple": {"ckpt_name": MIN},
        "Ref2VEstimateTrainingMemory": {"network": "pixel-small", "size": "custom", "width": 64, "height": 64},
    },
}


def api(name: str) -> dict:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def ui(name: str) -> dict:
    return json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))


def with_overrides(name: str) -> dict:
    prompt = copy.deepcopy(api(name))
    for wanted, inputs in OVERRIDES[name].items():
        nodes = [node for node in prompt.values() if wanted in (node["class_type"], node["_meta"]["title"])]
        assert nodes, f"{name}: there is no node {wanted}"
        for node in nodes:
            assert set(inputs) <= set(node["inputs"]), f"{name}: {wanted} has no such inputs"
            node["inputs"].update(inputs)
    return prompt


def of_type(prompt: dict, class_type: str) -> list[str]:
    """Ids of the nodes of a type."""
    return [node for node, entry in prompt.items() if entry["class_type"] == class_type]


def as_array(picture: Image.Image) -> np.ndarray:
    """[height, width, 3], 0..1"""
    return np.asarray(picture.convert("RGB"), dtype=np.float32) / 255


# ------------------------------------------------------------------------------------------------- what they are fed


def make_inputs(folder: Path):
    """Pictures, pairs and latents in `folder`, the host's input folder, and a VAE; nothing where they are already."""
    if (folder / HELD_OUT_PICTURE).exists():
        return
    shots = some_pictures(13, 160)
    held_out = shots.pop()
    for place in (PICTURES, "workflow_pairs/before", "workflow_pairs/after"):
        (folder / place).mkdir(parents=True)
    for number, picture in enumerate(shots):
        picture.save(folder / PICTURES / f"picture{number:02d}.png")
        (folder / PICTURES / f"picture{number:02d}.txt").write_text(f"picture number {number}")
        picture.save(folder / "workflow_pairs" / "after" / f"{number:02d}.png")
        before = picture.reduce(3)  # another size and another format than its partner
        before.save(folder / "workflow_pairs" / "before" / f"{number:02d}.jpg", quality=60)
    save_latents(folder)
    save_vae(folder.parent / "models")
    held_out.save(folder / HELD_OUT_PICTURE)


def some_pictures(count: int, side: int) -> list[Image.Image]:
    """Real pictures: those that come with the host's template browser, cut to squares; no line drawings."""
    import comfyui_workflow_templates_media_image as package

    found = []
    for path in sorted((Path(package.__file__).parent / "templates").glob("*.webp")):
        with Image.open(path) as picture:
            if not getattr(picture, "is_animated", False) and min(picture.size) >= 256:
                square = picture.convert("RGB").crop((0, 0, min(picture.size), min(picture.size)))
                square = square.resize((side, side), Image.Resampling.LANCZOS)
                if as_array(square).std() > 0.15:
                    found.append(square)
        if len(found) == count:
            return found
    raise AssertionError(f"The template package has only {len(found)} still pictures.")


def save_latents(folder: Path):
    """Twelve pairs of 16 channels as SaveLatent writes them: smooth targets, and bases that lack the fine part."""
    import torch
    from safetensors.torch import save_file
    from torch.nn import functional

    noise = torch.randn(12, 16, 24, 24, generator=torch.Generator().manual_seed(0))
    target = functional.avg_pool2d(noise, 3, 1, 1) * 3 + 0.5
    base = functional.interpolate(functional.avg_pool2d(target, 3), scale_factor=3.0, mode="bilinear")
    for name, latent in (("target", target), ("base", base)):
        tensors = {"latent_tensor": latent.contiguous(), "latent_format_version_0": torch.tensor([])}
        save_file(tensors, folder / f"workflow_{name}.latent")


def save_vae(models: Path):
    """The VAE of the small checkpoint as a file of its own, its latents enlarged: they are almost constant."""
    import torch
    from safetensors.torch import save_file

    state = torch.load(models / "checkpoints" / MIN, weights_only=True)["state_dict"]
    prefix = "first_stage_model."
    vae = {key.removeprefix(prefix): value.contiguous() for key, value in state.items() if key.startswith(prefix)}
    vae["taesd_encoder.14.weight"] *= 60
    (models / "vae").mkdir(exist_ok=True)
    save_file({key: value.clone() for key, value in vae.items()}, models / "vae" / VAE)
