"""Every shipped workflow, through the real host's queue: what comes out are pictures, and they are the right ones.

They run as they are shipped, but for the table below: few pictures, short training, a checkpoint that the tests make.
"""

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.host.checkpoints import MIN
from tests.host.server import PACK, PACK_NAME

WORKFLOWS = PACK / "workflows"
NAMES = sorted(path.stem for path in (WORKFLOWS / "api").glob("*.json"))

# Another workflow whose refiner it uses.
NEEDS = {
    "refine": "train_refiner",
    "refine_split": "train_refiner",
    "refine_custom_sampler": "train_refiner",
    "generate_and_refine": "train_from_model",
}

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
    "train_refiner": {"Ref2VBuildRefinerDataset": DATASET, "Ref2VTrainRefiner": PIXELS},
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
    "train_from_latents": {
        "Targets": {"latent": "workflow_target.latent"},
        "Bases, in the same order": {"latent": "workflow_base.latent"},
        "Ref2VTrainRefiner": {**LATENTS, "run_name": "workflow 16 channels"},
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


@pytest.fixture(scope="module")
def inputs(host):
    """Pictures, pairs and latents in the host's input folder."""
    folder = host.base / "input"
    shots = some_pictures(13, 160)
    shots.pop().save(folder / HELD_OUT_PICTURE)
    for place in (PICTURES, "workflow_pairs/before", "workflow_pairs/after"):
        (folder / place).mkdir(parents=True)
    for number, picture in enumerate(shots):
        picture.save(folder / PICTURES / f"picture{number:02d}.png")
        (folder / PICTURES / f"picture{number:02d}.txt").write_text(f"picture number {number}")
        picture.save(folder / "workflow_pairs" / "after" / f"{number:02d}.png")
        before = picture.reduce(3)  # another size and another format than its partner
        before.save(folder / "workflow_pairs" / "before" / f"{number:02d}.jpg", quality=60)
    save_latents(folder)


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


@pytest.fixture(scope="module")
def run(host, inputs):
    """run(name): what came of a workflow, after those that it needs; each one runs once."""
    done = {}

    def run_once(name: str):
        if name not in done:
            if name in NEEDS:
                run_once(NEEDS[name])
            extra = {"extra_pnginfo": {"workflow": ui(name)}}  # as the front end sends it
            done[name] = host.run(with_overrides(name), timeout=600, extra_data=extra).expect_success()
        return done[name]

    return run_once


# ------------------------------------------------------------------------------------------------- what comes of them


def test_the_table_covers_every_workflow():
    assert set(OVERRIDES) == set(NAMES)
    assert set(NEEDS.values()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_picture_of_a_workflow_is_a_picture(host, run, name):
    result, prompt = run(name), api(name)
    for node in [*of_type(prompt, "SaveImage"), *of_type(prompt, "PreviewImage")]:
        assert result.outputs[node]["images"], f"{prompt[node]['_meta']['title']} shows nothing"
    pictures = [as_array(picture) for picture in host.pictures(result)]
    assert pictures
    for picture in pictures:
        assert min(picture.shape[:2]) >= 64
        assert picture.std() > 0.02 and picture.max() > 0.1  # NaN becomes black, and black is constant


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("train")])
def test_training_leaves_a_whole_run_and_says_what_it_did(host, run, name):
    result, prompt = run(name), with_overrides(name)
    train = prompt[of_type(prompt, "Ref2VTrainRefiner")[0]]["inputs"]
    folder = host.base / "output" / "refiners" / train["run_name"]
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    report = json.loads((folder / "report.json").read_text())
    assert report["training"]["epochs"] == 2 and report["evaluation"]["on"] == "held-out pairs"
    assert {path.name for path in folder.glob("*.png")} == {"grid.png", "loss.png"}
    texts = [result.outputs[node]["text"][0] for node in of_type(prompt, "PreviewAny")]
    assert any("training pairs" in text for text in texts) and any("Measured on" in text for text in texts)


@pytest.mark.parametrize("name", ["refine", "refine_split", "refine_custom_sampler", "train_and_refine"])
def test_refined_differs_from_the_base_and_is_the_same_picture(host, run, name):
    base, refined, original = thirds(host, run(name), name)
    assert np.abs(refined - base).mean() > 1 / 255
    assert np.corrcoef(refined.ravel(), original.ravel())[0, 1] > 0.8


