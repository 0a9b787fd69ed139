"""A VAE of the host in FP32 and in short dtypes, on one picture: layer by layer, and as an eye sees the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....training.errors import BadInput
from ....training.precision.assessment import NOT_VISIBLE, Choice, choose, describe_picture_error, visibility
from ....training.precision.audit import Audit
from ....training.precision.audit_chart import difference_picture
from ....training.precision.audit_report import AuditPart
from ....training.precision.dtypes import DTYPES, dtype_name
from ....training.precision.measures import PictureError, compare_pictures, rescale_error
from ....training.precision.policy import VAE_DECODER, VAE_ENCODER
from ..patching.audited import Audited, error_of, native_support
from ..patching.exact_float32 import exact_float32
from ..progress import NOT_A_FAILURE
from ..wording import first_line
from .copies import copy_vae
from .halves import lacking_half
from .host_vae import PICTURES, VIDEO, what_it_makes
from .source import RecognisedVAE, class_name, recognise, refuse_uncopyable

__all__ = ["AuditedVAE", "audit_vae", "frames_of", "runs_of_vae"]

_FRAMES = 9  # of a video VAE: enough for every temporal layer to work
_LATENT_SIDE = 32  # of the noise that a VAE without an encoder decodes


@dataclass
class AuditedVAE(Audited):
    """latent: the FP32 one, raw; fine: the FP32 copy, for whoever has more to decode."""

    fine: Any
    latent: Tensor
    encodes: bool
    pictures: list[Tensor] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)
    errors: dict[str, dict[str, PictureError]] = field(default_factory=dict)  # "encoder", "decoder", "both" -> dtype


def runs_of_vae(names: tuple[str, ...]) -> int:
    """Steps of a progress bar."""
    return 2 + 2 * len(names)


def audit_vae(vae: Any, image: Tensor, names: tuple[str, ...], seed: int, step: Callable[[str], None]) -> AuditedVAE:
    """`image`: [N, H, W, 3] in [0, 1]. `step(line)` is called before each run, to show it, or to stop.

    All runs are on copies, through the host's own encode and decode. The FP32 copy stays while the others come and go,
    one at a time. Raises BadInput for a VAE that has nothing to do with pictures, or that cannot be copied.
    """
    given = recognise(vae)
    if (makes := what_it_makes(vae)) not in (PICTURES, VIDEO):
        raise BadInput(f"The VAE ({class_name(vae)}) is one of {makes}; the audit needs one of pictures or video.")
    source = given.source
    lacks = given.provenance.lacks or lacking_half(source)
    if lacks == "decoder":
        raise BadInput(f"The VAE ({class_name(vae)}) can only encode; the audit needs one that gives a picture back.")
    refuse_uncopyable(source)
    image = image[: _FRAMES if getattr(vae, "latent_dim", 2) == 3 else 1, ..., :3].float()
    fine = copy_vae(source, torch.float32)
    before, after = Audit(names, seed=seed), Audit(names, seed=seed)  # encoder, decoder

    step("VAE encoder in FP32")
    latent, encodes = _reference_latent(fine, image, before, seed, encodes=lacks != "encoder")
    step("VAE decoder in FP32")
    with exact_float32(), after.reference(fine.first_stage_model):
        reference = frames_of(_tried(fine, "decode", latent))
    if reference.ndim != 4 or reference.shape[-1] != 3:
        raise BadInput(
            f"The VAE ({class_name(vae)}) must give pictures [N, H, W, 3]; it gave {list(reference.shape)}, so nobody "
            f"can look at them."
        )
    audited = AuditedVAE(fine, latent, encodes, errors={"encoder": {}, "decoder": {}, "both": {}})
    audited.notes += _notes(given, image, encodes, names)
    if encodes:
        audited.parts.append(AuditPart(VAE_ENCODER, before))
    audited.parts.append(AuditPart(VAE_DECODER, after))
    if not torch.isfinite(reference).all():
        raise BadInput(
            f"The VAE ({class_name(vae)}) gives NaN or infinity in FP32 already, so its file is damaged or not "
            f"complete; there is nothing to compare with."
        )
    for name in names:
        _lowered(audited, source, image, reference, (before, after), name, step)
    native = native_support(fine.patcher.load_device, names)
    for part, half in ((VAE_ENCODER, "encoder"), (VAE_DECODER, "decoder")):
        audit = before if half == "encoder" else after
        trials = {
            name: (visibility(error) == NOT_VISIBLE, describe_picture_error(f"{name} {half[:-2]}e", error))
            for name, error in audited.errors[half].items()
        }
        if trials:
            audited.choices[part] = choose(trials, native, list(audit.layers.values()))
    return audited


def _reference_latent(fine: Any, image: Tensor, audit: Audit, seed: int, *, encodes: bool) -> tuple[Tensor, bool]:
    """(latent to decode, whether it is the picture's)."""
    if encodes:
        with exact_float32(), audit.reference(fine.first_stage_model):
            return _tried(fine, "encode", image), True
    frames = () if getattr(fine, "latent_dim", 2) == 2 else (2,)
    shape = (1, fine.latent_channels, *frames, _LATENT_SIDE, _LATENT_SIDE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)), False


