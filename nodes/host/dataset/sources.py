"""Where the base latent b of a pair comes from: what the four base nodes hand to the builder (REF2V_BASE)."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ....training.data.buckets import assign_bucket, resize
from ....training.data.degrade import degrade
from ....training.data.latent_cache import LatentCache
from ....training.data.picture_files import PictureFiles, match_key
from ....training.data.pictures import read_picture
from ....training.errors import BadInput
from ....training.storage.files import sha256_file
from ..model.base_model import has_plain_options, low_noise_latent, model_fingerprint, model_name, model_parameters
from ..patching.fingerprint import hash_value
from ..vae.host_vae import PictureEncoder
from .pictures import picture_file, resize_to_picture

__all__ = ["BaseSource", "DegradeBase", "LatentBase", "PairBase", "RawLatents", "RawPair", "SampleBase"]

_MOST_SEED = 2**64
_SAMPLES_VERSION = 1  # goes up when the same settings would give other base latents


@dataclass(frozen=True)
class RawPair:
    """Target and base latent [C,h,w] as the VAE gives them, with the pictures behind them where there are any.

    `b` is None as long as a base MODEL has yet to make it. `small_z`: the target's latent at the size at which that
    MODEL makes it, where that is another than z's. `mask` [1,h,w] in [0,1]: how much each cell counts.
    """

    z: torch.Tensor
    b: torch.Tensor | None
    target: torch.Tensor | None
    base: torch.Tensor | None
    small_z: torch.Tensor | None = None
    mask: torch.Tensor | None = None

    def latents(self) -> RawLatents:
        """Without the pictures, which are many times larger; of the target only a picture at latent size is kept."""
        if self.target is None:
            return RawLatents(self.z, self.b, None, self.small_z, self.mask)
        small = functional.interpolate(self.target[None] * 2 - 1, size=tuple(self.z.shape[1:]), mode="area")
        return RawLatents(self.z, self.b, small[0], self.small_z, self.mask)


@dataclass(frozen=True)
class RawLatents:
    """What of a pair goes to the disk: raw latents, and the target [3,h,w] in [-1, 1] at their size; `small_z` and
    `mask` as in RawPair."""

    z: torch.Tensor
    b: torch.Tensor | None
    rgb: torch.Tensor | None
    small_z: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class DegradeBase:
    """b is the target picture made worse and encoded again. kind: resize, blur or jpeg; amount as its node says."""

    kind: str
    amount: float

    def describe(self) -> dict[str, Any]:
        return {"kind": "degradation", "degradation": self.kind, "amount": self.amount}

    def fingerprint(self, names: list[str]) -> str:
        return ""

    def line(self) -> str:
        return f"the target degraded ({self.kind}, {self.amount:g})"

    def pair(self, name: str, target: torch.Tensor, encoder: PictureEncoder) -> RawPair:
        """target: [3,H,W] in [0,1], cut to its size."""
        base = degrade(target, self.kind, self.amount)
        return RawPair(encoder.encode(target, name), encoder.encode(base, f"{name} (degraded)"), target, base)


class PairBase:
    """b is a second picture with the same relative stem in another folder ("before"), encoded by the same VAE."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = PictureFiles(folder)
        self._by_stem: dict[str, str] = {}
        for name in self._files.names:
            self._by_stem.setdefault(match_key(name), name)

    def describe(self) -> dict[str, Any]:
        return {"kind": "paired folder"}

    def fingerprint(self, names: list[str]) -> str:
        digest = hashlib.sha256()
        for name in names:
            before = self._by_stem.get(match_key(name))
            digest.update(f"{name}\0{before and self._sha256(before)}\n".encode())
        return digest.hexdigest()

    def _sha256(self, before: str) -> str:
        """Of a partner; "" where it cannot be read, which `partner` says of its picture."""
        try:
            return sha256_file(picture_file(self._files, before))
        except (BadInput, OSError):
            return ""

    def line(self) -> str:
        return "the picture of the same name in the paired folder"

    def left_out(self) -> dict[str, list[str]]:
        """What else lies in the paired folder and is not used: kind -> names."""
        return self._files.left_out

    def unmatched(self, names: list[str]) -> list[str]:
        """Pictures of the paired folder that no target picture has asked for."""
        stems = {match_key(name) for name in names}
        return [name for stem, name in self._by_stem.items() if stem not in stems]

    def partner(self, name: str, picture: torch.Tensor) -> torch.Tensor:
        """The "before" picture of a target [3,H,W] in [0,1], brought to the target's size. BadInput when it is missing,
        damaged, or shows another frame."""
        before = self._by_stem.get(match_key(name))
        if before is None:
            raise BadInput(
                f"The picture {name} has no partner of the same name in the paired folder {self.folder.name}."
            )
        shown = f"{before} (before)"
        partner = read_picture(picture_file(self._files, before, shown=shown), shown)
        return resize_to_picture(partner, picture, name, f"partner {before} in the paired folder")

    def pair(self, name: str, target: torch.Tensor, base: torch.Tensor, encoder: PictureEncoder) -> RawPair:
        """target and base: [3,H,W] in [0,1], cut alike."""
        return RawPair(encoder.encode(target, name), encoder.encode(base, f"{name} (before)"), target, base)


