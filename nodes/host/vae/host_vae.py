"""The host's VAE, as the dataset builder and the memory nodes need it: encode a picture, know the VAE again."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch

from ....training.data.latent_cache import LatentCache
from ....training.errors import BadInput
from ....training.precision.guard import FirstBadLayer
from ..patching.fingerprint import hash_weights
from ..patching.provenance import guard_of
from ..progress import NOT_A_FAILURE
from .copies import compute_dtype, copy_vae
from .source import class_name, recognise, refuse_empty

__all__ = [
    "PICTURES",
    "PictureEncoder",
    "SHAPES",
    "SOUND",
    "VIDEO",
    "decode_latent",
    "latent_downscale",
    "refuse_no_pictures",
    "vae_dtype",
    "vae_fingerprint",
    "what_it_makes",
]

PICTURES, VIDEO, SOUND, SHAPES = "pictures", "video", "sound", "shapes in space"
_OF_SHAPES = ("ShapeVAE", "OctreeGaussianDecoder")  # Hunyuan3D; TripoSplat, of newer hosts


def what_it_makes(vae: Any) -> str:
    """What comes out of the decoder: PICTURES, VIDEO, SOUND or SHAPES."""
    refuse_empty(vae)
    dims = getattr(vae, "latent_dim", 2)
    if class_name(vae) in _OF_SHAPES:
        return SHAPES
    # Stereo, or latents along time alone; ACE-Step's look like pictures.
    if getattr(vae, "output_channels", 3) == 2 or dims == 1 or getattr(vae, "extra_1d_channel", None) is not None:
        return SOUND
    return VIDEO if dims == 3 else PICTURES


def latent_downscale(vae: Any) -> int:
    """Pixels per latent cell along one side: 8 for most image VAEs, 1 in pixel space.

    A video VAE gives (function of frames, 16, 16), and newer hosts may give a function for a side as well.
    """
    refuse_empty(vae)
    ratio = vae.downscale_ratio
    if isinstance(ratio, (tuple, list)):
        ratio = ratio[-1]
    if callable(ratio):
        ratio = 1024 / ratio(1024)
    if ratio < 1 or ratio != int(ratio):
        raise BadInput(f"The VAE ({class_name(vae)}) must shrink a picture by a whole number; it says {ratio}.")
    return int(ratio)


def vae_dtype(vae: Any) -> str:
    """The precision in which the host runs this VAE, e.g. "float32"; that of its encoder where the halves differ."""
    return str(compute_dtype(vae, "encoder")).removeprefix("torch.")


def vae_fingerprint(vae: Any) -> str:
    """Hex digest of the VAE's class and weights (sampled, with what patches it), and of the dtype that it runs in."""
    refuse_empty(vae)
    digest = hashlib.sha256(f"{class_name(vae)} {vae_dtype(vae)}".encode())
    hash_weights(digest, recognise(vae).source.patcher)  # of a split VAE, the patcher at hand holds one half only
    return digest.hexdigest()


