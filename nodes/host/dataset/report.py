"""The words of a build: what was planned, what came of it, in lines that a person reads."""

from __future__ import annotations

from collections import Counter

from ..clip.host_clip import CaptionEncoder
from ..vae.host_vae import vae_dtype
from ..wording import for_people
from .latent_space import LatentSpace
from .plan import BuildPlan
from .request import BuildRequest
from .subsets import subset_of

__all__ = ["as_text", "byte_count", "latent_line", "plan_lines", "text_lines"]

_MOST_SKIPPED = 30


def plan_lines(request: BuildRequest, plan: BuildPlan, subsets: dict[str, float]) -> list[str]:
    """Base, counts, sizes, and each skipped picture with its reason."""
    held = sum(side == "held_out" for _, side in plan.sides.values())
    groups = len({group for group, _ in plan.sides.values()})
    mirrored = sum(pair.flip for pair in plan.pairs)
    sizes = Counter(size for item in plan.inspected.values() for size in item.sizes.values()).most_common()
    lines = [
        f"Base: {request.base.line()}.",
        f"Usable: {len(plan.inspected)} (held out: {held}, groups: {groups}), pairs: {len(plan.pairs)}"
        + (f", mirrored among them: {mirrored}." if mirrored else "."),
        "Sizes: " + ", ".join(f"{width}x{height}: {count}" for (width, height), count in sizes) + ".",
    ]
    if subsets:
        of = Counter(map(subset_of, plan.inspected))
        weights = {**subsets, **({"": 1.0} if of[""] else {})}
        named = [f"{subset or 'others'}: {of[subset]} of weight {weight:g}" for subset, weight in weights.items()]
        lines.append(f"Subsets: {', '.join(named)}.")
    if request.masks:
        lines.append(f"Masks: {sum(item.masked for item in plan.inspected.values())}.")
    if plan.skipped:
        lines.append(f"Skipped {len(plan.skipped)}:")
        lines += [f"- {why}" for why in list(plan.skipped.values())[:_MOST_SKIPPED]]
        lines += [f"- and {len(plan.skipped) - _MOST_SKIPPED} more."] if len(plan.skipped) > _MOST_SKIPPED else []
    return lines


def latent_line(request: BuildRequest, space: LatentSpace) -> str:
    """Which latent space, the precision of the VAE, and that on the disk where it is not float32."""
    scale = "per channel" if isinstance(space.scale, list) else f"{space.scale:g}"
    shift = "per channel" if isinstance(space.shift, list) else f"{space.shift:g}"
    vae = f", VAE in {vae_dtype(request.vae)}" if request.vae is not None else ""
    stored = f", stored in {request.dtype}" if request.dtype != "float32" else ""
    return f"Latent: {space.name}, {space.channels} channels, scale {scale}, shift {shift}{vae}{stored}."


def text_lines(captions: CaptionEncoder | None) -> list[str]:
    """Length and width of the encoded captions, and how many were cut."""
    if captions is None:
        return ["No text: no CLIP was given."]
    shape = captions.shape
    lines = [f"Text: {shape.tokens} tokens of {shape.dim}" + (f", {shape.pooled} pooled." if shape.pooled else ".")]
    if captions.cut:
        lines.append(f"Captions that were longer and were cut: {len(captions.cut)}.")
    return lines


def as_text(lines: list[str]) -> str:
    """One text for people; two spaces end each line, which Markdown needs to break it there."""
    return for_people("  \n".join(lines))


def byte_count(count: float) -> str:
    """1234567 -> "1.2 MB" (decimal units, as disks are sold and as most file managers show)."""
    units = ["B", "KB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" or count >= 100 else 1
    return f"{count:.{digits}f} {units[0]}"