@dataclass(frozen=True)
class SampleBase:
    """b is what the base MODEL makes of the target latent: noised a little, then denoised by its own sampler.

    `positive` None: the picture's own caption, through the builder's CLIP. `negative` None: the empty caption.
    width, height: their product is the area in pixels at which b is made, where the target is larger; then b is brought
    to the target's grid. Both 0: at the target's size.
    only_this: tells this very object from all others, for what no hash can tell (`can_be_kept`).
    """

    model: Any
    positive: list | None
    negative: list | None
    steps: int
    cfg: float
    sampler_name: str
    scheduler: str
    denoise: float
    seed: int
    width: int = 0
    height: int = 0
    only_this: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False)

    def __post_init__(self) -> None:
        if bool(self.width) != bool(self.height):
            raise BadInput(
                f"The base's width {self.width} and height {self.height} belong together: give both, or 0 for both."
            )

    def describe(self) -> dict[str, Any]:
        size = {"width": self.width, "height": self.height} if self.width else {}  # as it was before there was one
        return size | {
            "kind": "model",
            "name": model_name(self.model),
            "parameters": model_parameters(self.model),
            "fingerprint": model_fingerprint(self.model),
            "steps": self.steps,
            "cfg": self.cfg,
            "sampler": self.sampler_name,
            "scheduler": self.scheduler,
            "denoise": self.denoise,
            "seed": self.seed,
        }

    def fingerprint(self, names: list[str]) -> str:
        digest = hashlib.sha256()
        hash_value(digest, [self.positive, self.negative], whole=True)
        if not self.can_be_kept():
            digest.update(self.only_this.encode())
        return digest.hexdigest()

    def line(self) -> str:
        return (
            f"the base model {model_name(self.model)} ({model_parameters(self.model) / 1e6:.1f} M parameters) at "
            f"denoise {self.denoise:g}, {self.steps} steps of {self.sampler_name}/{self.scheduler}, cfg {self.cfg:g}"
            + (f", made at the area of {self.width}x{self.height} and enlarged" if self.width else "")
        )

    def needs_captions(self) -> bool:
        """Whether a CLIP is needed to sample: no positive conditioning, or a cfg that asks for a negative one."""
        return self.positive is None or (self.negative is None and self.cfg != 1.0)

    def can_be_kept(self) -> bool:
        """Whether all that a sample depends on is in its fingerprints: not a ControlNet in the conditioning, nor what
        another node has put on the model beside weights. What such a base gives is found again as long as the host
        keeps this object, and not by another one."""
        return _is_plain([self.positive, self.negative]) and has_plain_options(self.model)

    def sampler(self) -> str:
        """Hex digest of everything that b depends on beside z, noise and conditioning; names its folder of samples."""
        settings = {key: value for key, value in self.describe().items() if key not in ("seed", "width", "height")}
        return hashlib.sha256(json.dumps({"samples": _SAMPLES_VERSION, **settings}).encode()).hexdigest()

    def smaller(self, target: torch.Tensor, multiple: int, name: str) -> torch.Tensor | None:
        """The target picture [3,H,W] at the size, in multiples of so many pixels, at which b is made; None where that
        is its own. It is scaled and not cut, so b shows the same frame."""
        height, width = target.shape[1:]
        if not self.width or width * height <= self.width * self.height:
            return None
        size = assign_bucket(width, height, max_pixels=self.width * self.height, multiple=multiple, name=name)
        return resize(target, size[::-1])

    def sample(
        self,
        z: torch.Tensor,
        *,
        index: int,
        conditioning: Callable[[str], list] | None,
        caption: str,
        kept: LatentCache | None,
    ) -> torch.Tensor:
        """The base latent b [C,h,w] of a target latent z.

        index: the picture's place in the data set; with `seed` it gives the noise. conditioning: caption ->
        CONDITIONING, where there is a CLIP. kept: where samples are found again, and kept.
        """
        positive = self.positive if self.positive is not None else conditioning(caption)
        negative = self.negative
        if negative is None:  # at cfg 1 the host does not look at it
            negative = positive if self.cfg == 1.0 else conditioning("")
        seed = (self.seed + index) % _MOST_SEED
        of = hashlib.sha256(f"{seed}".encode())
        hash_value(of, [positive, negative], whole=True)
        if kept is not None and (b := kept.find(z, of.hexdigest())) is not None:
            return b
        b = low_noise_latent(
            self.model,
            z,
            positive,
            negative,
            steps=self.steps,
            cfg=self.cfg,
            sampler_name=self.sampler_name,
            scheduler=self.scheduler,
            denoise=self.denoise,
            seed=seed,
        )
        if kept is not None:
            kept.keep(z, b, of.hexdigest())
        return b


