"""Version 2 of the format: what it adds, and that version 1 is read and trained on as before."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.core.data.conftest import PIXELS, TEXT, text, writer_for
from tests.core.data.version_1 import as_version_1
from training.data.batches import BatchSource
from training.data.shards import RefinerDataset, estimate_bytes
from training.errors import BadInput

ROOT = Path(__file__).resolve().parents[3]


def numbered(i: int, *shape: int) -> dict:
    z, b = torch.randn(2, *(shape or (4, 4, 4)), generator=torch.Generator().manual_seed(i)).unbind()
    return {"z": z, "b": b, "source": f"{i}.png", "sha256": f"{i:x}", "group": f"{i}", "split": "train"}


def test_a_caption_is_stored_once_however_many_pairs_have_it(tmp_path):
    with writer_for(tmp_path / "data", context=TEXT, empty=text(99)) as writer:
        for i in range(6):
            writer.add(**numbered(i), caption="a boat" if i % 2 else "", **(text(1) if i == 1 else {}))
    data = RefinerDataset.open(tmp_path / "data", verify=True)
    stored = (data.folder / "text-00000.safetensors").stat().st_size
    assert 2 * 4 * (5 * 6 + 7) < stored < 3 * 4 * (5 * 6 + 7) + 512
    for i in range(6):
        expected = text(1 if i % 2 else 99)
        assert all(torch.equal(data.read(i)[name], expected[name]) for name in expected)
        assert data.pairs[i].caption == ("a boat" if i % 2 else "")
    assert torch.equal(data.empty_context()["pooled"], text(99)["pooled"])


def test_one_caption_with_other_tensors_is_another_one(tmp_path):
    with writer_for(tmp_path / "data", context=TEXT) as writer:
        writer.add(**numbered(0), caption="a boat", **text(0))
        writer.add(**numbered(1), caption="a boat", **text(1))
    data = RefinerDataset.open(tmp_path / "data")
    assert all(torch.equal(data.read(i)["context"], text(i)["context"]) for i in range(2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_takes_half_the_room_and_is_read_as_float32(tmp_path, dtype):
    whole = {}
    for kind in ("float32", dtype):
        with writer_for(tmp_path / kind, dtype=kind, context=TEXT, empty=text(99)) as writer:
            for i in range(3):
                writer.add(**numbered(i, 4, 16, 16), mask=torch.rand(16, 16), caption=f"{i}", **text(i))
        whole[kind] = RefinerDataset.open(tmp_path / kind, verify=True)
    rounded = getattr(torch, dtype)
    for name in ("z", "b", "context", "pooled"):
        read, expected = whole[dtype].read(2, (1, 2, 8, 9))[name], whole["float32"].read(2, (1, 2, 8, 9))[name]
        assert read.dtype == torch.float32 and torch.equal(read, expected.to(rounded).float())
    sizes, shape = [(16, 16)] * 3, TEXT
    assert 2 * estimate_bytes(sizes, 4, shape, dtype=dtype, masks=3) == estimate_bytes(sizes, 4, shape, masks=3)
    written = {kind: whole[kind].info["splits"]["train"]["bytes"] for kind in whole}
    assert 2 * written[dtype] == written["float32"] == estimate_bytes(sizes, 4, masks=3)


def test_what_float16_cannot_hold_is_refused(tmp_path):
    with pytest.raises(BadInput, match="a.png: the target latent has 64 of 64 .* infinite in float16"):
        with writer_for(tmp_path / "data", dtype="float16") as writer:
            given = numbered(0) | {"z": torch.full((4, 4, 4), 1e6), "source": "a.png"}
            writer.add(**given)


def test_a_clip_has_its_frames_and_a_still_has_none(tmp_path):
    with writer_for(tmp_path / "data") as writer:
        writer.add(**numbered(0, 5, 4, 6, 8), mask=torch.eye(8)[:6].reshape(1, 6, 8))
        writer.add(**numbered(1, 4, 6, 8))
    data = RefinerDataset.open(tmp_path / "data")
    clip, still = data.read(0, (1, 2, 4, 5)), data.read(1, (1, 2, 4, 5))
    assert torch.equal(clip["z"], numbered(0, 5, 4, 6, 8)["z"][:, :, 1:5, 2:7]) and clip["mask"].shape == (5, 1, 4, 5)
    assert torch.equal(still["b"], numbered(1, 4, 6, 8)["b"][:, 1:5, 2:7]) and "mask" not in still
    assert [pair.frames for pair in data.pairs] == [5, 1] and data.most_frames == 5


def test_masks_subsets_and_the_base_s_own_size_come_back(tmp_path):
    mask = torch.rand(4, 4)
    with writer_for(tmp_path / "data", subsets={"faces": 2.5}) as writer:
        writer.add(**numbered(0), mask=mask, subset="faces", base_size=(3, 2))
        writer.add(**numbered(1))
    data = RefinerDataset.open(tmp_path / "data")
    assert torch.equal(data.read(0)["mask"], mask[None]) and data.masked
    first, second = data.pairs
    assert (first.subset, first.base_height, first.base_width, first.masked) == ("faces", 3, 2, True)
    assert (second.subset, second.base_height, second.base_width, second.masked) == ("", 0, 0, False)
    assert data.pairs.weights([0, 1]).tolist() == [2.5, 1.0]


def test_the_residual_is_measured_where_the_mask_lets_it_count(tmp_path):
    with writer_for(tmp_path / "data") as writer:
        z, mask = torch.zeros(4, 4, 4), torch.zeros(4, 4)
        mask[:, :2] = 1
        b = torch.where(mask.bool(), 2.0, 50.0).expand(4, -1, -1)
        writer.add(**numbered(0) | {"z": z, "b": b}, mask=mask)
    assert RefinerDataset.open(tmp_path / "data").residual_rms == 2.0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"mask": torch.ones(4, 5)}, r"0.png: the mask must be \[1, 1, 4, 4\], not \[4, 5\]"),
        ({"mask": torch.full((4, 4), 1.5)}, "0.png: the mask must lie in 0..1, not in 1.5..1.5"),
        ({"mask": torch.zeros(4, 4)}, "0.png: the mask is 0 everywhere"),
        ({"subset": "hands"}, "0.png: its subset 'hands' is none of faces"),
        ({"base_size": (0, 4)}, r"0.png: the size of its base must be at least 1 x 1 cells, not \[0, 4\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_source(tmp_path, change, words):
    with pytest.raises(BadInput, match=words), writer_for(tmp_path / "data", subsets={"faces": 1.0}) as writer:
        writer.add(**numbered(0), **change)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("subsets", [{"": 1.0}, {"faces": 0}, {"faces": float("nan")}, {"faces": True}, {3: 1.0}])
def test_a_subset_that_cannot_be_is_refused(tmp_path, subsets):
    with pytest.raises(BadInput, match="subset"):
        writer_for(tmp_path / "data", subsets=subsets)


def test_names_that_are_no_unicode_come_back(tmp_path):
    name = os.fsdecode(b"caf\xe9-\xc3\xa9.png")
    with writer_for(tmp_path / "data") as writer:
        writer.add(**numbered(0) | {"source": name, "group": name})
    assert RefinerDataset.open(tmp_path / "data").pairs[0].source == name


@pytest.mark.parametrize("kind", ["cut", "flipped", "foreign"])
def test_a_damaged_table_of_pairs_is_named(build, kind):
    folder = build([(4, 4)] * 3)
    table = folder / "pairs.safetensors"
    whole = table.read_bytes()
    changed = {"cut": whole[:-1], "flipped": whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]}
    table.write_bytes(changed.get(kind, b"\0" * len(whole)))
    with pytest.raises(BadInput, match=r"pairs\.safetensors of the dataset .* (is damaged|must have \d+ bytes)"):
        RefinerDataset.open(folder)


# ---- a killed build -------------------------------------------------------------------------------------------------

BUILD = """
import os, sys
from pathlib import Path
from tests.core.data.test_format import built
built(Path(sys.argv[1]), die_at=int(sys.argv[2]))
"""


def built(folder: Path, die_at: int | None = None, recipe: str = "the recipe", error: type | None = None) -> int:
    """Seven pairs, two a shard, four captions. Returns how many were there already."""
    options = {"context": TEXT, "empty": text(99), "subsets": {"faces": 2.0}, "shard_rows": 2}
    with writer_for(folder, resume=recipe, **options) as writer:
        for i in range(writer.resumed, 7):
            if i == die_at:
                if error:
                    raise error
                os._exit(9)
            given = {"caption": f"{i % 4}", "subset": "faces" if i == 5 else "", **text(i % 4)}
            writer.add(**numbered(i), rgb=torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(i)), **given)
        return writer.resumed


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill(folder: Path, at: int) -> None:
    run = subprocess.run([sys.executable, "-c", BUILD, str(folder), str(at)], cwd=ROOT, check=False)
    assert run.returncode == 9 and not folder.exists()


def test_a_killed_build_goes_on_with_what_it_had_and_gives_the_same_bytes(tmp_path):
    assert built(tmp_path / "whole") == 0
    kill(tmp_path / "data", 6)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / ".data.partial").glob("*-00001.safetensors")}
    assert built(tmp_path / "data") == 4  # two shards of two; the third was not finished
    assert files_of(tmp_path / "data") == files_of(tmp_path / "whole")
    assert {p: (tmp_path / "data" / p.name).stat().st_mtime_ns for p in before} == before


@pytest.mark.parametrize("change", ["another recipe", "a shard is gone", "the word is damaged"])
def test_what_a_killed_build_left_is_used_only_where_it_is_whole_and_of_this_recipe(tmp_path, change):
    built(tmp_path / "whole")
    kill(tmp_path / "data", 6)
    left = tmp_path / ".data.partial"
    if change == "a shard is gone":
        (left / "shard-00001.safetensors").unlink()
    elif change == "the word is damaged":
        word = left / ".progress-00001"
        word.write_bytes(word.read_bytes()[:-9])
    resumed = built(tmp_path / "data", recipe=change if change == "another recipe" else "the recipe")
    assert resumed == (0 if change == "another recipe" else 2)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "whole")


def test_an_interruption_keeps_the_finished_shards_and_bad_input_keeps_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        built(tmp_path / "data", die_at=5, error=KeyboardInterrupt)
    assert not (tmp_path / "data").exists() and built(tmp_path / "data") == 4
    with pytest.raises(BadInput):
        built(tmp_path / "other", die_at=5, error=BadInput)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_another_build_leaves_a_killed_one_a_week(tmp_path):
    kill(tmp_path / "data", 6)
    built(tmp_path / "other")
    assert (tmp_path / ".data.partial").is_dir()
    for path in (tmp_path / ".data.partial").iterdir():
        os.utime(path, (0, 0))
    built(tmp_path / "third")
    assert not (tmp_path / ".data.partial").exists()


# ---- version 1 ------------------------------------------------------------------------------------------------------

SIZES = [(5, 6), (6, 5), (4, 9), (8, 8), (5, 5), (8, 8), (5, 6)]
# Of the batches of three epochs, by the program that wrote version 1
AS_BEFORE = [
    (
        {"batch_size": 3, "repeats": 2, "seed": 7, "crop": 4, "caption_dropout": 0.4},
        "fb59c9d9235b3ed8b5e51142c8effc64163b81b158d4c9597422cb439f899748",
    ),
    ({"batch_size": 2, "seed": 1}, "9f87357c76f187a1d631754ae8c9f3572398d3b64072c9a89997d7e43fa9dd47"),
    ({"batch_size": 2, "repeats": 3, "crop": 6}, "4453d416dae36d3a6459f8fe1b2c032a38c079318a5e8e86313fa12733747191"),
]


@pytest.mark.parametrize("options, digest", AS_BEFORE)
def test_version_1_gives_the_batches_that_it_gave(build, tmp_path, options, digest):
    folder = as_version_1(build(SIZES, with_text=True), tmp_path / "old")
    source, found = BatchSource(folder, **options), hashlib.sha256()
    for k in range(3 * source.per_epoch):
        for name, value in sorted(source[k].items()):
            found.update(name.encode())
            found.update(value.numpy().tobytes() if torch.is_tensor(value) else str(value).encode())
    assert found.hexdigest() == digest


def test_version_1_reads_as_version_2_does(build, tmp_path):
    new = RefinerDataset.open(build(SIZES, with_text=True))
    old = RefinerDataset.open(as_version_1(new.folder, tmp_path / "old"), verify=True)
    assert json.loads((old.folder / "index.json").read_text())["version"] == 1 == old.version
    assert (old.train, old.held_out, old.residual_rms) == (new.train, new.held_out, new.residual_rms)
    for i, pair in enumerate(new.pairs):
        mine, theirs = new.read(i, (1, 1, 3, 4)), old.read(i, (1, 1, 3, 4))
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert all(getattr(old.pairs[i], name) == getattr(pair, name) for name in ("source", "height", "caption"))
    assert all(torch.equal(value, new.empty_context()[name]) for name, value in old.empty_context().items())


def test_a_shard_of_version_1_whose_header_is_damaged_is_named(build, tmp_path):
    folder = as_version_1(build([(4, 4)] * 2, latent=PIXELS), tmp_path / "old")
    shard = folder / "shard-00000.safetensors"
    shard.write_bytes(b"\x20" + b"\xff" * (shard.stat().st_size - 1))
    with pytest.raises(BadInput, match=r"shard-00000\.safetensors .* cannot be read"):
        RefinerDataset.open(folder).read(1)
