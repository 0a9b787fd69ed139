"""Before a build: what is there, a look at a few pairs, and which pictures become pairs on which side."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....training.data.split import split
from ....training.errors import BadInput
from ..progress import NodeProgress, raise_if_interrupted
from .latent_space import LatentSpace
from .material import Inspected, Material, Started
from .request import BuildRequest
from .sources import RawPair

__all__ = ["BuildPlan", "Fact", "Look", "PlannedPair", "finish_pair", "gather_facts", "look", "make_plan", "start_pair"]

_SHEET_PAIRS = 6


@dataclass(frozen=True)
class Fact:
    """What is known of a picture without decoding it."""

    sha256: str
    caption: str
    mask_sha256: str = ""  # of a mask that lies beside it


@dataclass(frozen=True)
class Look:
    """A few pairs, made for the contact sheet: (name, base [3,H,W], target [3,H,W]) and what making one took."""

    shown: list[tuple[str, torch.Tensor, torch.Tensor]]
    channels: int
    inspect_seconds: float
    pair_seconds: float


class PlannedPair(NamedTuple):
    """A picture, the area in pixels at which it becomes this pair, and whether it is mirrored."""

    name: str
    area: int
    flip: bool


@dataclass(frozen=True)
class BuildPlan:
    """Which pictures become pairs, in which order, and on which side."""

    inspected: dict[str, Inspected]
    sides: dict[str, tuple[str, str]]  # name -> (group, "train" or "held_out")
    pairs: list[PlannedPair]
    skipped: dict[str, str]  # name -> why

    def train_pairs(self) -> list[PlannedPair]:
        """One pair of each training picture, in order."""
        first = {pair.name: pair for pair in reversed(self.pairs)}
        return [first[name] for name in self.inspected if self.sides[name][1] == "train"]


def gather_facts(material: Material, skipped: dict[str, str]) -> dict[str, Fact]:
    """Hash and caption of every picture; those that give none go to `skipped` with the reason."""
    facts = {}
    for name in material.names:
        raise_if_interrupted()
        try:
            facts[name] = Fact(material.sha256(name), material.caption(name), material.mask_sha256(name))
        except BadInput as error:
            skipped[name] = str(error)
        except OSError as error:
            skipped[name] = f"The picture {name} cannot be read: {error.strerror or error}."
    return facts


def look(material: Material, names: list[str], skipped: dict[str, str], space: LatentSpace | None) -> Look:
    """Make a few pairs, spread over the whole set. BadInput when not one picture can be used."""
    spread = [names[i * len(names) // _SHEET_PAIRS] for i in range(_SHEET_PAIRS)] if names else []
    started, inspect_times, start_times, finish_times = {}, [], [], []
    for name in dict.fromkeys(spread + names):
        if len(started) == _SHEET_PAIRS:
            break
        raise_if_interrupted()
        began = time.monotonic()
        try:
            area = next(iter(material.inspect(name).sizes))
        except BadInput as error:
            skipped.setdefault(name, str(error))
            continue
        inspected = time.monotonic()
        started[name] = start_pair(material, PlannedPair(name, area, False), space)
        inspect_times.append(inspected - began)
        start_times.append(time.monotonic() - inspected)
    if not started:
        raise _nothing_usable(skipped)
    pairs = {}
    for name, raw in started.items():
        began = time.monotonic()
        pairs[name] = finish_pair(material, name, raw)
        finish_times.append(time.monotonic() - began)
    shown = [(name, *material.show(pair)) for name, pair in pairs.items()]
    channels = next(iter(pairs.values())).z.shape[0]
    return Look(shown, channels, _typical(inspect_times), _typical(start_times) + _typical(finish_times))


def _typical(seconds: list[float]) -> float:
    """The median, without the first: it loads the models."""
    seconds = seconds[1:] or seconds
    return sorted(seconds)[len(seconds) // 2]


def start_pair(material: Material, pair: PlannedPair, space: LatentSpace | None) -> RawPair:
    """What the VAE gives of one pair, after a look whether the user wants to stop.

    BadInput where VAE and base model do not fit.
    """
    raise_if_interrupted()
    raw = material.start(*pair)
    if space is not None:
        space.check(raw.z, pair.name)
    return raw


def finish_pair(material: Material, name: str, raw: Started) -> Started:
    """A pair with its base latent, after a look whether the user wants to stop."""
    raise_if_interrupted()
    return material.finish(name, raw)


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
    for name, found in inspected.items():
        for area in found.sizes:
            pairs.append(PlannedPair(name, area, False))
            if request.mirror and sides[name][1] == "train":
                pairs.append(PlannedPair(name, area, True))
    return BuildPlan(inspected, sides, pairs, skipped)


def _nothing_usable(skipped: dict[str, str]) -> BadInput:
    """The sentence where not one picture is left, with the reason that most of them have."""
    kinds: dict[str, list[str]] = {}
    for name, why in skipped.items():
        kinds.setdefault(re.sub(r"\d+", "0", why.replace(name, "")), []).append(why)
    most = max(kinds.values(), key=len, default=["there are none."])
    which = "the first" if len(kinds) < 2 else f"{len(most)} of them for this reason"
    return BadInput(f"None of the {len(skipped)} pictures can be used; {which}: {most[0]}")
