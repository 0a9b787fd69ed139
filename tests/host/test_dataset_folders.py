"""Build Refiner Dataset on folders as people have them, queued on the real host: each file is used, or named."""

import io
import json
import os
import shutil
import unicodedata

import numpy as np
import pytest
from PIL import Image

from tests.host.dataset_graphs import checkpoint, dataset, datasets, prompt, report, small_pictures

PAIRED = {"class_type": "Ref2VPairBase", "inputs": {"before_folder": "earlier"}}


def noise(seed, size=(96, 64), **how):
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(how.pop("mode", "RGB")).save(file, **how)
    return file.getvalue()


def moving(seed, format):
    frames = [Image.open(io.BytesIO(noise(seed + i, format="PNG"))) for i in range(3)]
    file = io.BytesIO()
    frames[0].save(file, format, save_all=True, append_images=frames[1:])
    return file.getvalue()


def sixteen_bits():
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(5).integers(0, 65535, (64, 96), dtype=np.uint16)).save(file, "PNG")
    return file.getvalue()


# name on the disk -> (content, what the index calls it)
USED = {
    b"plain.png": (noise(0, format="PNG"), "plain.png"),
    b"twice.png": (noise(0, format="PNG"), "twice.png"),
    b"\x83\x65\x83\x58\x83\x67.png": (noise(1, format="PNG"), "\\x83e\\x83X\\x83g.png"),
    b"two\nlines.png": (noise(2, format="PNG"), "two\\x0alines.png"),
    b"x" * 251 + b".png": (noise(3, format="PNG"), "x" * 251 + ".png"),
    b"CAMERA.JPG": (noise(4, format="JPEG"), "CAMERA.JPG"),
    b"deep.png": (sixteen_bits(), "deep.png"),
    b"print.jpg": (noise(6, format="JPEG", mode="CMYK"), "print.jpg"),
    b"moving.webp": (moving(7, "WEBP"), "moving.webp"),
    b"moving.gif": (moving(10, "GIF"), "moving.gif"),
    b"palette.png": (noise(13, format="PNG", mode="P", transparency=0), "palette.png"),
    b"junk.png": (noise(14, format="PNG", exif=b"Exif\0\0junk"), "junk.png"),
    b"saved.jfif": (noise(15, format="JPEG"), "saved.jfif"),
}
SKIPPED = {
    b"zero.png": (b"", "zero.png is empty"),
    b"cut.jpg": (noise(16, format="JPEG")[:1500], "cut.jpg is damaged"),
    b"self.png": (None, "self.png"),  # a link to itself
    b"latin.png": (noise(17, format="PNG"), "latin.txt is not UTF-8 text"),
    b"page.png": (b"<!DOCTYPE html><title>404</title>", "page.png is not a picture"),
    b"\xffbroken.png": (b"junk", "\\xffbroken.png is not a picture"),
}
BESIDE = {
    b"plain.TXT": "a fox".encode("utf-16"),
    b"saved.caption": b"\xef\xbb\xbfa hare",
    b"latin.txt": "caf\xe9".encode("latin-1"),
    b"lonely.txt": b"nothing",
    b".DS_Store": b"\0",
    b"Thumbs.db": b"\0",
    b"._plain.png": b"\0\5\x16\x07",
    b"phone.heic": b"\0\0\0\x18ftypheic",
    b"clip.mp4": b"\0\0\0\x18ftypmp42",
    b"\xfe.mov": b"\0",
}


@pytest.fixture(scope="module")
def dirty(host):
    """What the node said of one folder that holds all of that, and the dataset."""
    if os.name == "nt" or os.uname().sysname == "Darwin":
        pytest.skip("file names are text there")
    folder = os.fsencode(host.base / "input" / "dirty")
    os.mkdir(folder)
    for name, content in [*((k, v[0]) for k, v in (USED | SKIPPED).items()), *BESIDE.items()]:
        if content is not None:
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)
    os.symlink(b"self.png", os.path.join(folder, b"self.png"))
    os.symlink(folder, os.path.join(folder, b"circle"))
    result = host.run(prompt("dirty", folder="dirty", caption="a picture")).expect_success()
    return report(result), dataset(host, "dirty"), host


