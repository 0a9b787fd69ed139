"""Folders as people have them: each file is used, or named where it is not, and its name can be written anywhere."""

import codecs
import json
import os
import unicodedata

import pytest

from training.data.picture_files import PictureFiles, left_out_text, list_pictures, plain_text, read_caption
from training.data.split import split
from training.errors import BadInput

SHIFT_JIS = b"\x83\x65\x83\x58\x83\x67.png"  # "test", as an archive from a Japanese Windows has it


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


def bytes_file(folder, name):
    with open(os.path.join(os.fsencode(folder), name), "wb") as file:
        file.write(b"x")


needs_byte_names = pytest.mark.skipif(os.name == "nt" or os.uname().sysname == "Darwin", reason="names are text there")


def test_pictures_are_listed_in_one_order_with_their_folders(tmp_path):
    fill(tmp_path, "b.PNG", "a/z.jpg", "a/B.webp", "\u00e4.jpeg", "notes.md", ".hidden.png", ".git/c.png", "x.txt")
    assert list_pictures(tmp_path) == ["a/B.webp", "a/z.jpg", "b.PNG", "\u00e4.jpeg"]


def test_a_folder_without_pictures_says_what_it_holds(tmp_path):
    with pytest.raises(BadInput, match="There is no picture folder gone"):
        list_pictures(tmp_path / "gone")
    with pytest.raises(BadInput, match=r"holds no picture \([^)]*\)\.$"):
        list_pictures(tmp_path)
    fill(tmp_path, "a.heic", "b.HEIC", "clip.mp4")
    with pytest.raises(BadInput, match=r"it holds .heic: 2 \(a.heic, b.HEIC\); .mp4: 1 \(clip.mp4\)"):
        list_pictures(tmp_path)


@needs_byte_names
@pytest.mark.parametrize("raw, name", [(SHIFT_JIS, "\\x83e\\x83X\\x83g.png"), (b"a\nb\x1b.png", "a\\x0ab\\x1b.png")])
def test_a_name_that_is_no_text_is_used_and_can_be_written_anywhere(tmp_path, raw, name):
    bytes_file(tmp_path, raw)
    fill(tmp_path, "fox.png")
    files = PictureFiles(tmp_path)
    assert files.names == sorted([name, "fox.png"])
    assert os.fsencode(files.path(name).name) == raw and files.path(name).read_bytes() == b"x"
    for written in (name, json.dumps(name, ensure_ascii=False)):
        assert written.encode().decode() == written and len(written.splitlines()) == 1
    assert set(split(files.names, None, 1, seed=0)) == set(files.names)


@needs_byte_names
def test_two_names_that_read_alike_are_not_taken_for_one_another(tmp_path):
    bytes_file(tmp_path, b"\x83.png")
    fill(tmp_path, "\\x83.png")
    files = PictureFiles(tmp_path)
    assert files.names == ["\\x83.png"] and files.left_out == {"names that read like another's": ["\\x83.png"]}


@pytest.mark.parametrize(
    "name",
    ["\u72d0\u72f8.png", "e\u0301.jpg", "a\u3000b.png", "\U0001f469\u200d\U0001f467.webp", "x" * 251 + ".png"],
)
def test_every_other_name_is_its_own_text(name):
    assert plain_text(name) == name


@pytest.mark.parametrize("ending", [".txt", ".TXT", ".caption", ".Caption"])
def test_a_caption_is_found_whatever_its_ending(tmp_path, ending):
    files = PictureFiles(fill(tmp_path, "a.png", f"a{ending}", "b.png"))
    assert files.caption_name("a.png") == f"a{ending}" and files.caption_name("b.png") is None
    assert files.orphan_captions == [] and files.left_out == {}


@pytest.mark.skipif(os.name == "nt", reason="a.txt and a.TXT are one file there")
def test_of_two_captions_the_plainest_counts_and_the_other_is_named(tmp_path):
    files = PictureFiles(fill(tmp_path, "a.png", "a.caption", "a.TXT", "a.txt"))
    assert files.caption_name("a.png") == "a.txt"
    assert files.left_out == {"captions beside another one": ["a.TXT", "a.caption"]}


