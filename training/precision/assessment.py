"""What the measured errors mean, in plain words, and the plan that follows from them. Every limit is named here.

Colours. Below 1 in CIEDE2000 an observer does not notice a difference, from 1 to 2 only an experienced one does, from 2
on an inexperienced one does too (Mokrzycki & Tatol 2011, "Colour difference Delta E - a survey"; given for CIELAB
differences, whose unit CIEDE2000 keeps). Judged by the value that one pixel in a hundred passes, so that a few bad
places are not averaged away. For scale: rounding to 8 bits, which every PNG does, costs 58.9 dB by itself (an error
spread evenly over 1/255).

Layers. Rounding a layer's input, weights and output costs about one step of the dtype (`torch.finfo(dtype).eps`). Ten
steps mean that the layer loses more than rounding explains.

Text and latents. No limit of sight is known for them. `TEXT_LIMIT` and `LATENT_LIMIT` are this pack's own caution, no
more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .audit import Layer
from .device import Support
from .dtypes import DTYPES
from .layer_kinds import ATTENTION, EMBEDDING, NORM
from .measures import Errors, PictureError
from .resolve import DEFAULT

__all__ = [
    "LATENT_LIMIT", "NOTICED", "NOT_VISIBLE", "RANGE_LIMIT", "ROUNDING_STEPS", "SEEN", "TEXT_LIMIT", "Choice",
    "choose", "describe_picture_error", "describe_tensor_error", "findings", "layers_to_keep", "loses_too_much",
    "visibility",
]  # fmt: skip

NOTICED, SEEN = 1.0, 2.0  # CIEDE2000: an experienced observer notices; everybody does
NOT_VISIBLE = "not visible by eye"
EIGHT_BITS = 58.9  # dB
ROUNDING_STEPS = 10
RANGE_LIMIT = 0.5  # of the dtype's range: another picture may well double a value
TEXT_LIMIT, LATENT_LIMIT = 0.01, 0.02  # relative error
_KEPT_LAYERS = 16  # single layers in a plan


def visibility(error: PictureError) -> str:
    """Whether an eye sees it, as a clause."""
    if not error.finite:
        return "NaN or infinity: the picture would be black"
    if error.colour_99 < NOTICED:
        return NOT_VISIBLE
    if error.colour_99 < SEEN:
        return "only an experienced eye could find it, and only in places"
    if error.colour < NOTICED:
        return "visible in places"
    return "visible by eye"


def describe_picture_error(what: str, error: PictureError) -> str:
    """One sentence about a picture against FP32; `what`: "bf16 decode"."""
    if not error.finite:
        return f"{what}: {visibility(error)}."
    below = " (less than 8-bit rounding)" if error.psnr > EIGHT_BITS else ""
    grey = f", chroma {error.chroma:+.2f}" if abs(error.chroma) >= 0.05 else ""
    return (
        f"{what}: {error.psnr:.1f} dB against FP32{below}, SSIM {error.ssim:.5f}, CIEDE2000 mean {error.colour:.2f} "
        f"and 99 % below {error.colour_99:.2f}{grey}, noise in fine detail {error.fine:+.0f} dB: {visibility(error)}."
    )


def describe_tensor_error(what: str, errors: Errors, limit: float) -> str:
    """One sentence about a conditioning or a latent against FP32."""
    if errors.not_finite:
        return f"{what}: {errors.not_finite} values are NaN or infinite."
    word = "within" if errors.relative <= limit else "above"
    return (
        f"{what}: relative error {errors.relative:.2e}, cosine {errors.cosine:.6f}, largest {errors.largest:.2g}; "
        f"{word} the {limit:.0%} that this pack takes for harmless."
    )


def loses_too_much(layer: Layer, dtype: str) -> bool:
    """More than rounding its input, weights and output explains."""
    errors = layer.own.get(dtype)
    return errors is not None and not errors.relative <= ROUNDING_STEPS * torch.finfo(DTYPES[dtype]).eps


def findings(layer: Layer, names: tuple[str, ...]) -> list[str]:
    """What is wrong with a layer, each as a clause; empty where nothing is."""
    clauses = []
    if layer.over:
        clauses.append(f"{layer.over} of {layer.values} values overflow in fp16 (largest {layer.largest:.3g})")
    for name in names:
        errors = layer.own.get(name)
        if errors is not None and errors.not_finite:
            clauses.append(f"{name}: NaN or infinity from finite input")
        elif errors is not None and loses_too_much(layer, name):
            clauses.append(f"{name}: loses {errors.relative:.1e} by itself, more than rounding explains")
        if layer.loses_eps(name):
            clauses.append(f"{name}: loses its eps {layer.eps:g} (output {layer.quiet[name]:.0%} off where it counts)")
        if name in layer.problems:
            clauses.append(f"{name}: does not run alone ({layer.problems[name]})")
    return clauses


@dataclass(frozen=True)
class Choice:
    """A dtype's name, and the reason."""

    dtype: str
    why: str


def choose(trials: dict[str, tuple[bool, str]], devices: dict[str, Support], layers: list[Layer]) -> Choice:
    """The short dtype that costs nothing that counts, else FP32. trials: dtype -> (good enough, how it was measured);
    of two good ones the first is taken. A dtype that the device only emulates is never worth it.
    """
    largest = max(layers, key=lambda layer: layer.largest, default=None)
    against = []
    for name, (good, measured) in trials.items():
        used = largest.range_used(name) if largest else 0.0
        if not devices[name].native:
            against.append(f"{devices[name].why}, so it saves no time")
        elif not good:
            against.append(measured)
        elif largest and used > RANGE_LIMIT:
            against.append(f"{name}: {largest.name} reaches {used:.0%} of its range")
        else:
            return Choice(name, measured)
    return Choice("fp32", "; ".join(against)) if against else Choice(DEFAULT, "not measured")


def layers_to_keep(layers: list[Layer], dtype: str) -> tuple[tuple[str, ...], list[str]]:
    """(what of a model should stay in FP32 when the rest runs in `dtype`, the reasons): kinds, then layer names."""
    if dtype not in DTYPES or dtype == "fp32":
        return (), []
    kinds: list[str] = []
    names: list[str] = []
    why: list[str] = []
    for layer in layers:
        bad = loses_too_much(layer, dtype) or layer.loses_eps(dtype) or layer.range_used(dtype) > RANGE_LIMIT
        if not bad:
            continue
        kind = {NORM: "norms", ATTENTION: "attention_softmax", EMBEDDING: "embeddings"}.get(layer.kind)
        if kind is None:
            names.append(layer.name)
        elif kind not in kinds:
            kinds.append(kind)
            why.append(f"{kind} (such as {layer.name})")
    names = names[:_KEPT_LAYERS]
    return (*kinds, *names), [*why, *names]
