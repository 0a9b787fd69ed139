"""Picture files and their captions, read into one form: float32 [3, H, W], RGB, 0..1."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from einops import rearrange
from PIL import Image, ImageFile
from torch import Tensor

from ..errors import BadInput

_AVIF = importlib.util.find_spec("PIL._avif") is not None  # not every build of Pillow has it
SUFFIXES = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif"}
    | ({".avif"} if _AVIF else set())
)
# Only these decoders are tried, whatever a file is called: others (EPS) start programs or read further files.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", *(("AVIF",) if _AVIF else ()))
MIN_SIDE = 16
MAX_PIXELS = 8192 * 8192
MAX_ASPECT = 8

_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_strict = threading.Lock()
_Read = TypeVar("_Read")


def read_alpha(path: str | Path, name: str | None = None) -> Tensor | None:
    """The opacity of a picture file, float32 [1, H, W] in [0, 1], turned as `read_picture` turns it; None where it is
    opaque all over. Raises BadInput as that does."""
    return _read(path, name, lambda image, _: _alpha(image))


def read_picture(path: str | Path, name: str | None = None) -> Tensor:
    """A picture file as float32 [3, H, W] in [0, 1], RGB.

    EXIF orientation is applied where it can be read, transparent parts are laid over white, 16-bit grey is scaled by
    65535, CMYK, palette and grey become RGB, and of an animation the first frame is taken. Colours are taken as they
    stand, like the host does: an embedded ICC profile is not applied.

    Args:
        name: what the error sentences call the file; its own name by default.

    Raises:
        BadInput: missing, empty, damaged, not a picture, or of a size that `check_picture_size` refuses.
    """
    return _read(path, name, _to_rgb)


def _read(path: str | Path, name: str | None, convert: Callable[[Image.Image, str], _Read]) -> _Read:
    """What `convert` makes of a picture file that is decoded and upright; BadInput with whatever is wrong with it."""
    path = Path(path)
    name = name or path.name
    if not path.is_file():
        raise BadInput(f"There is no picture {name}.")
    if path.stat().st_size == 0:
        raise BadInput(f"The picture {name} is empty (0 bytes).")
    try:
        with Image.open(path, formats=FORMATS) as image:
            check_picture_size(image.width, image.height, name)  # from the header, before anything is decoded
            _load(image)
            return convert(_upright(image), name)
    except BadInput:
        raise
    except MemoryError:
        raise BadInput(f"The picture {name} needs more memory than is free.") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadInput(f"The picture {name} has more than {MAX_PIXELS} pixels (8192x8192).") from None
    except Image.UnidentifiedImageError:
        raise BadInput(f"The file {name} is not a picture that can be read, or is damaged.") from None
    except OSError as error:  # its own text may hold the whole path
        why = error.strerror or error
        raise BadInput(f"The picture {name} is damaged or cannot be read: {why}.") from error
    except Exception as error:  # decoders fail in many ways (struct, zlib, EOF, syntax), all of them the file's fault
        raise BadInput(f"The picture {name} is damaged or cannot be read: {error}.") from error


def check_picture_size(width: int, height: int, name: str) -> None:
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


def quick_size(path: str | Path) -> tuple[int, int] | None:
    """(width, height) as the file's header has it, or None where it cannot be read; nothing is decoded."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            return image.size
    except Exception:  # whatever is wrong with it, reading it for good will say so
        return None


def _load(image: Image.Image) -> None:
    """Decode, and fail on a truncated file even where another node pack has told PIL to fill such files with grey."""
    with _strict:
        before = ImageFile.LOAD_TRUNCATED_IMAGES
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        try:
            image.load()
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES = before


def _upright(image: Image.Image) -> Image.Image:
    """The picture as it was held when it was taken. Junk in its EXIF is no fault of the picture: it stays as it is."""
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # parsers of metadata fail in as many ways as decoders
        return image
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image, name: str) -> Tensor:
    if image.mode == "F":
        raise BadInput(f"The picture {name} holds floating-point numbers: save it with 8 or 16 bits.")
    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = torch.from_numpy(np.asarray(image).astype(np.float32))
        if grey.min() < 0 or grey.max() > 65535:
            raise BadInput(f"The picture {name} holds numbers outside 0..65535: save it with 8 or 16 bits.")
        return (grey / 65535).expand(3, -1, -1).contiguous()
    if _has_alpha(image):
        colour = _planes(image.convert("RGBA"))
        alpha = colour[3:]
        return colour[:3] * alpha + (1 - alpha)
    return _planes(image.convert("RGB"))


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info


def _alpha(image: Image.Image) -> Tensor | None:
    alpha = _planes(image.convert("RGBA"))[3:] if _has_alpha(image) else None
    return None if alpha is None or bool((alpha == 1).all()) else alpha


def _planes(image: Image.Image) -> Tensor:
    pixels = rearrange(torch.from_numpy(np.array(image)), "height width channels -> channels height width")
    return pixels.contiguous().float() / 255
