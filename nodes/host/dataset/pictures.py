"""Where target pictures come from: a folder with captions beside them, or an IMAGE batch of the graph."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import torch

from ....training.data.picture_files import PictureFiles, read_caption
from ....training.data.pictures import quick_size, read_picture
from ....training.errors import BadInput
from ....training.storage.files import sha256_file
from ..paths import refuse_link_outside

__all__ = ["PictureBatch", "PictureFolder", "Pictures"]


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


class PictureFolder:
    """All pictures under a folder; a picture without a caption file of its own has `caption`."""

    def __init__(self, folder: Path, caption: str) -> None:
        self._files = PictureFiles(folder)
        self.names = self._files.names
        self.orphan_captions = self._files.orphan_captions
        self.left_out = self._files.left_out
        self._caption = caption

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


def picture_file(files: PictureFiles, name: str, what: str = "picture", shown: str = "") -> Path:
    """The file of that name; BadInput where it is a link that leads out, or no plain file behind a link."""
    path, shown = files.path(name), shown or name
    refuse_link_outside(path, shown)
    if not path.is_file():  # also a link to a pipe: to open one would wait for ever
        raise BadInput(f"There is no {what} {shown}.")
    return path


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
