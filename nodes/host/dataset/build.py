"""One build of a dataset, told from top to bottom."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ....training.data.latent_cache import LatentCache
from ....training.data.shards import RefinerDataset, estimate_bytes
from ....training.errors import BadInput
from ....training.run.report.labels import duration
from ..clip.host_clip import CaptionEncoder, clip_fingerprint
from ..paths import dataset_folder, latent_cache_folder, move_aside
from ..progress import NodeProgress, raise_if_interrupted
from ..vae.host_vae import PictureEncoder, latent_downscale, refuse_no_pictures, vae_fingerprint
from .contact_sheet import contact_sheet
from .decoration import REPORT_FILE, SHEET_FILE, png, read_decoration, report_bytes, write_decoration
from .latent_space import MEASURED_PICTURES, LatentSpace
from .material import LatentMaterial, Material, PictureMaterial
from .pictures import PictureBatch, PictureFolder
from .plan import Fact, PlannedPair, gather_facts, look, make_plan, start_pair
from .recipe import count_build, recipe_hash
from .report import as_text, byte_count, latent_line, plan_lines, text_lines
from .request import BuildRequest, BuildResult
from .sources import LatentBase, RawLatents, SampleBase
from .subsets import subset_weights
from .writing import open_writer, write_pairs

__all__ = ["build_dataset"]


@dataclass
class _Caches:
    """What earlier builds have encoded and sampled; None where nothing is kept."""

    latents: LatentCache | None
    samples: LatentCache | None

    def all(self) -> list[LatentCache]:
        return [cache for cache in (self.latents, self.samples) if cache is not None]


def build_dataset(request: BuildRequest, progress: NodeProgress) -> BuildResult:
    """Build, or find again, the dataset of a request: output/refiner_datasets/<name>-<recipe hash>.

    Raises BadInput, or the host's interruption; in both cases nothing is left under the final name.
    """
    began = time.monotonic()

    # --- what it is made of -------------------------------------------------------------------------------------
    if request.vae is not None:
        refuse_no_pictures(request.vae)
    captions = CaptionEncoder(request.clip) if request.clip is not None else None
    caches = _caches(request)
    material = _material(request, captions, caches)
    skipped: dict[str, str] = {}
    progress.text(f"looking at {material.unit}: {len(material.names)}")
    facts = gather_facts(material, skipped)
    subsets = subset_weights(facts) if request.subset_weights else {}
    folder = dataset_folder(f"{request.name}-{_recipe(request, facts)}")

    # --- is it there already? -----------------------------------------------------------------------------------
    notes = []
    finished = None  # a dataset that only lacks its decoration
    if folder.exists() and request.plan_only:
        notes.append("It is there already: a build would use it again.")
    elif folder.exists():
        try:
            # A damaged one is built again here, and would stop a training.
            opened = RefinerDataset.open(folder)
            opened.verify()
            finished = opened
        except BadInput as error:
            notes.append(f"{error} It was moved to {move_aside(folder).name}, and built again.")
        else:
            if (decoration := read_decoration(folder)) is not None:
                return _reused(finished, *decoration, progress)

    # --- a look at a few pairs, before anything long ------------------------------------------------------------
    text = captions.empty_shape() if captions else None  # a broken text encoder shows here, not an hour later
    space = _named_space(request, material)
    sample = look(material, list(facts), skipped, space)
    sheet = contact_sheet(sample.shown)
    of_picture = [found for name in facts if (found := material.quick_sizes(name))]
    sizes = [size for found in of_picture for size in found]
    held_out = min(request.held_out, max(len(of_picture) - 1, 0))
    copies = 1 + request.mirror * (len(of_picture) - held_out) / max(len(of_picture), 1)
    cells = [(height // material.downscale, width // material.downscale) for width, height in sizes]
    disk = copies * estimate_bytes(cells, sample.channels, dtype=request.dtype)
    if text:
        texts = len({"", *(fact.caption for fact in facts.values())})  # each once, and the empty one
        disk += estimate_bytes([], sample.channels, vars(text), captions=texts, dtype=request.dtype)
    # A pair takes as long as it has cells; those that were looked at are of the first of each picture's sizes.
    pairs = len(of_picture) * sum(map(math.prod, sizes)) / max(sum(math.prod(found[0]) for found in of_picture), 1)
    seconds = copies * sample.pair_seconds * pairs + sample.inspect_seconds * len(of_picture)
    outlook = (
        f"{material.unit}: {len(facts)}, sizes: {len(Counter(sizes))}, to hold out: {held_out}; "
        f"about {byte_count(disk)} and {duration(seconds)}"
    )
    progress.update(0, total=2 * len(facts), preview=sheet)
    progress.message(outlook)
    if not request.plan_only and finished is None:
        _refuse_full_disk(folder, disk)
    for cache in caches.all():
        cache.reserve = int(disk)

    # --- every picture once: which can be used, and which are alike ---------------------------------------------
    plan = make_plan(material, list(facts), skipped, request, progress)
    lines = [*plan_lines(request, plan, subsets), *material.notes()]
    if request.plan_only:
        report = [f"Plan of {folder.name}; nothing was written.", *notes, *lines, f"Estimate: {outlook}."]
        return BuildResult("", "", sheet, as_text(report))

    # --- text, latents, shards ----------------------------------------------------------------------------------
    if captions:
        progress.text("encoding captions")
        captions.measure([facts[name].caption for name in plan.inspected], raise_if_interrupted)
    if finished is not None:
        lines = [latent_line(request, LatentSpace(**finished.latent)), *text_lines(captions), *lines]
        again = write_decoration(folder, sheet, as_text(lines))
        return _reused(finished, sheet, as_text([again, *lines]), progress)
    ahead: dict[PlannedPair, RawLatents] = {}
    if space is None:
        progress.text("measuring the latents")
        first = plan.train_pairs()[:MEASURED_PICTURES]
        ahead = {pair: start_pair(material, pair, None).latents() for pair in first}
        space = LatentSpace.measured([pair.z for pair in ahead.values()], material.downscale)
    lines = [latent_line(request, space), *text_lines(captions), *lines]
    try:
        with open_writer(folder, request, plan, space, captions, subsets) as writer:
            if writer.resumed:
                notes.append(f"Went on with the {writer.resumed} pairs that a stopped build had finished.")
            write_pairs(writer, material, plan, facts, space, captions, subsets, ahead, progress)
            lines += material.retried()
            writer.attach(SHEET_FILE, png(sheet))
            writer.attach(REPORT_FILE, report_bytes(as_text(lines)))
    finally:
        for cache in caches.all()[:1]:  # all lie in one folder
            cache.trim()
    count_build(request.name)

    # --- what came out ------------------------------------------------------------------------------------------
    data = RefinerDataset.open(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    report = [
        f"Built {folder.name}: training pairs {len(data.train)}, held out {len(data.held_out)}.",
        *notes,
        *lines,
        *_cache_lines(caches),  # not in the dataset's own report: the same inputs give the same bytes there
        _residual_line(data),
        f"{byte_count(size)} on disk ({byte_count(disk)} estimated), {duration(time.monotonic() - began)} "
        f"({duration(seconds)} estimated).",
    ]
    progress.message(report[0])
    return BuildResult(str(folder), data.content_hash, sheet, as_text(report))


# --------------------------------------------------------------------------------------------------- the steps above


def _material(request: BuildRequest, captions: CaptionEncoder | None, caches: _Caches) -> Material:
    if isinstance(request.base, LatentBase):
        if request.folder is not None or request.images is not None:
            raise BadInput("With a base of latents the targets are latents too: leave folder and images empty.")
        if request.mirror:
            raise BadInput("mirror needs pictures: the mirror image of a latent is not the latent of a mirror image.")
        if request.resolutions:
            raise BadInput("resolutions needs pictures: latents have the size that they have.")
        if request.masks:
            raise BadInput("masks needs pictures: latents have neither opacity nor files beside them.")
        return LatentMaterial(request.base, request.vae, request.caption)
    if (request.folder is None) == (request.images is None):
        given = "neither is given" if request.folder is None else "both are given"
        raise BadInput(f"The target pictures come either from a folder or from images, and {given}.")
    if request.vae is None:
        raise BadInput("Pictures need a vae to become latents (in pixel space: Load VAE with pixel_space).")
    if isinstance(request.base, SampleBase) and captions is None and request.base.needs_captions():
        raise BadInput(
            "The base model needs conditioning: give Base from Model a positive (and, where cfg is not 1, a negative) "
            "conditioning, or give Build Refiner Dataset a clip, so that it can use the captions."
        )
    if request.folder is not None:
        if request.captions:
            raise BadInput(
                f"caption brings {len(request.captions)} texts, which belong to images; the pictures of a folder have "
                f"theirs in files beside them."
            )
        pictures = PictureFolder(request.folder, request.caption, request.masks)
    else:
        pictures = PictureBatch(request.images, list(request.captions) or [request.caption])
    return PictureMaterial(
        pictures,
        request.base,
        PictureEncoder(request.vae, caches.latents),
        captions,
        caches.samples,
        areas=request.areas(),
        crop=request.crop,
        seed=request.seed,
        masks=request.masks,
    )


def _caches(request: BuildRequest) -> _Caches:
    """None where nothing is made, where nothing may be written, and in pixel space, where encoding is a copy."""
    if isinstance(request.base, LatentBase) or request.vae is None or request.plan_only:
        return _Caches(None, None)
    folder, latents, samples = latent_cache_folder(), None, None
    if latent_downscale(request.vae) != 1:
        latents = LatentCache(folder, vae_fingerprint(request.vae))
    if isinstance(request.base, SampleBase) and request.base.can_be_kept():
        samples = LatentCache(folder, request.base.sampler())
    return _Caches(latents, samples)


def _cache_lines(caches: _Caches) -> list[str]:
    lines = []
    for cache, what, made in ((caches.latents, "Latents", "encoded"), (caches.samples, "Base latents", "sampled")):
        if cache is not None:
            lines.append(f"{what}: {cache.made} {made}, {cache.found} found in the latent cache.")
            lines += [f"They were not all kept for a later build ({cache.failed})."] if cache.failed else []
    return lines


def _recipe(request: BuildRequest, facts: dict[str, Fact]) -> str:
    recipe = {
        "pictures": [[name, fact.sha256, fact.caption] for name, fact in facts.items()],
        "vae": vae_fingerprint(request.vae) if request.vae is not None else None,
        "clip": clip_fingerprint(request.clip) if request.clip is not None else None,
        "base": request.base.describe(),
        "base_inputs": request.base.fingerprint(list(facts)),
        "max_pixels": None if request.resolutions else request.max_pixels,
        "mirror": request.mirror,
        "crop": request.crop,
        "held_out": request.held_out,
        "seed": request.seed,
    }
    # What came later is named only where it is asked for: a dataset that an earlier version of the pack has built of
    # the same inputs holds the same tensors, and is found again.
    recipe |= {"dtype": request.dtype} if request.dtype != "float32" else {}
    recipe |= {"masks": [fact.mask_sha256 for fact in facts.values()]} if request.masks else {}
    recipe |= {"resolutions": request.resolutions} if request.resolutions else {}
    recipe |= {"subset_weights": True} if request.subset_weights else {}
    return recipe_hash(recipe)


def _reused(data: RefinerDataset, sheet: Image.Image, report: str, progress: NodeProgress) -> BuildResult:
    lines = [
        f"Reused {data.folder.name}: pictures, models and settings are those that it was built from.",
        f"Training pairs {len(data.train)}, held out {len(data.held_out)}.",
        report,
        _residual_line(data),
    ]
    progress.message(lines[0])
    return BuildResult(str(data.folder), data.content_hash, sheet, as_text(lines))


def _named_space(request: BuildRequest, material: Material) -> LatentSpace | None:
    """The latent space, where something at hand names it; None where it has to be measured."""
    if isinstance(request.base, SampleBase):
        return LatentSpace.of_model(request.base.model, material.downscale)
    if request.vae is not None and material.downscale == 1 and request.vae.latent_channels == 3:
        return LatentSpace.pixels()
    return None


def _refuse_full_disk(folder: Path, needed: float) -> None:
    parent = folder.parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise BadInput(
            f"The dataset needs about {byte_count(needed)} in {folder.parent}, where {byte_count(free)} are free."
        )


def _residual_line(data: RefinerDataset) -> str:
    return f"Residual RMS {data.residual_rms:.4g}: what sets the target apart from the base, and is to be learned."
