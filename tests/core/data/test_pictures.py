"""Every kind of picture that people have comes out as the same kind of tensor, and the rest is named."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps

from training.data.picture_files import list_pictures
from training.data.pictures import FORMATS, quick_size, read_picture, to_uint8
from training.errors import BadInput
from training.storage.files import sha256_file

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


def with_junk_exif(image, path):
    """A sound picture whose EXIF block says that it is turned, and then is no EXIF at all."""
    image.save(path, exif=b"Exif\x00\x00this is not a TIFF header", quality=95, lossless=True)
    return path


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_junk_in_the_exif_of_a_sound_picture_leaves_it_as_it_stands(tmp_path, suffix):
    picture = read_picture(with_junk_exif(halves(), tmp_path / f"junk.{suffix}"))
    assert picture.shape == (3, 32, 48)
    assert colour(picture, 4, 16)[0] > 240 and colour(picture, 44, 16)[2] > 240


@pytest.mark.parametrize("turn", range(1, 9))
def test_every_orientation_is_turned_as_pillow_turns_it(tmp_path, turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    path = save(halves(), tmp_path / "turned.png", exif=exif)
    with Image.open(path) as image:
        wanted = np.array(ImageOps.exif_transpose(image))
    assert np.array_equal(to_uint8(read_picture(path)), wanted)


@pytest.mark.parametrize("suffix, format", [("jfif", "JPEG"), ("JPE", "JPEG"), ("apng", "PNG"), ("AVIF", "AVIF")])
def test_further_endings_of_known_formats_are_pictures(tmp_path, suffix, format):
    path = tmp_path / f"picture.{suffix}"
    halves().save(path, format=format, quality=95)
    assert list_pictures(tmp_path) == [path.name] and colour(read_picture(path), 4, 16)[0] > 240


def test_a_size_is_read_by_the_same_decoders_and_no_other(tmp_path):
    path = save(halves(), tmp_path / "a.png")
    assert quick_size(path) == (48, 32) and quick_size(tmp_path / "gone.png") is None
    drawing = tmp_path / "drawing.png"
    drawing.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n")
    with Image.open(drawing) as opened:  # Pillow itself would read it, and start Ghostscript
        assert opened.format == "EPS" and "EPS" not in FORMATS
    assert quick_size(drawing) is None


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


def test_file_hash_is_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert sha256_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_eight_bits_survive_the_way_there_and_back(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    assert np.array_equal(to_uint8(read_picture(save(Image.fromarray(pixels), tmp_path / "p.png"))), pixels)
