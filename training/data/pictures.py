"""Picture files and their captions, read into one form: float32 [3, H, W], RGB, 0..1."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageFile, ImageOps
from torch import Tensor

from ..errors import BadInput

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
# Only these decoders are tried, whatever a file is called: others (EPS) start programs or read further files.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
MIN_SIDE = 16
MAX_PIXELS = 8192 * 8192
MAX_ASPECT = 8

_strict = threading.Lock()


def list_pictures(folder: str | Path) -> list[str]:
    """Names of all pictures under `folder`, relative, with forward slashes, in an order that no locale changes.

    Hidden files and folders are left out (macOS puts a `._name.png` beside each picture on foreign disks).

    Raises:
        BadInput: the folder is missing or holds no picture.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"There is no picture folder {folder}.")
    names = [name for name in _files(folder) if Path(name).suffix.lower() in SUFFIXES]
    if not names:
        kinds = ", ".join(sorted(suffix[1:] for suffix in SUFFIXES))
        raise BadInput(f"The folder {folder} holds no picture ({kinds}).")
    return names


def read_picture(path: str | Path, name: str | None = None) -> Tensor:
    """A picture file as float32 [3, H, W] in [0, 1], RGB.

    EXIF orientation is applied, transparent parts are laid over white, 16-bit grey is scaled by 65535, CMYK, palette
    and grey become RGB, and of an animation the first frame is taken. Colours are taken as they stand, like the host
    does: an embedded ICC profile is not applied.

    Args:
        name: what the error sentences call the file; its own name by default.

    Raises:
        BadInput: missing, empty, damaged, not a picture, or of a size that `check_size` refuses.
    """
    path = Path(path)
    name = name or path.name
    if not path.is_file():
        raise BadInput(f"There is no picture {name}.")
    if path.stat().st_size == 0:
        raise BadInput(f"The picture {name} is empty (0 bytes).")
    try:
        with Image.open(path, formats=FORMATS) as image:
            check_size(image.width, image.height, name)  # from the header, before anything is decoded
            _load(image)
            return _to_rgb(ImageOps.exif_transpose(image), name)
    except BadInput:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadInput(f"The picture {name} has more than {MAX_PIXELS} pixels (8192x8192).") from None
    except Image.UnidentifiedImageError:
        raise BadInput(f"The file {name} is not a picture that can be read, or is damaged.") from None
    except Exception as error:  # decoders fail in many ways (struct, zlib, EOF, syntax), all of them the file's fault
        raise BadInput(f"The picture {name} is damaged or cannot be read: {error}.") from error


def check_size(width: int, height: int, name: str) -> None:
    """Raise BadInput for a picture that cannot be trained on: a side below 16 pixels, more than 8192x8192 pixels in
    all, or longer than 8:1."""
    if min(width, height) < MIN_SIDE:
        raise BadInput(f"The picture {name} is {width}x{height} pixels: each side must have at least {MIN_SIDE}.")
    if width * height > MAX_PIXELS:
        raise BadInput(f"The picture {name} is {width}x{height}: it may have {MAX_PIXELS} pixels (8192x8192) at most.")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadInput(
            f"The picture {name} is {width}x{height} pixels: one side may be {MAX_ASPECT} times the other at most."
        )


def to_uint8(picture: Tensor) -> np.ndarray:
    """[3, H, W] in [0, 1] as uint8 [H, W, 3], rounded to the nearest, for PIL."""
    pixels = picture.detach().cpu().clamp(0, 1).mul(255).round().to(torch.uint8)
    return rearrange(pixels, "channels height width -> height width channels").numpy()


def sha256_file(path: str | Path) -> str:
    """SHA-256 (hex) of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def read_caption(path: str | Path) -> str:
    """The text of the `.txt` beside a picture with the same stem, without outer blanks; "" where there is none.

    Raises:
        BadInput: the file is not UTF-8 (a byte-order mark is fine).
    """
    caption = Path(path).with_suffix(".txt")
    try:
        return caption.read_bytes().decode("utf-8-sig").strip()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise BadInput(
            f"The caption {caption.name} is not UTF-8 text (byte {error.start}): save it as UTF-8."
        ) from None
    except OSError as error:
        raise BadInput(f"The caption {caption.name} cannot be read: {error.strerror}.") from error


def find_orphan_captions(folder: str | Path, names: Iterable[str]) -> list[str]:
    """Relative names of `.txt` files under `folder` that belong to none of the pictures `names`."""
    stems = {os.path.splitext(name)[0] for name in names}
    texts = (name for name in _files(Path(folder)) if name.lower().endswith(".txt"))
    return [name for name in texts if os.path.splitext(name)[0] not in stems]


def _files(folder: Path) -> list[str]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        here = Path(parent).relative_to(folder)
        found += [(here / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _load(image: Image.Image) -> None:
    """Decode, and fail on a truncated file even where another node pack has told PIL to fill such files with grey."""
    with _strict:
        before = ImageFile.LOAD_TRUNCATED_IMAGES
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            image.load()
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = before


def _to_rgb(image: Image.Image, name: str) -> Tensor:
    if image.mode == "F":
        raise BadInput(f"The picture {name} holds floating-point numbers: save it with 8 or 16 bits.")
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = torch.from_numpy(np.asarray(image).astype(np.float32))
        if grey.min() < 0 or grey.max() > 65535:
            raise BadInput(f"The picture {name} holds numbers outside 0..65535: save it with 8 or 16 bits.")
        return (grey / 65535).expand(3, -1, -1).contiguous()
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        colour = _planes(image.convert("RGBA"))
        alpha = colour[3:]
        return colour[:3] * alpha + (1 - alpha)
    return _planes(image.convert("RGB"))


def _planes(image: Image.Image) -> Tensor:
    pixels = rearrange(torch.from_numpy(np.array(image)), "height width channels -> channels height width")
    return pixels.contiguous().float() / 255