@pytest.mark.parametrize("name", [name for _, name in USED.values()])
def test_each_sound_file_is_used_under_a_name_that_can_be_written(dirty, name):
    _, data, _ = dirty
    assert name in {pair.source for pair in data.pairs}
    assert name.encode().decode() == name


def test_nothing_else_is_used(dirty):
    _, data, _ = dirty
    assert len(data.pairs) == len(USED)


@pytest.mark.parametrize("words", [words for _, words in SKIPPED.values()])
def test_each_other_file_is_skipped_and_named(dirty, words):
    said, data, _ = dirty
    assert f"Skipped {len(SKIPPED)}:" in said and words in said
    assert words in (data.folder / "report.txt").read_bytes().decode()


def test_what_lies_beside_is_counted_and_named(dirty):
    said, data, host = dirty
    assert "Captions without a picture (1): lonely.txt." in said
    wanted = ".heic: 1 (phone.heic); .mov: 1 (\\xfe.mov); .mp4: 1 (clip.mp4); links to folders: 1 (circle)"
    assert f"Not used in the folder: {wanted}." in said
    captions = {pair.source: pair.caption for pair in data.pairs}
    assert (captions["plain.png"], captions["saved.jfif"], captions["twice.png"]) == ("a fox", "a hare", "a picture")
    json.loads((data.folder / "index.json").read_bytes().decode())
    assert "UnicodeEncodeError" not in host.log_path.read_text(errors="replace")


def test_a_picture_that_is_there_twice_stays_on_one_side(dirty):
    _, data, _ = dirty
    groups = {pair.source: pair.group for pair in data.pairs}
    assert groups["plain.png"] == groups["twice.png"] != groups["print.jpg"]


def test_one_picture_makes_a_dataset(host, folder):
    for path in sorted(folder.glob("*.png"))[1:]:
        path.unlink()
    assert report(host.run(prompt("single", folder=folder.name))).startswith("Built single-")
    assert len(dataset(host, "single").train) == 1


# ------------------------------------------------------------------------------------------------------- paired folders


