"""Datasets on disk: what is written comes back, and what is damaged is named."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.core.data.conftest import GIVEN, SD15, SIZES, pair, writer_for
from tests.core.data.version_1 import as_version_1
from training.data.index import content_hash, index_text
from training.data.shards import RefinerDataset
from training.errors import BadInput


def rewrite_index(folder, change, rehash=True):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    if rehash:
        index["content_hash"] = content_hash(index)
    (folder / "index.json").write_text(index_text(index))


def test_pairs_come_back_as_they_were_written(build):
    folder = build(SIZES, with_text=True)
    data = RefinerDataset.open(folder, verify=True)
    assert [(p.height, p.width) for p in data.pairs] == SIZES
    assert (data.held_out, data.train) == ([0], [1, 2, 3])
    for i, (height, width) in enumerate(SIZES):
        generator = torch.Generator().manual_seed(i)
        z = i + 0.1 * torch.randn(4, height, width, generator=generator)
        read = data.read(i)
        assert torch.equal(read["z"], z) and read["b"].shape == z.shape
        assert read["context"].shape == (5, 6) and read["pooled"].shape == (7,)
    assert data.empty_context()["context"].shape == (5, 6)
    assert data.pairs[1].caption == "caption 1" and data.pairs[1].source == "picture-1.png"


def test_a_crop_is_the_same_part_of_both_latents(build):
    data = RefinerDataset.open(build([(9, 7)], held_out=0))
    whole, part = data.read(0), data.read(0, (2, 1, 5, 4))
    for name in ("z", "b"):
        assert torch.equal(part[name], whole[name][:, 2:7, 1:5])


def test_many_shards_and_one_hold_the_same_pairs(build):
    one, many = RefinerDataset.open(build(SIZES)), RefinerDataset.open(build(SIZES, name="many", shard_bytes=1))
    assert len({p.shard for p in one.pairs}) == 1 and len({p.shard for p in many.pairs}) == len(SIZES)
    for i in range(len(SIZES)):
        assert torch.equal(one.read(i)["b"], many.read(i)["b"])


def test_the_same_pairs_give_the_same_bytes_in_any_folder(build):
    first, second = build(SIZES, with_text=True), build(SIZES, name="elsewhere", with_text=True)
    names = sorted(path.name for path in first.iterdir())
    assert names == ["index.json", "pairs.safetensors", "shard-00000.safetensors", "text-00000.safetensors"]
    for name in names:
        written = (first / name).read_bytes()
        assert written == (second / name).read_bytes()
        assert str(first.parent).encode() not in written


def test_the_content_hash_follows_the_tensors_and_the_index(tmp_path, build):
    original = RefinerDataset.open(build(SIZES)).content_hash
    assert RefinerDataset.open(build(SIZES, name="held", held_out=2)).content_hash != original
    assert RefinerDataset.open(build([*SIZES[:3], (5, 6)], name="sizes")).content_hash != original


def test_the_writer_keeps_a_copy_of_what_it_is_given(tmp_path):
    z, b = pair()
    expected = z.clone()
    with writer_for(tmp_path / "data") as writer:
        writer.add(z, b, **GIVEN)
        z.zero_()
    assert torch.equal(RefinerDataset.open(tmp_path / "data").read(0)["z"], expected)


def test_one_picture_may_come_twice_mirrored(tmp_path):
    with writer_for(tmp_path / "data") as writer:
        writer.add(*pair(), **GIVEN)
        writer.add(*pair(seed=1), flip=True, **GIVEN)
    assert [p.flip for p in RefinerDataset.open(tmp_path / "data").pairs] == [False, True]


def test_a_contact_sheet_lies_beside_the_shards_without_changing_the_hash(tmp_path):
    hashes = []
    for name in ("with", "without"):
        with writer_for(tmp_path / name) as writer:
            writer.add(*pair(), **GIVEN)
            if name == "with":
                writer.attach("contact_sheet.png", b"picture")
        hashes.append(RefinerDataset.open(tmp_path / name, verify=True).content_hash)
    assert hashes[0] == hashes[1] and (tmp_path / "with" / "contact_sheet.png").read_bytes() == b"picture"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"z": torch.zeros(3, 4, 4)}, "a.png: the target latent must be [4, height, width], not [3, 4, 4]"),
        ({"b": torch.zeros(4, 4, 5)}, "a.png: the base latent is [4, 4, 5] and its target [4, 4, 4]"),
        ({"b": torch.full((4, 4, 4), float("nan"))}, "a.png: the base latent has 64 of 64 values that are NaN"),
        ({"z": torch.full((4, 4, 4), float("inf"))}, "a.png: the target latent has 64 of 64"),
        ({"split": "test"}, "a.png: the split must be one of train, held_out, not 'test'"),
        ({"rgb": torch.zeros(3, 2, 2)}, "a.png: the preview picture must be [3, 4, 4], not [3, 2, 2]"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_by_its_source(tmp_path, change, words):
    z, b = pair()
    with pytest.raises(BadInput) as refused, writer_for(tmp_path / "data") as writer:
        writer.add(**({"z": z, "b": b} | GIVEN | change))
    assert words in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_text_must_have_the_shape_that_the_dataset_says(tmp_path):
    context = {"tokens": 5, "dim": 6, "pooled": 7, "fingerprint": "x"}
    empty = {"context": torch.zeros(5, 6), "pooled": torch.zeros(7)}
    with pytest.raises(BadInput, match=r"a.png: the dataset has text, so context \[5, 6\] is needed"):
        with writer_for(tmp_path / "data", context=context, empty=empty) as writer:
            writer.add(*pair(), caption="a boat", **GIVEN)
    with pytest.raises(BadInput, match=r"the empty caption: pooled must be \[7\], not \[8\]"):
        writer_for(tmp_path / "data", context=context, empty=empty | {"pooled": torch.zeros(8)})
    assert list(tmp_path.iterdir()) == []


def test_siblings_are_not_written_to_both_sides(tmp_path):
    with pytest.raises(BadInput, match="siblings must not part"), writer_for(tmp_path / "data") as writer:
        writer.add(*pair(), **GIVEN)
        writer.add(*pair(), **(GIVEN | {"split": "held_out"}))


def test_a_dataset_without_anything_to_learn_is_refused(tmp_path):
    z, b = pair()
    with pytest.raises(BadInput, match="no training pair"), writer_for(tmp_path / "data") as writer:
        writer.add(z, b, **(GIVEN | {"split": "held_out"}))
    with pytest.raises(BadInput, match="nothing to learn"), writer_for(tmp_path / "data") as writer:
        writer.add(z, z, **GIVEN)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, words",
    [
        ({"scale": [0.1, 0.2]}, "scale must be one finite number or 4 of them and not 0"),
        ({"scale": float("inf")}, "scale must be one finite number"),
        ({"scale": 0}, "not 0"),
        ({"channels": 0}, "channels must be a whole number from 1, not 0"),
        ({"downscale": 8.0}, "downscale must be a whole number"),
    ],
)
def test_a_latent_description_that_cannot_be_is_refused(tmp_path, change, words):
    with pytest.raises(BadInput, match=words):
        writer_for(tmp_path / "data", latent=SD15 | change)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_build_leaves_nothing(tmp_path, interruption):
    with pytest.raises(interruption), writer_for(tmp_path / "data", shard_bytes=1) as writer:
        writer.add(*pair(), **GIVEN)
        writer.add(*pair(), **GIVEN)
        assert not (tmp_path / "data").exists() and len(list(tmp_path.iterdir())) == 1
        raise interruption
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_written_over(build, tmp_path):
    folder = build(SIZES)
    before = (folder / "index.json").read_bytes()
    with pytest.raises(BadInput, match="exists already"):
        writer_for(folder)
    with pytest.raises(BadInput, match="exists already"), writer_for(tmp_path / "late") as writer:
        writer.add(*pair(), **GIVEN)
        (tmp_path / "late").mkdir()
    assert (folder / "index.json").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("name", ["shard-00000.safetensors", "index.json"])
def test_a_full_disk_is_said_with_the_bytes_it_needed(tmp_path, name):
    with pytest.raises(BadInput) as refused, writer_for(tmp_path / "data") as writer:
        writer.add(*pair(), **GIVEN)
        (tmp_path / ".data.partial" / name).symlink_to("/dev/full")
    assert "is full" in str(refused.value) and f"{name} needs " in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_making_belongs_to_one_writer(tmp_path):
    with writer_for(tmp_path / "data") as writer:
        with pytest.raises(BadInput, match="is being written by another run"):
            writer_for(tmp_path / "data")
        writer.add(*pair(), **GIVEN)
    assert RefinerDataset.open(tmp_path / "data", verify=True).train == [0]


def test_what_a_killed_process_left_does_not_stand_in_the_way(tmp_path):
    program = "import os, sys; from training.storage.staged_folder import StagedFolder\n"
    program += "StagedFolder(sys.argv[1]).write('shard-00000.safetensors', b'half'); os._exit(9)"
    root = Path(__file__).resolve().parents[3]
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "data")], cwd=root, check=False)
    assert killed.returncode == 9 and (tmp_path / ".data.partial").is_dir() and not (tmp_path / "data").exists()
    with writer_for(tmp_path / "data") as writer:
        writer.add(*pair(), **GIVEN)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_what_a_killed_build_of_another_recipe_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    program = "import os, sys; from training.storage.staged_folder import StagedFolder\n"
    program += "StagedFolder(sys.argv[1]).write('shard-00000.safetensors', b'half'); os._exit(9)"
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "killed")], cwd=root, check=False)
    assert (tmp_path / ".killed.partial").is_dir()
    (tmp_path / ".notes.partial").mkdir()  # somebody else's
    with writer_for(tmp_path / "living") as living:
        living.add(*pair(), **GIVEN)
        with writer_for(tmp_path / "data") as writer:
            writer.add(*pair(), **GIVEN)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".living.partial", ".notes.partial", "data"]
    assert RefinerDataset.open(tmp_path / "living", verify=True).train == [0]


def test_opening_something_else_says_what_is_wrong(build, tmp_path):
    with pytest.raises(BadInput, match="There is no dataset folder"):
        RefinerDataset.open(tmp_path / "missing")
    with pytest.raises(BadInput, match="holds no index.json"):
        RefinerDataset.open(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(BadInput, match="cannot be read"):
        RefinerDataset.open(tmp_path)
    (tmp_path / "index.json").write_text("[1]")
    with pytest.raises(BadInput, match="does not say format 'ref2v-dataset'"):
        RefinerDataset.open(tmp_path)


def test_a_newer_version_is_not_guessed_at(build):
    folder = build(SIZES)
    rewrite_index(folder, lambda index: index.update(version=3))
    with pytest.raises(BadInput, match="has version 3 of its format, and this program reads the versions 1, 2"):
        RefinerDataset.open(folder)


def test_an_index_changed_by_hand_is_noticed(build):
    folder = build(SIZES)
    rewrite_index(folder, lambda index: index["splits"]["train"].update(pairs=9), rehash=False)
    with pytest.raises(BadInput, match="was changed after the dataset was built"):
        RefinerDataset.open(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "a\\b", "", 3])
def test_an_index_cannot_lead_out_of_its_folder(build, name):
    folder = build(SIZES)
    rewrite_index(folder, lambda index: index["shards"][0].update(name=name))
    with pytest.raises(BadInput, match="not a plain file name"):
        RefinerDataset.open(folder)


def test_a_pair_in_a_shard_that_is_not_listed_is_refused(build, tmp_path):
    folder = as_version_1(build(SIZES), tmp_path / "old")
    rewrite_index(folder, lambda index: index["pairs"][0].update(shard="../other"))
    with pytest.raises(BadInput, match="does not list"):
        RefinerDataset.open(folder)


def test_a_missing_or_truncated_shard_is_named(build):
    folder = build(SIZES)
    shard = folder / "shard-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(BadInput, match=r"shard-00000.safetensors of the dataset .* must have \d+ bytes"):
        RefinerDataset.open(folder)
    shard.unlink()
    with pytest.raises(BadInput, match="lacks its file shard-00000.safetensors"):
        RefinerDataset.open(folder)


def test_a_flipped_bit_is_found_when_asked_to_verify(build):
    folder = build(SIZES)
    shard = folder / "shard-00000.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    data = RefinerDataset.open(folder)
    with pytest.raises(BadInput, match="shard-00000.safetensors .* is damaged"):
        RefinerDataset.open(folder, verify=True)
    with pytest.raises(BadInput, match="shard-00000.safetensors .* is damaged"):
        data.verify()
    data.verify(should_stop=lambda: True)  # whoever wants to stop does not wait for it


def test_a_shard_whose_header_is_damaged_is_named_when_read(build):
    folder = build(SIZES)
    shard = folder / "shard-00000.safetensors"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    with pytest.raises(BadInput, match="shard-00000.safetensors .* cannot be read"):
        RefinerDataset.open(folder).read(1)


def test_an_open_dataset_can_be_sent_to_another_process(build):
    data = RefinerDataset.open(build(SIZES))
    expected = data.read(1)["z"]
    assert torch.equal(pickle.loads(pickle.dumps(data)).read(1)["z"], expected)
