"""The trained refiner that a run goes on from: which one it is, and whether a dataset fits it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.start_file import start_file_hash
from ...errors import BadInput
from .file import RefinerMeta, load_meta, load_refiner

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...data.shards import RefinerDataset

__all__ = ["Start", "open_start"]

SPACE = ("channels", "downscale", "scale", "shift")  # what a latent space is, whatever it is called


@dataclass(frozen=True)
class Start:
    path: Path
    sha256: str
    meta: RefinerMeta

    def weights(self) -> dict[str, Tensor]:
        """float32 under diffusers names, on the CPU; BadInput where the file is no longer what it was."""
        weights, _, _ = load_refiner(self.path)
        if start_file_hash(self.path) != self.sha256:
            raise BadInput(f"refiner.start_from: {self.path} was changed while the run was at work: put it back.")
        return weights

    def fill(self, net: nn.Module) -> None:
        """Give a network of this shape the file's weights."""
        try:
            net.load_state_dict(self.weights())
        except RuntimeError as error:
            raise BadInput(
                f"{self.path.name}: its weights are not those of the network that its metadata describes."
            ) from error

    def velocity_loss(self, residual_rms: float) -> float:
        """The loss of a network that predicts nothing, on pairs of this RMS(z - b): 1 for those that it was made on."""
        return (residual_rms**2 + self.meta.noise_scale**2) / self.meta.c_v**2

    def sentences(self, residual_rms: float, steps: int) -> list[str]:
        """What is kept of it and why, for a person. steps: the sampling steps that the new run is for."""
        meta, name = self.meta, f"{self.path.parent.name}/{self.path.name}"
        sentences = [
            f"goes on from {name} (SHA-256 {self.sha256[:12]}): its network, its noise scale s = "
            f"{meta.noise_scale:.5g} and its c_v = {meta.c_v:.5g} are kept, since what it has learned is in these units"
        ]
        nothing = self.velocity_loss(residual_rms)
        if not math.isclose(nothing, 1, abs_tol=0.01):
            sentences.append(
                f"RMS(z - b) of these pairs is {residual_rms:.4g}, and was {meta.residual_rms:.4g}: a loss of "
                f"{nothing:.3g}, not 1, means that nothing is predicted"
            )
        before = len(meta.sigmas) - 1
        if steps != before:
            sentences.append(f"flow.steps {steps}, where {name} was trained for {before}")
        return sentences

    def provenance(self) -> dict[str, Any]:
        """For the metadata of what comes of it."""
        return {"sha256": self.sha256, "training": self.meta.training}


def open_start(path: Path, data: RefinerDataset) -> Start:
    """The refiner in a file; BadInput where it is none, or where the dataset is not of its latent space and text."""
    start = Start(path, start_file_hash(path), load_meta(path))
    for field in SPACE:
        theirs, ours = start.meta.latent[field], data.latent[field]
        if theirs != ours:
            raise BadInput(
                f"refiner.start_from: expected a dataset in the latent space of {path.name} ({field} {theirs}), got "
                f"one with {field} {ours}."
            )
    theirs, ours = _text(start.meta.context), _text(data.context)
    if theirs != ours:
        raise BadInput(
            f"refiner.start_from: expected a dataset as {path.name} was trained on ({theirs}), got one {ours}."
        )
    return start


def _text(context: dict[str, Any] | None) -> str:
    if context is None:
        return "without text"
    pooled = f" and a pooled vector {context['pooled']} wide" if context["pooled"] else ""
    return f"with text {context['dim']} wide{pooled}"