def decode_latent(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    """Raw latent [C,h,w] -> picture [3,H,W] in [0,1], float32 on the CPU."""
    batch = latent[None].clone()  # some hosts work in place, and in pixel space a picture is its own latent
    pixels = vae.decode(batch.unsqueeze(2) if getattr(vae, "latent_dim", 2) == 3 else batch)
    while pixels.ndim > 4:  # a video VAE gives [1,F,H,W,3]
        pixels = pixels[0]
    return pixels[0, ..., :3].movedim(-1, 0).float().cpu().clamp(0, 1).clone()


class PictureEncoder:
    """Pictures to raw latents through the host's own `vae.encode`, whatever precision and offloading it works in.

    A latent that is not finite is never kept: it is encoded once more on a private FP32 copy of the VAE (the VAE that
    came in stays as it is), and if that does not help, `BadInput` names the picture and the layer that failed.

    `cache`: where latents are kept and found again; not those that needed FP32, here or in a NaN Guard, nor those that
    the host encoded in tiles because memory ran out, since they are not what this VAE gives.
    """

    def __init__(self, vae: Any, cache: LatentCache | None = None) -> None:
        self.vae = vae
        self.downscale = latent_downscale(vae)
        self.cache = cache if guard_of(vae.first_stage_model) is None else None
        self.retried: list[str] = []  # pictures that needed FP32
        self.tiled: list[str] = []  # pictures that the host encoded in tiles
        self._in_tiles = False
        self._at_work = _that_tells(vae, self._saw_tiles)
        self._private: Any = None

    def encode(self, picture: torch.Tensor, name: str) -> torch.Tensor:
        """[3,H,W] in [0,1], sides a multiple of `downscale` -> raw latent [C,h,w], float32 on the CPU.

        One picture at a time: a video VAE would take a batch for the frames of one clip, and a latent must not depend
        on the pictures beside it. Raises BadInput naming the picture.
        """
        if self.cache is not None and (known := self.cache.find(picture)) is not None:
            return known
        latent = self._encode_with(self._at_work, picture, name)
        if not torch.isfinite(latent).all():
            return self._encode_in_float32(picture, name)
        if self._in_tiles:
            self.tiled.append(name)
        elif self.cache is not None:
            self.cache.keep(picture, latent)
        return latent

    def _saw_tiles(self) -> None:
        self._in_tiles = True

    def _encode_with(self, vae: Any, picture: torch.Tensor, name: str) -> torch.Tensor:
        pixels = picture.movedim(0, -1)[None].float().contiguous()
        self._in_tiles = False
        try:
            latent = vae.encode(pixels)
        except (BadInput, *NOT_A_FAILURE):
            raise
        except NotImplementedError as error:
            raise BadInput(f"The VAE ({class_name(vae)}) only decodes: a dataset needs one that encodes.") from error
        except Exception as error:  # the host's own classes fail in as many ways as there are files that do not fit
            raise BadInput(
                f"The VAE ({class_name(vae)}) cannot encode the picture {name} of {picture.shape[-1]}x"
                f"{picture.shape[-2]} ({type(error).__name__}: {error}): is it one of pictures, with its encoder?"
            ) from error
        if latent.ndim == 5 and latent.shape[2] == 1:
            latent = latent[:, :, 0]
        if latent.ndim != 4 or latent.shape[0] != 1:
            raise BadInput(
                f"The VAE ({class_name(vae)}) must give one still latent [1,C,h,w] for {name}; it gave "
                f"{list(latent.shape)}. Audio and several-frame latents cannot be refined here."
            )
        want = (picture.shape[-2] // self.downscale, picture.shape[-1] // self.downscale)
        if tuple(latent.shape[-2:]) != want:
            raise BadInput(
                f"The VAE ({class_name(vae)}) says that it shrinks pictures by {self.downscale}, but {name} of "
                f"{picture.shape[-1]}x{picture.shape[-2]} became a latent of {latent.shape[-1]}x{latent.shape[-2]}."
            )
        return latent[0].float().cpu().clone()

    def _encode_in_float32(self, picture: torch.Tensor, name: str) -> torch.Tensor:
        if self._private is None:
            self._private = _that_tells(copy_vae(self.vae, torch.float32), self._saw_tiles)
        with FirstBadLayer(self._private.first_stage_model) as bad:
            latent = self._encode_with(self._private, picture, name)
        if not torch.isfinite(latent).all():
            where = f"layer {bad.name}" if bad.name else "no single layer"
            raise BadInput(
                f"The VAE encoder gives a latent with NaN or infinity for {name}, in {vae_dtype(self.vae)} and once "
                f"more in a float32 copy (first in {where}): the VAE file is damaged, or not complete."
            )
        self.retried.append(name)
        if self._in_tiles:
            self.tiled.append(name)
        return latent


def _that_tells(vae: Any, saw_tiles: Callable[[], None]) -> Any:
    """`vae` again, which calls `saw_tiles` when it encodes in tiles: out of memory, the host only logs that.

    Its latents are float32 also where the host's own intermediate results are not.
    """
    own = copy.copy(vae)
    for name in ("encode_tiled_", "encode_tiled_1d", "encode_tiled_3d", "_encode_tiled_owned"):
        if (method := getattr(own, name, None)) is not None:

            def tell(*args: Any, method: Callable[..., Any] = method, **kwargs: Any) -> Any:
                saw_tiles()
                return method(*args, **kwargs)

            setattr(own, name, tell)
    if hasattr(own, "vae_output_dtype"):
        own.vae_output_dtype = lambda *_: torch.float32
    return own


def refuse_no_pictures(vae: Any) -> None:
    """BadInput for a VAE of sound or of shapes in space."""
    makes = what_it_makes(vae)
    if makes not in (PICTURES, VIDEO):
        raise BadInput(f"The VAE ({class_name(vae)}) is one of {makes}; a dataset of pictures needs one of pictures.")