@pytest.mark.parametrize("name", ["refine_split", "refine_custom_sampler"])
def test_other_ways_to_sample_give_the_picture_of_the_plain_ksampler(host, run, name):
    plain, other = (thirds(host, run(which), which)[1] for which in ("refine", name))
    assert np.abs(plain - other).max() <= 1.01 / 255


def test_refiner_behind_a_base_model_changes_its_picture(host, run):
    (node,) = of_type(api("generate_and_refine"), "PreviewImage")
    picture = as_array(host.pictures(run("generate_and_refine"), node)[0])
    base, refined = picture[:, :128], picture[:, -128:]
    assert picture.shape == (64, 260, 3)
    assert np.abs(refined - base).mean() > 1 / 255


def thirds(host, result, name: str) -> list[np.ndarray]:
    """Base, refined and original from the picture that shows them side by side."""
    (node,) = of_type(api(name), "PreviewImage")
    picture = as_array(host.pictures(result, node)[0])
    assert picture.shape == (SIDE, 3 * SIDE + 2 * 4, 3)
    return [picture[:, left : left + SIDE] for left in (0, SIDE + 4, 2 * (SIDE + 4))]


@pytest.mark.parametrize("name", NAMES)
def test_saved_pictures_drop_back_into_the_graph(host, run, name):
    prompt = with_overrides(name)
    for node in of_type(prompt, "SaveImage"):
        (picture,) = host.pictures(run(name), node)
        assert picture.format == "PNG"
        assert json.loads(picture.info["prompt"]).keys() == prompt.keys()
        assert json.loads(picture.info["workflow"]) == ui(name)


# -------------------------------------------------------------------------------------------- the two forms of a file


@pytest.mark.parametrize("name", NAMES)
def test_ui_file_holds_the_graph_of_the_api_file(name):
    prompt, graph = api(name), ui(name)
    nodes = {str(node["id"]): node for node in graph["nodes"] if node["type"] not in ("Note", "MarkdownNote")}
    assert {i: node["type"] for i, node in nodes.items()} == {i: node["class_type"] for i, node in prompt.items()}
    sources = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    for i, entry in prompt.items():
        linked = {slot["name"]: sources[slot["link"]] for slot in nodes[i]["inputs"] if slot.get("link") is not None}
        assert linked == {key: value for key, value in entry["inputs"].items() if isinstance(value, list)}
        values = nodes[i].get("widgets_values", [])
        assert all(value in values for value in entry["inputs"].values() if not isinstance(value, list))
        assert nodes[i].get("title", entry["_meta"]["title"]) == entry["_meta"]["title"]


@pytest.mark.parametrize("name", NAMES)
def test_ui_file_gives_the_same_pictures_each_time_it_is_queued(name):
    seeds = [value for node in ui(name)["nodes"] for value in node.get("widgets_values", [])]
    assert not {"randomize", "increment", "decrement"} & {value for value in seeds if isinstance(value, str)}


@pytest.mark.parametrize("name", NAMES)
def test_nodes_do_not_lie_on_each_other(name):
    boxes = []
    for node in ui(name)["nodes"]:
        (x, y), (width, height) = node["pos"], node["size"]
        collapsed = node.get("flags", {}).get("collapsed")
        boxes.append((x, y - 30, x + width, y + (0 if collapsed else height)))
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_template_browser_lists_every_workflow_with_a_picture(host):
    assert sorted(host.get("/workflow_templates")[PACK_NAME]) == NAMES
    for name in NAMES:
        assert json.loads(host.request(f"/api/workflow_templates/{PACK_NAME}/{name}.json")) == ui(name)
        assert host.request(f"/api/workflow_templates/{PACK_NAME}/{name}.jpg")[:2] == b"\xff\xd8"


def test_notes_speak_of_workflows_that_exist():
    for name in NAMES:
        notes = [node["widgets_values"][0] for node in ui(name)["nodes"] if node["type"] == "MarkdownNote"]
        for mentioned in re.findall(r"\*([a-z]+_[a-z_]+)\*", " ".join(notes)):
            assert mentioned in NAMES, f"{name}: {mentioned}"
