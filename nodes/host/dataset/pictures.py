"""Where target pictures come from: a folder with captions beside them, or an IMAGE batch of the graph."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import torch

from ....training.data.buckets import resize
from ....training.data.picture_files import PictureFiles, match_key, plain_text, read_caption
from ....training.data.pictures import quick_size, read_alpha, read_picture
from ....training.errors import BadInput
from ....training.storage.files import sha256_file
from ..paths import refuse_link_outside

__all__ = ["PictureBatch", "PictureFolder", "Pictures", "picture_file", "resize_to_picture"]

_MASK = "_mask"  # how the stem of a mask's file ends


class Pictures(Protocol):
    """Target pictures by name."""

    names: list[str]
    orphan_captions: list[str]
    left_out: dict[str, list[str]]  # what else was there and is not used: kind -> names

    def sha256(self, name: str) -> str: ...

    def caption(self, name: str) -> str: ...

    def quick_size(self, name: str) -> tuple[int, int] | None:
        """(width, height) without decoding, or None; only for estimates."""

    def read(self, name: str) -> torch.Tensor:
        """[3,H,W] in [0,1]; BadInput naming the picture."""

    def mask(self, name: str) -> torch.Tensor | None:
        """How much each pixel counts, [1,H,W] in [0,1] of any size; None where all do. BadInput naming the picture."""

    def mask_sha256(self, name: str) -> str:
        """Of a mask that lies beside the picture; "" where there is none, or it is in the picture itself."""


class PictureFolder:
    """All pictures under a folder; a picture without a caption file of its own has `caption`.

    With `masks`, `fox_mask.png` is the mask of `fox.jpg` (white counts, black does not), and no picture of its own.
    """

    def __init__(self, folder: Path, caption: str, masks: bool = False) -> None:
        self._files = PictureFiles(folder)
        self.names = self._files.names
        self.orphan_captions = self._files.orphan_captions
        self.left_out = dict(self._files.left_out)
        self._caption = caption
        self._masks: dict[str, str] = {}  # by `match_key` of the picture
        if masks:
            of_key = {match_key(name): name for name in reversed(self.names)}  # the first of two of one stem
            self._masks = {key.removesuffix(_MASK): name for key, name in of_key.items() if key.endswith(_MASK)}
            self.names = [name for name in self.names if not match_key(name).endswith(_MASK)]
            keys = {match_key(name) for name in self.names}
            if lonely := sorted(name for key, name in self._masks.items() if key not in keys):
                self.left_out["masks without a picture"] = lonely
            if not self.names:
                raise BadInput(f"The folder {plain_text(folder.name)} holds nothing but masks: pictures are missing.")

    def sha256(self, name: str) -> str:
        return sha256_file(picture_file(self._files, name))

    def caption(self, name: str) -> str:
        text = self._files.caption_name(name)
        if text is None:
            return self._caption
        return read_caption(picture_file(self._files, text, "caption"), text) or self._caption

    def quick_size(self, name: str) -> tuple[int, int] | None:
        return quick_size(self._files.path(name))

    def read(self, name: str) -> torch.Tensor:
        return read_picture(picture_file(self._files, name), name)

    def mask(self, name: str) -> torch.Tensor | None:
        """The file beside it, else the picture's own opacity."""
        mask = self._masks.get(match_key(name))
        if mask is None:
            return read_alpha(picture_file(self._files, name), name)
        return read_picture(picture_file(self._files, mask, "mask"), mask).mean(0, keepdim=True)

    def mask_sha256(self, name: str) -> str:
        mask = self._masks.get(match_key(name))
        return sha256_file(picture_file(self._files, mask, "mask")) if mask is not None else ""


def picture_file(files: PictureFiles, name: str, what: str = "picture", shown: str = "") -> Path:
    """The file of that name; BadInput where it is a link that leads out, or no plain file behind a link."""
    path, shown = files.path(name), shown or name
    refuse_link_outside(path, shown)
    if not path.is_file():  # also a link to a pipe: to open one would wait for ever
        raise BadInput(f"There is no {what} {shown}.")
    return path


def resize_to_picture(other: torch.Tensor, picture: torch.Tensor, name: str, what: str) -> torch.Tensor:
    """`other` [C,H,W] in [0,1] at the size of a picture [3,H,W]: then one and the same cut is the same place in both.

    BadInput where it shows another frame, which its aspect ratio tells; `what` names it there.
    """
    height, width = picture.shape[1:]
    if abs(other.shape[2] * height - other.shape[1] * width) > 0.02 * other.shape[2] * height:
        raise BadInput(
            f"The picture {name} is {width}x{height} and its {what} {other.shape[2]}x{other.shape[1]}: both must show "
            f"the same frame, so the same aspect ratio."
        )
    return resize(other, (height, width))


class PictureBatch:
    """The pictures of IMAGE batches [B,H,W,3 or 4], float in [0,1], under the names image00000, image00001, ...

    A list of batches is one row of pictures; those of different batches may differ in size. captions: one text for all,
    or one for each picture.
    """

    orphan_captions: list[str] = []
    left_out: dict[str, list[str]] = {}

    def __init__(self, batches: list[torch.Tensor], captions: list[str]) -> None:
        for images in batches:
            if images.ndim != 4 or images.shape[-1] not in (3, 4) or not len(images):
                raise BadInput(f"images must be an IMAGE batch [B,H,W,3]; it is {list(images.shape)}.")
        rows = [picture for images in batches for picture in images]
        if len(captions) not in (1, len(rows)):
            raise BadInput(
                f"caption brings {len(captions)} texts for {len(rows)} pictures: give one for all, or one for each."
            )
        self._pictures = {f"image{i:05d}": picture for i, picture in enumerate(rows)}
        self.names = list(self._pictures)
        self._captions = dict(zip(self.names, captions if len(captions) > 1 else captions * len(rows), strict=True))

    def sha256(self, name: str) -> str:
        pixels = self._pictures[name]
        digest = hashlib.sha256(f"{list(pixels.shape)}".encode())
        digest.update(pixels.float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def caption(self, name: str) -> str:
        return self._captions[name]

    def quick_size(self, name: str) -> tuple[int, int] | None:
        height, width = self._pictures[name].shape[:2]
        return width, height

    def read(self, name: str) -> torch.Tensor:
        picture = self._pictures[name].float().cpu().movedim(-1, 0)
        if not torch.isfinite(picture).all():
            raise BadInput(f"The picture {name} of the IMAGE batch holds NaN or infinity.")
        if picture.shape[0] == 4:  # as read_picture does: transparent parts over white
            picture = picture[:3] * picture[3:] + (1 - picture[3:])
        return picture.clamp(0, 1).contiguous()

    def mask(self, name: str) -> torch.Tensor | None:
        """The fourth channel, where it is not 1 everywhere."""
        alpha = self._pictures[name][..., 3:].float().cpu().movedim(-1, 0).clamp(0, 1)
        return None if bool((alpha == 1).all()) else alpha.contiguous()  # also where there is none

    def mask_sha256(self, name: str) -> str:
        return ""
