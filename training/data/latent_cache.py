"""Encoded pictures on the disk, found again by what they were made of: a changed dataset encodes what changed alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from ..storage.files import whole_file

__all__ = ["LatentCache"]

MOST_BYTES = 4 * 2**30
_SUM = "sha256"


class LatentCache:
    """A latent is named by its picture's pixels at the size at which they are encoded, and lies in its VAE's folder.

    So another pixel, another resolution or crop, another VAE and another dtype of it are each another latent.
    `vae`: the VAE's fingerprint, its dtype included. A file that is damaged or from elsewhere is made anew.
    The disk may be full or read-only: then `failed` says why nothing is kept, and everything else goes on. `reserve`
    bytes of the disk are left for others, the dataset above all. `found` counts what an earlier build has made, each
    latent once.
    """

    def __init__(self, folder: Path, vae: str, most_bytes: int = MOST_BYTES):
        self.folder, self.most_bytes, self.reserve = folder, most_bytes, 0
        self._of_this_vae = folder / vae[:32]
        self._counted: set[Path] = set()
        self.found = self.made = 0
        self.failed = ""

    def find(self, pixels: Tensor, of: str = "") -> Tensor | None:
        """The latent of a picture [3, H, W], float32; None where it has to be made.

        of: what else it was made of, as a text. A sample of a base model is kept so: `pixels` is the latent that it was
        made from, `vae` the sampler's fingerprint, and `of` its noise and conditioning.
        """
        from safetensors import SafetensorError, safe_open

        path = self._path(pixels, of)
        try:
            with safe_open(path, framework="pt") as file:
                latent, said = file.get_tensor("latent"), (file.metadata() or {}).get(_SUM)
        except (OSError, SafetensorError):
            return None
        if said != _digest(latent):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used go first
        self.found += path not in self._counted
        self._counted.add(path)
        return latent

    def keep(self, pixels: Tensor, latent: Tensor, of: str = "") -> None:
        """Write the latent [C, h, w], float32, of a picture: beside its name, then renamed. `of` as in `find`."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.made += 1
        if self.failed:
            return
        path = self._path(pixels, of)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(path.parent).free < self.reserve + latent.nbytes:
                self.failed = "the disk has no room beside the dataset"
                return
            with whole_file(path, mark=f".{os.getpid()}", sync=False) as beside:
                save_file({"latent": latent.contiguous()}, beside, {_SUM: _digest(latent)})
            self._counted.add(path)
        except (OSError, SafetensorError) as error:
            self.failed = str(error)

    def trim(self) -> int:
        """Delete what was used longest ago until `most_bytes` at most are left; returns the bytes left."""
        files = []
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):  # another process may trim as well
                state = path.stat()
                files.append((state.st_mtime_ns, state.st_size, path))
        left = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if left <= self.most_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                left -= size
        return left

    def _path(self, pixels: Tensor, of: str = "") -> Path:
        name = _digest(pixels)
        if of:
            name = hashlib.sha256(f"{name} {of}".encode()).hexdigest()
        return self._of_this_vae / f"{name}.safetensors"


def _digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's shape, dtype and bytes."""
    digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer
    return digest.hexdigest()
