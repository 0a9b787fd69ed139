"""Before a build: what is there, a look at a few pairs, and which pictures become pairs on which side."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ....training.data.split import split
from ....training.errors import BadInput
from ..progress import NodeProgress, raise_if_interrupted
from .latent_space import LatentSpace
from .material import Inspected, Material
from .request import BuildRequest
from .sources import RawPair

__all__ = ["BuildPlan", "Fact", "Look", "gather_facts", "look", "make_pair", "make_plan"]

_SHEET_PAIRS = 6


@dataclass(frozen=True)
class Fact:
    """What is known of a picture without decoding it."""

    sha256: str
    caption: str


@dataclass(frozen=True)
class Look:
    """A few pairs, made for the contact sheet: (name, base [3,H,W], target [3,H,W]) and what making one took."""

    shown: list[tuple[str, torch.Tensor, torch.Tensor]]
    channels: int
    inspect_seconds: float
    pair_seconds: float


@dataclass(frozen=True)
class BuildPlan:
    """Which pictures become pairs, in which order, and on which side."""

    inspected: dict[str, Inspected]
    sides: dict[str, tuple[str, str]]  # name -> (group, "train" or "held_out")
    pairs: list[tuple[str, bool]]  # (name, mirrored)
    skipped: dict[str, str]  # name -> why

    def train_names(self) -> list[str]:
        """The training pictures in order."""
        return [name for name in self.inspected if self.sides[name][1] == "train"]


def gather_facts(material: Material, skipped: dict[str, str]) -> dict[str, Fact]:
    """Hash and caption of every picture; those that give none go to `skipped` with the reason."""
    facts = {}
    for name in material.names:
        raise_if_interrupted()
        try:
            facts[name] = Fact(material.sha256(name), material.caption(name))
        except BadInput as error:
            skipped[name] = str(error)
        except OSError as error:
            skipped[name] = f"The picture {name} cannot be read: {error.strerror or error}."
    return facts


def look(material: Material, names: list[str], skipped: dict[str, str], space: LatentSpace | None) -> Look:
    """Make a few pairs, spread over the whole set. BadInput when not one picture can be used."""
    spread = [names[i * len(names) // _SHEET_PAIRS] for i in range(_SHEET_PAIRS)] if names else []
    shown, times, channels = [], [], 0
    for name in dict.fromkeys(spread + names):
        if len(shown) == _SHEET_PAIRS:
            break
        raise_if_interrupted()
        began = time.monotonic()
        try:
            material.inspect(name)
        except BadInput as error:
            skipped.setdefault(name, str(error))
            continue
        inspected = time.monotonic()
        raw = make_pair(material, name, False, space)
        times.append((inspected - began, time.monotonic() - inspected))
        shown.append((name, *material.show(raw)))
        channels = raw.z.shape[0]
    if not shown:
        raise _nothing_usable(skipped)
    times = times[1:] or times  # the first one loads the models
    inspect, pair = (sorted(column)[len(times) // 2] for column in zip(*times, strict=True))
    return Look(shown, channels, inspect, pair)


def make_pair(material: Material, name: str, flip: bool, space: LatentSpace | None) -> RawPair:
    """One pair, after a look whether the user wants to stop. BadInput where VAE and base model do not fit."""
    raise_if_interrupted()
    pair = material.pair(name, flip)
    if space is not None:
        space.check(pair.z, name)
    return pair


def make_plan(
    material: Material, names: list[str], skipped: dict[str, str], request: BuildRequest, progress: NodeProgress
) -> BuildPlan:
    """Decode every picture once, group those that look alike, and hold whole groups out.

    Only training pictures are mirrored: what is held out is counted in pictures.
    """
    inspected = {}
    for done, name in enumerate(names):
        raise_if_interrupted()
        progress.update(done)
        if name in skipped:
            continue
        try:
            inspected[name] = material.inspect(name)
        except BadInput as error:
            skipped[name] = str(error)
    if not inspected:
        raise _nothing_usable(skipped)
    hashes = [item.perceptual_hash for item in inspected.values()]
    sides = split(list(inspected), None if None in hashes else hashes, request.held_out, request.seed)
    pairs = []
    for name in inspected:
        pairs.append((name, False))
        if request.mirror and sides[name][1] == "train":
            pairs.append((name, True))
    return BuildPlan(inspected, sides, pairs, skipped)


def _nothing_usable(skipped: dict[str, str]) -> BadInput:
    why = next(iter(skipped.values()), "there are none.")
    return BadInput(f"None of the {len(skipped)} pictures can be used; the first: {why}")
