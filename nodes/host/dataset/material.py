"""What pairs are made from, and how one is made: pictures with a base source, or latents that are there already."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.nn import functional

from ....training.data.buckets import assign_bucket, resize_and_crop
from ....training.data.latent_cache import LatentCache
from ....training.data.picture_files import left_out_text
from ....training.data.split import perceptual_hash
from ....training.errors import BadInput
from ..clip.host_clip import CaptionEncoder
from ..model.base_model import enlarge_latent
from ..vae.host_vae import PictureEncoder, decode_latent, latent_downscale
from .contact_sheet import false_colours
from .pictures import Pictures, resize_to_picture
from .sources import BaseSource, LatentBase, PairBase, RawLatents, RawPair, SampleBase

__all__ = ["Inspected", "LatentMaterial", "Material", "PictureMaterial", "Started"]

Started = TypeVar("Started", RawPair, RawLatents)

_KEEP_BYTES = 256 << 20  # of cut pictures, so that a small set is decoded once and not twice


@dataclass(frozen=True)
class Inspected:
    """One usable picture: each (width, height) in pixels at which it will be encoded, and its perceptual hash.

    `sizes`: by the area asked for; where two areas give one size, as of a small picture, the first has it.
    """

    sizes: dict[int, tuple[int, int]]
    perceptual_hash: str | None
    masked: bool = False


class PictureMaterial:
    """Target pictures, cut to their buckets and encoded; the base comes from `base`.

    `in_two_steps`: the VAE starts pairs and the base MODEL finishes them. Where both do not fit into a GPU's memory,
    each turn of theirs loads a model anew, so many pairs are started before the first is finished.

    samples: where what the base MODEL has made is found again, and kept.
    areas: each one that a picture may have after scaling down, in pixels; it becomes a pair at each.
    crop: "center", or "random" by `seed` and name.
    masks: whether pictures are looked at for masks.
    """

    unit = "pictures"

    def __init__(
        self,
        pictures: Pictures,
        base: BaseSource,
        encoder: PictureEncoder,
        captions: CaptionEncoder | None,
        samples: LatentCache | None,
        *,
        areas: tuple[int, ...],
        crop: str,
        seed: int,
        masks: bool = False,
    ) -> None:
        self.names = pictures.names
        self.downscale = encoder.downscale
        self.in_two_steps = isinstance(base, SampleBase)
        self._pictures, self._base, self._encoder, self._captions = pictures, base, encoder, captions
        self._samples = samples
        self._areas, self._crop, self._seed, self._masks = areas, crop, seed, masks
        self._place = {name: i for i, name in enumerate(self.names)}
        self._kept: dict[tuple[str, int], tuple[torch.Tensor | None, ...]] = {}
        self._kept_bytes = 0
        # A UNet halves the latent two or three times; sides of 8 cells (64 pixels of an 8-fold VAE) always fit.
        self._multiple = max(self.downscale, min(64, 8 * self.downscale))

    def sha256(self, name: str) -> str:
        return self._pictures.sha256(name)

    def caption(self, name: str) -> str:
        return self._pictures.caption(name)

    def mask_sha256(self, name: str) -> str:
        return self._pictures.mask_sha256(name) if self._masks else ""

    def quick_sizes(self, name: str) -> list[tuple[int, int]]:
        """The buckets that the file's header promises, none where it cannot be read; only for the estimate."""
        size = self._pictures.quick_size(name)
        try:
            return list(self._sizes(*size, name).values()) if size else []
        except BadInput:
            return []

    def inspect(self, name: str) -> Inspected:
        """Decode a picture, and its partner where there is one. BadInput says why it cannot be used."""
        picture = self._pictures.read(name)
        sizes = self._sizes(picture.shape[2], picture.shape[1], name)
        masked = False
        for area, cut in self._cuts(name, picture, sizes).items():
            if self._kept_bytes < _KEEP_BYTES:
                self._kept[name, area] = cut
                self._kept_bytes += sum(part.nbytes for part in cut if part is not None)
            mask = cut[2]
            masked = mask is not None
            if masked and not mask.any():
                raise BadInput(
                    f"The picture {name} is masked out all over where it is not cut off: nothing is left of it."
                )
        return Inspected(sizes, perceptual_hash(picture), masked)

    def start(self, name: str, area: int, flip: bool = False) -> RawPair:
        """What the VAE gives of a pair; where the base MODEL makes b, it has none yet (`finish`)."""
        cut = self._kept.get((name, area))
        if cut is None:
            picture = self._pictures.read(name)
            sizes = self._sizes(picture.shape[2], picture.shape[1], name)
            cut = self._cuts(name, picture, {area: sizes[area]})[area]
        target, before, mask = (part if part is None or not flip else part.flip(-1).contiguous() for part in cut)
        pair = self._start(name, target, before)
        if mask is None:
            return pair
        return replace(pair, mask=functional.interpolate(mask[None], tuple(pair.z.shape[1:]), mode="area")[0])

    def _start(self, name: str, target: torch.Tensor, before: torch.Tensor | None) -> RawPair:
        if isinstance(self._base, PairBase):
            return self._base.pair(name, target, before, self._encoder)
        if isinstance(self._base, SampleBase):
            smaller = self._base.smaller(target, self._multiple, name)
            small_z = None if smaller is None else self._encoder.encode(smaller, f"{name} (at the base's size)")
            return RawPair(self._encoder.encode(target, name), None, target, None, small_z)
        return self._base.pair(name, target, self._encoder)

    def finish(self, name: str, raw: Started) -> Started:
        """The pair with its b, on the grid of its z."""
        if not isinstance(self._base, SampleBase):
            return raw
        b = self._base.sample(
            raw.z if raw.small_z is None else raw.small_z,
            index=self._place[name],
            conditioning=self._captions.conditioning if self._captions else None,
            caption=self.caption(name),
            kept=self._samples,
        )
        return replace(raw, b=enlarge_latent(b, tuple(raw.z.shape[1:])))

    def show(self, raw: RawPair) -> tuple[torch.Tensor, torch.Tensor]:
        """(base, target) as pictures [3,H,W]; a base that exists as a latent only is decoded."""
        base = raw.base if raw.base is not None else decode_latent(self._encoder.vae, raw.b)
        return base, raw.target

    def notes(self) -> list[str]:
        """Lines for the report that only the material knows."""
        lines = []
        if isinstance(self._base, PairBase):
            unmatched = self._base.unmatched(self.names)
            if unmatched:
                lines.append(f"Pictures of the paired folder without a target ({len(unmatched)}): {_some(unmatched)}.")
            if self._base.left_out():
                lines.append(f"Not used in the paired folder: {left_out_text(self._base.left_out())}.")
        if isinstance(self._base, SampleBase) and not self._base.can_be_kept():
            lines.append(
                "Other nodes have patched the base model, or its conditioning holds more than text (a ControlNet): "
                "once it is made anew, or ComfyUI was restarted, this dataset is not found again but built again."
            )
        orphans = self._pictures.orphan_captions
        if orphans:
            lines.append(f"Captions without a picture ({len(orphans)}): {_some(orphans)}.")
        if self._pictures.left_out:
            lines.append(f"Not used in the folder: {left_out_text(self._pictures.left_out)}.")
        return lines

    def retried(self) -> list[str]:
        """Lines on the pictures that the VAE could not encode as they were, once it is known."""
        lines = []
        for names, what in (
            (self._encoder.retried, "Encoded once more in FP32, since the VAE gave NaN"),
            (self._encoder.tiled, "Encoded in tiles, since memory ran out; their latents are not quite the same"),
        ):
            names = list(dict.fromkeys(names))
            lines += [f"{what} ({len(names)}): {_some(names)}."] if names else []
        return lines

    def _cuts(
        self, name: str, picture: torch.Tensor, sizes: dict[int, tuple[int, int]]
    ) -> dict[int, tuple[torch.Tensor | None, ...]]:
        """By area: target and partner [3,H,W] and mask [1,H,W] at the size of the bucket; a partner only where the base
        is one, a mask only where the picture has one."""
        parts = [picture, self._base.partner(name, picture) if isinstance(self._base, PairBase) else None]
        mask = self._pictures.mask(name) if self._masks else None
        parts.append(None if mask is None else resize_to_picture(mask, picture, name, "mask"))
        position = self._position(name)
        return {
            area: tuple(part if part is None else resize_and_crop(part, size, position) for part in parts)
            for area, size in sizes.items()
        }

    def _sizes(self, width: int, height: int, name: str) -> dict[int, tuple[int, int]]:
        """The bucket of each area, those that an area before has left out."""
        sizes: dict[int, tuple[int, int]] = {}
        for area in self._areas:
            size = assign_bucket(width, height, max_pixels=area, multiple=self._multiple, name=name)
            if size not in sizes.values():
                sizes[area] = size
        return sizes

    def _position(self, name: str) -> str | int:
        if self._crop == "center":
            return "center"
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return int.from_bytes(digest[:4], "big")


