"""Every kind of picture that people have comes out as the same kind of tensor, and the rest is named."""

import codecs

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from training.data.pictures import (
    find_orphan_captions,
    list_pictures,
    read_caption,
    read_picture,
    sha256_file,
    to_uint8,
)
from training.errors import BadInput

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def halves(left=RED, right=BLUE, size=(48, 32)) -> Image.Image:
    image = Image.new("RGB", size, right)
    image.paste(left, (0, 0, size[0] // 2, size[1]))
    return image


def colour(picture, x, y):
    return tuple(round(255 * value) for value in picture[:, y, x].tolist())


def save(image, path, **options):
    image.save(path, **options)
    return path


def test_every_template_still_is_read(template_stills):
    names = list_pictures(template_stills)
    assert len(names) > 50 and names == sorted(names)
    for name in names[::6]:
        picture = read_picture(template_stills / name)
        with Image.open(template_stills / name) as image:
            assert picture.shape == (3, image.height, image.width)
        assert picture.dtype == torch.float32 and picture.is_contiguous()
        assert 0 <= picture.min() < picture.max() <= 1 and picture.std() > 0.01


@pytest.mark.parametrize("suffix, mode", [("png", "RGB"), ("bmp", "RGB"), ("tiff", "RGB"), ("gif", "P"), ("png", "P")])
def test_lossless_formats_keep_every_pixel(tmp_path, suffix, mode):
    path = save(halves().convert(mode), tmp_path / f"picture.{suffix}")
    picture = read_picture(path)
    assert picture.shape == (3, 32, 48)
    assert (colour(picture, 0, 0), colour(picture, 47, 31)) == (RED, BLUE)


def test_grey_becomes_three_equal_planes(tmp_path):
    picture = read_picture(save(Image.new("L", (20, 20), 51), tmp_path / "grey.png"))
    assert picture.shape == (3, 20, 20) and torch.allclose(picture, torch.tensor(0.2))


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path, suffix):
    ramp = np.linspace(0, 65535, 32 * 64).round().astype(np.uint16).reshape(32, 64)
    picture = read_picture(save(Image.fromarray(ramp), tmp_path / f"ramp.{suffix}"))
    assert torch.allclose(picture[0], torch.from_numpy(ramp.astype(np.float32)) / 65535)
    assert len(picture[0].unique()) > 256 and torch.equal(picture[0], picture[2])


@pytest.mark.parametrize("suffix, options", [("jpg", {"quality": 95}), ("tiff", {})])
def test_cmyk_becomes_the_colours_it_shows(tmp_path, suffix, options):
    picture = read_picture(save(halves().convert("CMYK"), tmp_path / f"print.{suffix}", **options))
    left, right = colour(picture, 8, 16), colour(picture, 40, 16)
    assert left[0] > 240 and max(left[1:]) < 15 and right[2] > 240 and max(right[:2]) < 15


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_lie_over_white(tmp_path, mode):
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 16, 32))
    path = tmp_path / "alpha.png"
    if mode == "P":
        palette = Image.new("P", (32, 32), 0)
        palette.putpalette([255, 0, 255, 0, 0, 0])
        palette.paste(1, (0, 0, 16, 32))
        palette.save(path, transparency=0)
    else:
        image.convert(mode).save(path)
    picture = read_picture(path)
    assert (colour(picture, 4, 4), colour(picture, 28, 4)) == ((0, 0, 0), (255, 255, 255))


def test_half_transparent_is_half_white(tmp_path):
    picture = read_picture(save(Image.new("RGBA", (16, 16), (255, 0, 0, 128)), tmp_path / "half.png"))
    assert colour(picture, 0, 0) == (255, 127, 127)


@pytest.mark.parametrize("suffix", ["webp", "gif", "png"])
def test_an_animation_gives_its_first_frame(tmp_path, suffix):
    frames = [Image.new("RGB", (32, 32), shade) for shade in (RED, GREEN, BLUE)]
    path = tmp_path / f"moving.{suffix}"
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)
    assert colour(read_picture(path), 16, 16) == RED


@pytest.mark.parametrize("suffix", ["jpg", "webp"])
def test_a_picture_taken_sideways_stands_upright(tmp_path, suffix):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to show
    path = save(halves(), tmp_path / f"sideways.{suffix}", exif=exif, quality=95)
    picture = read_picture(path)
    assert picture.shape == (3, 48, 32)
    assert colour(picture, 16, 4)[0] > 200 and colour(picture, 16, 44)[2] > 200  # what was left is on top


def test_a_jpeg_that_is_called_png_is_read(tmp_path):
    path = tmp_path / "really-a-jpeg.png"
    halves().save(path, format="JPEG")
    assert read_picture(path).shape == (3, 32, 48)


