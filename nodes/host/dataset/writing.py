"""The pairs of a plan on their way to the disk: latents in model space, each caption's text once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....training.data.shards import DatasetWriter
from ....training.run.report.labels import duration
from ..clip.host_clip import CaptionEncoder, clip_fingerprint
from ..progress import NodeProgress
from ..vae.host_vae import vae_dtype, vae_fingerprint
from .latent_space import LatentSpace
from .material import Material
from .plan import BuildPlan, Fact, PlannedPair, finish_pair, start_pair
from .request import BuildRequest
from .sources import RawLatents
from .subsets import subset_of

__all__ = ["open_writer", "write_pairs"]

_STARTED_AT_ONCE = 256  # pairs that the VAE starts before a base MODEL finishes them; latents and small pictures


def open_writer(
    folder: Path,
    request: BuildRequest,
    plan: BuildPlan,
    space: LatentSpace,
    captions: CaptionEncoder | None,
    subsets: dict[str, float],
) -> DatasetWriter:
    """The writer of this dataset. What a killed build of the same recipe and plan has finished, it has already: the
    folder's name holds the recipe, and a picture that could not be read for lack of memory is missing from the plan."""
    vae, context, empty = None, None, None
    if request.vae is not None:
        vae = {"fingerprint": vae_fingerprint(request.vae), "dtype": vae_dtype(request.vae)}
    if captions is not None:
        context = {**vars(captions.shape), "fingerprint": clip_fingerprint(request.clip)}
        empty = _text_tensors(captions, "")
    return DatasetWriter(
        folder,
        latent=space.index(),
        vae=vae,
        base=request.base.describe(),
        context=context,
        empty=empty,
        dtype=request.dtype,
        subsets=subsets,
        resume=[folder.name, plan.pairs],
    )


def write_pairs(
    writer: DatasetWriter,
    material: Material,
    plan: BuildPlan,
    facts: dict[str, Fact],
    space: LatentSpace,
    captions: CaptionEncoder | None,
    subsets: dict[str, float],
    ahead: dict[PlannedPair, RawLatents],
    progress: NodeProgress,
) -> None:
    """Every pair of the plan that the writer does not have yet; those in `ahead` are made already."""
    began, total = time.monotonic(), len(facts) + len(plan.pairs)
    given: set[str] = set()  # captions whose text the writer has
    pairs = _raw_pairs(material, plan.pairs[writer.resumed :], space, ahead, progress)
    for made, (pair, raw) in enumerate(pairs, start=1):
        name = pair.name
        group, side = plan.sides[name]
        caption = facts[name].caption
        writer.add(
            space.to_model(raw.z),
            space.to_model(raw.b),
            source=name,
            sha256=facts[name].sha256,
            group=group,
            split=side,
            caption=caption,
            flip=pair.flip,
            rgb=raw.rgb,
            mask=raw.mask,
            subset=subset_of(name) if subsets else "",
            base_size=None if raw.small_z is None else tuple(raw.small_z.shape[1:]),
            **(_text_tensors(captions, caption) if captions and caption not in given else {}),
        )
        given.add(caption)
        done = writer.resumed + made
        left = (time.monotonic() - began) / made * (len(plan.pairs) - done)
        progress.update(len(facts) + done, total)
        progress.text(f"pair {done} of {len(plan.pairs)}, {duration(left)} left")


def _raw_pairs(
    material: Material,
    pairs: list[PlannedPair],
    space: LatentSpace,
    ahead: dict[PlannedPair, RawLatents],
    progress: NodeProgress,
) -> Iterator[tuple[PlannedPair, RawLatents]]:
    """Every pair with its raw latents, in their order."""
    queue, done = iter(pairs), 0
    while some := list(itertools.islice(queue, _STARTED_AT_ONCE if material.in_two_steps else 1)):
        started = []
        for pair in some:
            started.append(ahead.pop(pair, None) or start_pair(material, pair, space).latents())
            if material.in_two_steps:
                progress.text(f"encoded {done + len(started)} of {len(pairs)}")
        for pair, raw in zip(some, started, strict=True):
            yield pair, finish_pair(material, pair.name, raw)
        done += len(some)


def _text_tensors(captions: CaptionEncoder, caption: str) -> dict[str, Any]:
    context, pooled = captions.encode(caption)
    return {"context": context} if pooled is None else {"context": context, "pooled": pooled}