class LatentBase:
    """z and b are given: two LATENT batches of one shape, raw as a VAE or a KSampler gives them."""

    def __init__(self, target: dict, base: dict) -> None:
        self.target = _still_latents(target, "target")
        self.base = _still_latents(base, "base_latent")
        if self.target.shape != self.base.shape:
            raise BadInput(
                f"The target and base latents must have one shape; they are {list(self.target.shape)} and "
                f"{list(self.base.shape)}."
            )
        self._rows = {f"latent{i:05d}": i for i in range(len(self.target))}
        self.names = list(self._rows)

    def describe(self) -> dict[str, Any]:
        return {"kind": "latents"}

    def fingerprint(self, names: list[str]) -> str:
        digest = hashlib.sha256()
        hash_value(digest, [self.target, self.base], whole=True)
        return digest.hexdigest()

    def line(self) -> str:
        return "the base latents given"

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self._row(self.target, name).numpy().tobytes()).hexdigest()

    def latents(self, name: str) -> RawPair:
        z, b = self._row(self.target, name), self._row(self.base, name)
        for latent, which in ((z, "target"), (b, "base")):
            if not torch.isfinite(latent).all():
                raise BadInput(f"The {which} latent {name} holds NaN or infinity.")
        return RawPair(z, b, None, None)

    def _row(self, batch: torch.Tensor, name: str) -> torch.Tensor:
        return batch[self._rows[name]].float().cpu().clone(memory_format=torch.contiguous_format)


BaseSource = DegradeBase | PairBase | SampleBase | LatentBase


def _is_plain(value: Any) -> bool:
    """Tensors, numbers, texts and containers of them: what `hash_value` tells apart."""
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return torch.is_tensor(value) or isinstance(value, (str, int, float, bool, type(None)))


def _still_latents(latent: dict, which: str) -> torch.Tensor:
    """The samples [B,C,h,w] of a LATENT; one frame of a video latent is a still too."""
    samples = latent["samples"]
    if getattr(samples, "is_nested", False):
        raise BadInput(f"{which} holds latents of several kinds at once (video with audio), not stills.")
    if samples.ndim == 5 and samples.shape[2] == 1:
        samples = samples[:, :, 0]
    if samples.ndim == 5:
        raise BadInput(f"{which} is a video latent of {samples.shape[2]} frames; a refiner learns from still latents.")
    if samples.ndim != 4 or not samples.numel():
        raise BadInput(f"{which} must be a LATENT batch [B,C,h,w]; its samples are {list(samples.shape)}.")
    return samples

