"""The pairs of a build: made one after the other, and written."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ....training.data.shards import DatasetWriter
from ....training.run.report.labels import duration
from ..clip.host_clip import CaptionEncoder, clip_fingerprint
from ..progress import NodeProgress
from ..vae.host_vae import vae_dtype, vae_fingerprint
from .latent_space import LatentSpace
from .material import Material
from .plan import BuildPlan, Fact, finish_pair, start_pair
from .request import BuildRequest
from .sources import RawLatents

__all__ = ["dataset_writer", "write_pairs"]

_STARTED_AT_ONCE = 256  # pairs that the VAE starts before a base MODEL finishes them; latents and small pictures


def dataset_writer(
    folder: Path,
    request: BuildRequest,
    space: LatentSpace,
    captions: CaptionEncoder | None,
    subsets: dict[str, int],
    plan: BuildPlan,
) -> DatasetWriter:
    """What a killed build of the same recipe has finished is gone on with; the recipe is in the folder's name."""
    vae, context, empty = None, None, None
    if request.vae is not None:
        vae = {"fingerprint": vae_fingerprint(request.vae), "dtype": vae_dtype(request.vae)}
    if captions is not None:
        context = {**vars(captions.shape), "fingerprint": clip_fingerprint(request.clip)}
        empty = _text_tensors(captions, "")
    base = request.base.describe()
    pairs = hashlib.sha256(json.dumps([plan.pairs, plan.sides]).encode()).hexdigest()
    return DatasetWriter(
        folder,
        latent=space.index(),
        vae=vae,
        base=base,
        context=context,
        empty=empty,
        dtype=request.storage_dtype,
        subsets=subsets,
        resume={"folder": folder.name, "pairs": pairs},
    )


def write_pairs(
    writer: DatasetWriter,
    material: Material,
    plan: BuildPlan,
    facts: dict[str, Fact],
    subsets: dict[str, tuple[str, int]],
    space: LatentSpace,
    captions: CaptionEncoder | None,
    ahead: dict[str, RawLatents],
    progress: NodeProgress,
) -> None:
    """Every pair of the plan into the writer that it has not yet; those in `ahead` are made already."""
    began, total = time.monotonic(), len(facts) + len(plan.pairs)
    with_text: set[str] = set()  # captions whose tensors the writer has
    pairs = _raw_pairs(material, plan.pairs[writer.resumed :], space, ahead, progress)
    for done, (name, flip, raw) in enumerate(pairs, start=writer.resumed + 1):
        group, side = plan.sides[name]
        caption = facts[name].caption
        text = _text_tensors(captions, caption) if captions and caption not in with_text else {}
        with_text.add(caption)
        writer.add(
            space.to_model(raw.z),
            space.to_model(raw.b),
            source=name,
            sha256=facts[name].sha256,
            group=group,
            split=side,
            caption=caption,
            flip=flip,
            rgb=raw.rgb,
            mask=raw.mask,
            subset=subsets[name][0] if name in subsets else "",
            base_size=None if raw.small is None else tuple(raw.small.shape[1:]),
            **text,
        )
        left = (time.monotonic() - began) / (done - writer.resumed) * (len(plan.pairs) - done)
        progress.update(len(facts) + done, total)
        progress.text(f"pair {done} of {len(plan.pairs)}, {duration(left)} left")


def _raw_pairs(
    material: Material,
    queued: list[tuple[str, bool]],
    space: LatentSpace,
    ahead: dict[str, RawLatents],
    progress: NodeProgress,
) -> Iterator[tuple[str, bool, RawLatents]]:
    """(name, mirrored, raw) of every pair queued, in its order."""
    queue, done = iter(queued), 0
    while some := list(itertools.islice(queue, _STARTED_AT_ONCE if material.in_two_steps else 1)):
        started = []
        for name, flip in some:
            raw = None if flip else ahead.pop(name, None)
            started.append(raw or start_pair(material, name, flip, space).latents())
            if material.in_two_steps:
                progress.text(f"encoded {done + len(started)} of {len(queued)}")
        finished = (finish_pair(material, name, raw) for (name, _), raw in zip(some, started, strict=True))
        if any(raw.small is not None for raw in started):  # the VAE's turn comes again, once for all of them
            finished = list(finished)
        for (name, flip), raw in zip(some, finished, strict=True):
            yield name, flip, material.at_target_size(name, raw)
        done += len(some)


def _text_tensors(captions: CaptionEncoder, caption: str) -> dict[str, torch.Tensor]:
    context, pooled = captions.encode(caption)
    return {"context": context} if pooled is None else {"context": context, "pooled": pooled}