def smaller(picture, path):
    with Image.open(picture) as image:
        image.resize((image.width // 2, image.height // 2)).save(path)


@pytest.fixture
def pairs(host, folder):
    before = host.base / "input" / "earlier"
    shutil.rmtree(before, ignore_errors=True)
    before.mkdir()
    return folder, before


def test_a_pair_whose_accents_are_written_apart_on_one_side_is_a_pair(host, pairs):
    folder, before = pairs
    smaller(folder / "aaa.png", before / (unicodedata.normalize("NFD", "café") + ".png"))
    (folder / "aaa.png").rename(folder / (unicodedata.normalize("NFC", "café") + ".png"))
    said = report(host.run(prompt("accents", base=PAIRED, folder=folder.name)))
    assert len(dataset(host, "accents").pairs) == 1 and "Skipped 7" in said


def test_where_no_name_has_a_partner_that_is_the_reason_given(host, pairs):
    """Not that of one damaged picture among them, which was the first."""
    folder, before = pairs
    (folder / "aaa.png").write_bytes(b"")
    shutil.copy(folder / "bbb.png", before / "another name.png")
    result = host.run(prompt("unmatched", base=PAIRED, folder=folder.name))
    assert result.status == "error" and datasets(host, "unmatched") == []
    assert result.error.message.startswith(
        "None of the 8 pictures can be used; 7 of them for this reason: The picture bbb.png has no partner of the same "
        "name in the paired folder earlier."
    )


def test_a_damaged_partner_is_named(host, pairs):
    folder, before = pairs
    for path in folder.glob("*.png"):
        smaller(path, before / path.name)
    (before / "aaa.png").write_bytes(b"")
    (before / "bbb.png").unlink()
    os.symlink("nowhere.png", before / "bbb.png")
    said = report(host.run(prompt("partners", base=PAIRED, folder=folder.name)))
    assert "aaa.png (before) is empty" in said and "There is no picture bbb.png (before)." in said
    assert len(dataset(host, "partners").pairs) == 6


# ----------------------------------------------------------------------------------------- pictures that come as a list


def dataset_of_a_list(host, name, loader, folder, **inputs):
    nodes = {
        "list": {"class_type": loader, "inputs": {"folder": folder.name}},
        "path": {"class_type": "PreviewAny", "inputs": {"source": ["build", 0]}},
    }
    result = host.run(prompt(name, images=["list", 0], nodes=nodes, **inputs))
    return result


def test_a_list_of_pictures_of_any_size_is_one_dataset(host, folder):
    result = dataset_of_a_list(host, "list", "LoadImageDataSetFromFolder", folder, caption="a picture")
    assert report(result).startswith("Built list-") and len(result.outputs["path"]["text"]) == 1
    data = dataset(host, "list")
    assert [pair.source for pair in data.pairs] == [f"image{i:05d}" for i in range(8)]
    assert len({(pair.height, pair.width) for pair in data.pairs}) == 2
    assert {pair.caption for pair in data.pairs} == {"a picture"}


def test_a_list_of_texts_gives_each_picture_its_own(host, folder):
    for i, path in enumerate(sorted(folder.glob("*.png"))):
        path.with_suffix(".txt").write_text(f"caption {i}", encoding="utf-8")
    result = dataset_of_a_list(host, "texts", "LoadImageTextDataSetFromFolder", folder, caption=["list", 1])
    assert report(result).startswith("Built texts-")
    assert sorted(pair.caption for pair in dataset(host, "texts").pairs) == [f"caption {i}" for i in range(8)]


def test_a_list_where_one_value_is_wanted_gets_one_sentence(host, folder):
    texts = small_pictures(host.base / "input" / "texts of a list", sorted(folder.glob("*.png")) * 3)
    nodes = {"list": {"class_type": "LoadImageTextDataSetFromFolder", "inputs": {"folder": texts.name}}}
    for inputs, words in (
        ({"name": ["list", 1]}, "name brings 8 values at once, and one dataset has one."),
        ({"caption": ["list", 1]}, "caption brings 8 texts, which belong to images"),
    ):
        result = host.run(prompt(**{"name": "several", "folder": folder.name, "nodes": nodes, **inputs}))
        assert result.status == "error" and words in result.error.message, result.error
    assert datasets(host, "several") == []


# ---------------------------------------------------------------------------------------------------------- decoration


@pytest.mark.parametrize("damage", ["cut sheet", "report that is no text", "missing report"])
def test_a_damaged_contact_sheet_or_report_is_made_again_and_the_data_stay(host, folder, damage):
    name = damage.replace(" ", "-")
    (folder / "zero.png").write_bytes(b"")
    build = prompt(name, vae=("load", 2), folder=folder.name, nodes={"load": checkpoint()})
    assert report(host.run(build)).startswith("Built")
    data = dataset(host, name)
    sheet, text = data.folder / "contact_sheet.png", data.folder / "report.txt"
    before = {path.name: path.read_bytes() for path in data.folder.iterdir()}
    if damage == "cut sheet":
        sheet.write_bytes(sheet.read_bytes()[:200])
    elif damage == "missing report":
        text.unlink()
    else:
        text.write_bytes(b"\xff\xfe\x00")
    said = report(host.run(build))
    assert said.startswith(f"Reused {data.folder.name}") and "were made again" in said and "zero.png is empty" in said
    assert {path.name: path.read_bytes() for path in data.folder.iterdir()} == before
    assert len(datasets(host, name)) == 1  # nothing was moved aside
    assert "made again" not in report(host.run(build))
