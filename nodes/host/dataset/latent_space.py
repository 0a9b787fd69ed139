"""From the VAE's raw latents to model space, and the name under which a refiner file will know that space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....training.errors import BadInput
from ..model.base_model import latent_scaling

__all__ = ["MEASURED_PICTURES", "LatentSpace"]

MEASURED_PICTURES = 64  # so many latents settle the scale of a space that nobody names
_CONSTANT = 1e-4  # a latent that spreads less carries no picture


@dataclass(frozen=True)
class LatentSpace:
    """model space = (raw - shift) * scale; scale and shift are numbers, or one number a channel.

    `downscale`: pixels per latent cell along one side.
    """

    name: str
    channels: int
    scale: float | list[float]
    shift: float | list[float]
    downscale: int

    @classmethod
    def of_model(cls, model: Any, downscale: int) -> LatentSpace:
        """The space that a base MODEL works in, from its own latent format."""
        name, channels, scale, shift = latent_scaling(model)
        return cls(name, channels, scale, shift, downscale)

    @classmethod
    def pixels(cls) -> LatentSpace:
        """Pixel space: three channels in [-1, 1], the name that the host has for it."""
        return cls("ChromaRadiance", 3, 1.0, 0.0, 1)

    @classmethod
    def measured(cls, latents: list[torch.Tensor], downscale: int) -> LatentSpace:
        """The space in which these raw latents [C,h,w] have mean 0 and standard deviation 1, to five digits."""
        values = torch.cat([latent.double().flatten() for latent in latents])
        spread, mean = float(values.std(correction=0)), float(values.mean())
        if not spread > _CONSTANT:
            raise BadInput(
                f"The target latents hardly differ from one constant (standard deviation {spread:.2g}), so they carry "
                f"no pictures: is the VAE file complete?"
            )
        return cls("measured", latents[0].shape[0], _five_digits(1 / spread), _five_digits(mean), downscale)

    def to_model(self, raw: torch.Tensor) -> torch.Tensor:
        """[C,h,w] raw -> model space."""
        return (raw - self._wide(self.shift)) * self._wide(self.scale)

    def to_raw(self, latent: torch.Tensor) -> torch.Tensor:
        """[C,h,w] model space -> raw, as a VAE decodes it."""
        return latent / self._wide(self.scale) + self._wide(self.shift)

    def check(self, raw: torch.Tensor, name: str) -> None:
        """BadInput when a latent has other channels than the space: VAE and MODEL are of different families."""
        if raw.shape[0] != self.channels:
            raise BadInput(
                f"The VAE gives {raw.shape[0]} channels ({name}), the base model takes {self.channels} ({self.name}): "
                f"give the VAE that belongs to the base model."
            )

    def index(self) -> dict[str, Any]:
        """The entry "latent" of index.json."""
        return {
            "name": self.name,
            "channels": self.channels,
            "scale": self.scale,
            "shift": self.shift,
            "downscale": self.downscale,
        }

    @staticmethod
    def _wide(value: float | list[float]) -> float | torch.Tensor:
        return torch.tensor(value).reshape(-1, 1, 1) if isinstance(value, list) else value


def _five_digits(value: float) -> float:
    return float(f"{value:.5g}")