class LatentMaterial:
    """Latent pairs as they came in; a VAE serves only to show them."""

    unit = "latents"
    in_two_steps = False

    def __init__(self, base: LatentBase, vae: Any, caption: str) -> None:
        self.names = base.names
        self._base, self._vae, self._caption = base, vae, caption
        channels = base.target.shape[1]
        if vae is not None:
            self.downscale = latent_downscale(vae)
        else:  # only the sizes in pixels that SDXL-like models are told depend on it
            self.downscale = 1 if channels == 3 else 8

    def sha256(self, name: str) -> str:
        return self._base.sha256(name)

    def caption(self, name: str) -> str:
        return self._caption

    def mask_sha256(self, name: str) -> str:
        return ""

    def quick_sizes(self, name: str) -> list[tuple[int, int]]:
        height, width = self._base.target.shape[-2:]
        return [(width * self.downscale, height * self.downscale)]

    def inspect(self, name: str) -> Inspected:
        self._base.latents(name)
        return Inspected({0: self.quick_sizes(name)[0]}, None)

    def start(self, name: str, area: int, flip: bool = False) -> RawPair:
        return self._base.latents(name)

    def finish(self, name: str, raw: Started) -> Started:
        return raw

    def show(self, raw: RawPair) -> tuple[torch.Tensor, torch.Tensor]:
        if self._vae is not None:
            return decode_latent(self._vae, raw.b), decode_latent(self._vae, raw.z)
        return false_colours(raw.b, raw.z), false_colours(raw.z, raw.z)

    def notes(self) -> list[str]:
        return []

    def retried(self) -> list[str]:
        return []


Material = PictureMaterial | LatentMaterial


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
