"""Where target pictures come from: a folder with captions beside them, or an IMAGE batch of the graph."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Protocol

import torch

from ....training.data.picture_files import PictureFiles, match_key, read_caption
from ....training.data.pictures import quick_size, read_alpha, read_picture
from ....training.errors import BadInput
from ....training.storage.files import sha256_file
from ..paths import refuse_link_outside

__all__ = ["PictureBatch", "PictureFolder", "Pictures", "picture_file", "subset_of"]

_MASK = "_mask"  # fox_mask.png beside fox.jpg, as other trainers have it
_REPEATS = re.compile(r"(\d+)_.+")  # the folder "10_fox" of kohya's trainers: each of its pictures 10 times an epoch


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
        """[1,H,W] in [0,1], how much each place counts, of any size; None where all counts alike, or none is asked."""

    def mask_sha256(self, name: str) -> str:
        """Of a mask's own file; "" where it has none."""


class PictureFolder:
    """All pictures under a folder; a picture without a caption file of its own has `caption`.

    masks: whether NAME_mask.* beside a picture NAME.* is its mask and no picture itself, and where there is none, the
    alpha of the picture.
    """

    def __init__(self, folder: Path, caption: str, masks: bool = False) -> None:
        self._files = PictureFiles(folder)
        self.names = self._files.names
        self._masks: dict[str, str] | None = None
        if masks:
            stems = {match_key(name): name for name in reversed(self.names)}
            of_masks = {name: match_key(name).removesuffix(_MASK) for name in self.names}
            own = {name for name, stem in of_masks.items() if stem != match_key(name) and stem in stems}
            self._masks = {of_masks[name]: name for name in sorted(own, reverse=True)}
            self.names = [name for name in self.names if name not in own]
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

    def mask(self, name: str) -> torch.Tensor | None:
        if self._masks is None:
            return None
        own = self._masks.get(match_key(name))
        if own is None:
            mask = read_alpha(picture_file(self._files, name), name)
        else:
            mask = read_picture(picture_file(self._files, own, "mask"), own).mean(0, keepdim=True)
        return _unless_whole(mask)

    def mask_sha256(self, name: str) -> str:
        own = (self._masks or {}).get(match_key(name))
        return sha256_file(picture_file(self._files, own, "mask")) if own else ""


def subset_of(name: str) -> tuple[str, int] | None:
    """The folder "10_fox" that a picture lies in, the nearest one of such a name, and its 10; None where it has none.

    BadInput where the number is one that no subset can have.
    """
    folders = name.split("/")[:-1]
    for depth in range(len(folders), 0, -1):
        if match := _REPEATS.fullmatch(folders[depth - 1]):
            weight, subset = int(match[1]), "/".join(folders[:depth])
            if not 1 <= weight <= 1000:
                raise BadInput(
                    f"The folder {subset} asks for {match[1]} repeats an epoch: the number before its _ must be 1 to "
                    f"1000."
                )
            return subset, weight
    return None


def _unless_whole(mask: torch.Tensor | None) -> torch.Tensor | None:
    """None for a mask that leaves nothing out: alpha is 1 everywhere in most pictures that have it."""
    return None if mask is None or mask.min() >= 1 else mask


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

    def __init__(self, batches: list[torch.Tensor], captions: list[str], masks: bool = False) -> None:
        self._masks = masks
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
        picture = self._pictures[name]
        if not self._masks or picture.shape[-1] != 4:
            return None
        return _unless_whole(picture[..., 3].float().cpu().clamp(0, 1)[None].contiguous())

    def mask_sha256(self, name: str) -> str:
        return ""  # alpha is a part of the picture