def test_captions_find_pictures_whose_accents_are_written_apart(tmp_path):
    apart, one = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFD", "NFC"))
    files = PictureFiles(fill(tmp_path, f"{apart}.png", f"{one}.txt"))
    (picture,) = files.names
    assert files.path(files.caption_name(picture)).read_bytes() == b"x" and files.orphan_captions == []


def test_captions_without_a_picture_are_found(tmp_path):
    files = PictureFiles(fill(tmp_path, "a.txt", "a.png", "sub/b.txt", "sub/a.jpg", "c.v2.txt", "c.v2.png"))
    assert files.orphan_captions == ["sub/b.txt"] and files.caption_name("c.v2.png") == "c.v2.txt"


def test_the_longest_name_that_a_disk_takes_is_used(tmp_path):
    """Its caption would have a longer name than the disk takes, so it is not asked for by name."""
    name = "x" * 251 + ".png"
    assert PictureFiles(fill(tmp_path, name)).caption_name(name) is None


def test_what_is_no_picture_is_counted_and_named(tmp_path):
    fill(tmp_path, "a.png", "b.heic", "c.heic", "sub/d.mp4", "README", "Thumbs.db", "desktop.ini", ".DS_Store")
    fill(tmp_path, "._a.png", "__MACOSX/._a.png")
    files = PictureFiles(tmp_path)
    assert files.names == ["a.png"]
    assert left_out_text(files.left_out) == (
        ".heic: 2 (b.heic, c.heic); .mp4: 1 (sub/d.mp4); files without an ending: 1 (README)"
    )
    assert left_out_text({"x": ["3", "1", "2", "4"]}) == "x: 4 (1, 2, 3, ...)"


@pytest.mark.skipif(os.name == "nt", reason="links need rights there, and it has no pipes")
def test_circles_of_links_end_and_pipes_are_not_opened(tmp_path):
    fill(tmp_path, "a.png")
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "self.png").symlink_to(tmp_path / "self.png")
    os.mkfifo(tmp_path / "pipe.png")
    files = PictureFiles(tmp_path)
    assert files.names == ["a.png", "self.png"]  # the link is named by whoever opens it
    assert files.left_out == {"links to folders": ["circle"], "pipes and devices": ["pipe.png"]}


@pytest.mark.parametrize(
    "data",
    [
        codecs.BOM_UTF8 + " \u4e00\u53ea\u72d0\u72f8, a fox\r\n".encode(),
        " \u4e00\u53ea\u72d0\u72f8, a fox".encode(),
        codecs.BOM_UTF16_LE + "\u4e00\u53ea\u72d0\u72f8, a fox\r\n".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "\u4e00\u53ea\u72d0\u72f8, a fox".encode("utf-16-be"),
    ],
    ids=["utf-8 with a mark", "utf-8", "utf-16", "utf-16 of a Mac"],
)
def test_captions_are_read_as_editors_write_them(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    assert read_caption(tmp_path / "a.txt") == "\u4e00\u53ea\u72d0\u72f8, a fox"


@pytest.mark.parametrize(
    "data, words",
    [
        ("caf\xe9".encode("latin-1"), "is not UTF-8 text (byte 3)"),
        ("a fox".encode("utf-16-le"), "is not UTF-8 text (it holds zero bytes)"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
        (b"word " * 300_000, "more than 1048576 bytes"),
    ],
    ids=["latin-1", "utf-16 without a mark", "half a letter", "a book"],
)
def test_a_caption_that_is_no_text_is_named(tmp_path, data, words):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(BadInput) as refused:
        read_caption(tmp_path / "a.txt", "sub/a.txt")
    assert words in str(refused.value) and "sub/a.txt" in str(refused.value)
    with pytest.raises(BadInput, match="gone.txt cannot be read"):
        read_caption(tmp_path / "gone.txt")