def test_a_phone_picture_with_a_second_one_inside_gives_the_first(tmp_path):
    path = tmp_path / "phone.jpg"
    halves().save(path, format="MPO", save_all=True, append_images=[Image.new("RGB", (24, 24))], quality=95)
    picture = read_picture(path)
    assert picture.shape == (3, 32, 48) and colour(picture, 8, 16)[0] > 240


def bad_files(folder):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpg").write_text("not a picture")
    (folder / "postscript.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n")
    for suffix in ("png", "jpg", "webp", "gif", "tiff", "bmp"):
        path = save(noise, folder / f"truncated.{suffix}")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    broken = bytearray(save(noise, folder / "broken.png").read_bytes())
    broken[200:260] = bytes(60)
    (folder / "broken.png").write_bytes(broken)
    save(Image.new("RGB", (1, 1)), folder / "dot.png")
    save(Image.new("RGB", (15, 400)), folder / "thin.png")
    save(Image.new("RGB", (20000, 10)), folder / "line.png")
    save(Image.new("RGB", (900, 100)), folder / "banner.png")
    save(Image.new("1", (8200, 8200)), folder / "large.png")
    save(Image.new("1", (16000, 14000)), folder / "bomb.png")  # beyond the size at which PIL itself gives up
    save(Image.fromarray(np.full((32, 32), 0.5, dtype=np.float32)), folder / "float.tiff")
    save(Image.fromarray(np.full((32, 32), 70000, dtype=np.int32)), folder / "int32.tiff")
    return sorted(path.name for path in folder.iterdir())


def test_every_unusable_picture_is_named_in_one_sentence(tmp_path):
    said = {}
    for name in bad_files(tmp_path):
        with pytest.raises(BadInput) as refused:
            read_picture(tmp_path / name)
        said[name] = str(refused.value)
        assert name in said[name] and "\n" not in said[name] and said[name].endswith(".")
    assert "is empty (0 bytes)" in said["empty.png"]
    assert "is 1x1 pixels: each side must have at least 16" in said["dot.png"]
    assert "20000x10" in said["line.png"] and "900x100" in said["banner.png"] and "8200x8200" in said["large.png"]
    assert "more than 67108864 pixels" in said["bomb.png"]
    assert "8 or 16 bits" in said["float.tiff"] and "0..65535" in said["int32.tiff"]


def test_a_missing_picture_and_a_folder_are_named(tmp_path):
    with pytest.raises(BadInput, match="There is no picture gone.png"):
        read_picture(tmp_path / "gone.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(BadInput, match="There is no picture sub/folder.png"):
        read_picture(tmp_path / "folder.png", name="sub/folder.png")


def test_truncated_files_are_refused_even_where_pil_was_told_to_fill_them(tmp_path, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    path = save(halves(size=(256, 256)), tmp_path / "cut.jpg")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(BadInput, match="cut.jpg"):
        read_picture(path)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True  # the host's own setting is left as it was


def test_pictures_are_listed_in_one_order_with_their_folders(tmp_path):
    for name in ("b.PNG", "a/z.jpg", "a/B.webp", "ä.jpeg", "notes.md", ".hidden.png", ".git/c.png", "x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert list_pictures(tmp_path) == ["a/B.webp", "a/z.jpg", "b.PNG", "ä.jpeg"]


def test_a_folder_without_pictures_says_so(tmp_path):
    with pytest.raises(BadInput, match="holds no picture"):
        list_pictures(tmp_path)
    with pytest.raises(BadInput, match="There is no picture folder"):
        list_pictures(tmp_path / "gone")


def test_captions_are_read_beside_their_pictures(tmp_path):
    fox = "\u4e00\u53ea\u72d0\u72f8"  # the same in Chinese
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + f" {fox}, a fox\r\n".encode())
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    assert read_caption(tmp_path / "a.png") == f"{fox}, a fox"
    assert read_caption(tmp_path / "none.png") == ""
    with pytest.raises(BadInput, match="latin.txt is not UTF-8 text .byte 3"):
        read_caption(tmp_path / "latin.png")


def test_captions_without_a_picture_are_found(tmp_path):
    for name in ("a.txt", "a.png", "sub/b.txt", "sub/a.jpg", "c.v2.txt", "c.v2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert find_orphan_captions(tmp_path, list_pictures(tmp_path)) == ["sub/b.txt"]
    assert read_caption(tmp_path / "c.v2.png") == "x"


def test_file_hash_is_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_eight_bits_survive_the_way_there_and_back(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert np.array_equal(to_uint8(read_picture(save(Image.fromarray(pixels), tmp_path / "p.png"))), pixels)