def _tried(fine: Any, method: str, x: Tensor) -> Tensor:
    """`fine.encode(x)` or `fine.decode(x)`, with a sentence for a VAE that is not made for such an `x`."""
    try:
        return getattr(fine, method)(x)
    except (BadInput, *NOT_A_FAILURE):
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as failure:
        raise BadInput(
            f"The VAE ({class_name(fine)}) cannot {method} {'a picture' if method == 'encode' else 'a latent'} of "
            f"{list(x.shape)} as those of pictures and video do: {first_line(failure)}."
        ) from failure


def _lowered(
    audited: AuditedVAE, source: Any, image: Tensor, reference: Tensor, audits: tuple, name: str, step: Callable
) -> None:
    """All of one dtype: its halves alone, each against FP32 before and behind it, and both together."""
    low = copy_vae(source, DTYPES[name])
    results = {}
    step(f"VAE in {name}")
    coarse = None
    if audited.encodes:
        with audits[0].lowered(name, low.first_stage_model):
            coarse = low.encode(image)
    with audits[1].lowered(name, low.first_stage_model):
        results["decoder"] = frames_of(low.decode(audited.latent))
    step(f"VAE in {name}, decoded")
    if coarse is not None:
        results["both"] = frames_of(low.decode(coarse))
        del low
        with exact_float32():
            results["encoder"] = frames_of(audited.fine.decode(coarse))
        errors = error_of([coarse], [audited.latent])
        sentence = f"{name} latent: relative error {errors.relative:.1e}, cosine {errors.cosine:.6f}."
        audited.parts[0].sentences.append(sentence)
    titles = {"encoder": f"{name} encode, FP32 decode", "decoder": f"{name} decode", "both": f"{name} round trip"}
    for half in ("encoder", "decoder", "both"):
        if half in results:
            error = audited.errors[half][name] = compare_pictures(results[half], reference)
            audited.parts[0 if half == "encoder" else -1].sentences.append(describe_picture_error(titles[half], error))
            difference = (results[half][0] - reference[0]).movedim(-1, 0)
            audited.pictures.append(difference_picture(difference, titles[half]))


def frames_of(pixels: Tensor) -> Tensor:
    """[1, F, H, W, 3] of a video VAE, or [N, H, W, 3] -> [N, H, W, 3]"""
    return (pixels[0] if pixels.ndim == 5 else pixels)[..., :3].float().cpu()


def _notes(given: RecognisedVAE, image: Tensor, encodes: bool, names: tuple[str, ...]) -> list[str]:
    source, stored = given.source, dtype_name(given.stored)
    notes = [f"VAE: {class_name(source)}, loaded as {dtype_name(source.vae_dtype)}."]
    if given.dynamic:
        notes.append(f"Its weights are the file's own, in {stored}: FP32 means FP32 compute over those.")
    elif source.vae_dtype != torch.float32:
        notes.append(
            f"The loader had rounded the VAE's weights to {stored}: FP32 means FP32 compute over "
            f"those here. Load VAE (Precision) reads the file as it is."
        )
    if not encodes:
        return [*notes, "This VAE only decodes: the latent is noise, so colours and detail are not those of pictures."]
    for name in names:
        after, before = rescale_error(image, DTYPES[name])
        notes.append(
            f"Pixels are scaled to -1..1 in FP32 and then cast to {name}: mean error {after:.1e}; a cast before would "
            f"cost {before:.1e}."
        )
    return notes
