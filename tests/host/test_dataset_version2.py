"""What version 2 of a dataset adds to Build Refiner Dataset: masks, weights, half precision, a smaller base."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.host.dataset_graphs import SAMPLING, checkpoint, dataset, datasets, prompt, report


def noise_picture(seed, channels=3):
    return np.random.default_rng(seed).integers(0, 255, (64, 64, channels), dtype=np.uint8)


@pytest.fixture
def bitmaps(host, request):
    """Four pictures whose bytes no version of an encoder changes."""
    folder = host.base / "input" / f"bitmaps {request.node.name}"
    folder.mkdir()
    for seed in range(4):
        Image.fromarray(noise_picture(seed)).save(folder / f"{'abcd'[seed]}.bmp")
    return folder


def test_an_old_graph_finds_the_dataset_that_it_built_before_version_2(host, bitmaps):
    """The name ends in the recipe as commit 70bfb50 hashed it: settings that are left alone change no recipe."""
    report(host.run(prompt("old", folder=bitmaps.name, held_out=1)))
    assert [folder.name for folder in datasets(host, "old")] == ["old-864cb9a001"]


# ---------------------------------------------------------------------------------------------------------------- masks


def left_half():
    mask = np.zeros((64, 64), dtype=np.uint8)
    mask[:, :32] = 255
    return mask


@pytest.fixture
def masked(bitmaps):
    """a has a mask file, b alpha, c a mask that is black, d none."""
    Image.fromarray(left_half()).save(bitmaps / "a_mask.png")
    Image.fromarray(np.dstack([noise_picture(1), left_half()])).save(bitmaps / "b.png")
    (bitmaps / "b.bmp").unlink()
    Image.new("L", (64, 64)).save(bitmaps / "c_mask.png")
    return bitmaps


def test_a_mask_file_or_alpha_says_where_to_learn(host, masked):
    said = report(host.run(prompt("masked", folder=masked.name, masks=True, mirror=True)))
    data = dataset(host, "masked")
    masks = {(pair.source, pair.flip): data.read(i).get("mask") for i, pair in enumerate(data.pairs)}
    left = torch.from_numpy(left_half() / 255).float()[None]
    for source in ("a.bmp", "b.png"):
        assert torch.equal(masks[source, False], left) and torch.equal(masks[source, True], left.flip(-1))
    assert masks["d.bmp", False] is None and {source for source, _ in masks} == {"a.bmp", "b.png", "d.bmp"}
    assert "The mask of the picture c.bmp is 0 everywhere" in said
    Image.fromarray(left_half().T.copy()).save(masked / "a_mask.png")  # another mask is another dataset
    assert report(host.run(prompt("masked", folder=masked.name, masks=True, mirror=True))).startswith("Built")


def test_without_masks_such_a_file_is_a_picture_as_ever(host, masked):
    report(host.run(prompt("unmasked", folder=masked.name)))
    data = dataset(host, "unmasked")
    assert len(data.pairs) == 6 and not data.masked


# -------------------------------------------------------------------------------------------------- weights and storage


def test_a_folder_named_with_a_number_is_drawn_so_often(host, bitmaps):
    (bitmaps / "10_fox").mkdir()
    (bitmaps / "a.bmp").rename(bitmaps / "10_fox" / "a.bmp")
    said = report(host.run(prompt("weights", folder=bitmaps.name, folder_weights=True)))
    assert "Weights: 10_fox: 10 x 1." in said
    data = dataset(host, "weights")
    assert data.info["subsets"] == {"10_fox": 10.0}
    assert [(pair.source, pair.subset) for pair in data.pairs if pair.subset] == [("10_fox/a.bmp", "10_fox")]
    (bitmaps / "10_fox").rename(bitmaps / "0_fox")
    refused = host.run(prompt("weights", folder=bitmaps.name, folder_weights=True))
    assert refused.status == "error" and refused.error.message.startswith("The folder 0_fox asks for 0 repeats")


def test_half_precision_is_another_dataset_of_half_the_size(host, bitmaps):
    for dtype in ("float32", "float16"):
        report(host.run(prompt(dtype, folder=bitmaps.name, storage_dtype=dtype)))
    full, half = dataset(host, "float32"), dataset(host, "float16")
    assert half.info["dtype"] == "float16" and half.read(0)["z"].dtype == torch.float32
    assert 0 < float((half.read(0)["z"] - full.read(0)["z"]).abs().max()) < 1e-3
    sizes = [sum(shard["bytes"] for shard in data.info["shards"] if "shard" in shard["name"]) for data in (full, half)]
    assert sizes[1] < 0.52 * sizes[0]
    assert full.folder.name.rpartition("-")[2] != half.folder.name.rpartition("-")[2]


# ----------------------------------------------------------------------------------------- a base of another size, text


def from_model(**size):
    return {"class_type": "Ref2VSampleBase", "inputs": {"model": ["load", 0], **SAMPLING, **size}}


def test_a_base_made_smaller_is_brought_to_the_size_of_its_target(host, bitmaps):
    for path in sorted(bitmaps.iterdir()):
        Image.open(path).resize((128, 128)).save(path)
        path.with_suffix(".txt").write_text("a fox" if path.stem < "d" else "a hare", encoding="utf-8")
    build = {"vae": ("load", 2), "clip": ["load", 1], "folder": bitmaps.name, "size": 128}
    build["nodes"] = {"load": checkpoint()}
    said = report(host.run(prompt("smaller", base=from_model(width=64, height=64), **build)))
    assert "made within 4096 pixels" in said
    report(host.run(prompt("alike", base=from_model(), **build)))
    small, alike = dataset(host, "smaller"), dataset(host, "alike")
    assert [(p.height, p.width, p.base_height, p.base_width) for p in small.pairs] == [(16, 16, 8, 8)] * 4
    assert [(p.height, p.width, p.base_height, p.base_width) for p in alike.pairs] == [(16, 16, 0, 0)] * 4
    for i in range(4):
        one, other = small.read(i), alike.read(i)
        assert torch.equal(one["z"], other["z"]) and one["b"].shape == one["z"].shape
        assert not torch.allclose(one["b"], other["b"], atol=1e-2)
    # Text is stored once for each caption: two of the pictures, and the empty one.
    (text,) = [load_file(path) for path in sorted(small.folder.glob("text-*.safetensors"))]
    assert len([name for name in text if name.endswith(".context")]) == 3
    half = host.run(prompt("smaller", base=from_model(width=64), **build))
    assert half.status == "error" and "width and height are an area together" in half.error.message
