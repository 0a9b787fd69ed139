"""Which parts of a VAE encode and which decode: the host's families, and those of them that lack a half."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ....training.errors import BadInput
from ....training.precision.resolve import DEFAULT

__all__ = ["Halves", "find_halves", "lacking_half", "lacking_in_file", "refuse_missing_half"]

Halves = tuple[tuple[str, ...], tuple[str, ...]]

# class of the VAE's module -> parts that encode, parts that decode (a dot: a part of a part)
_FAMILIES: dict[str, Halves] = {
    "AutoencoderKL": (("encoder", "quant_conv"), ("post_quant_conv", "decoder")),  # SD, SDXL, Flux 2, HunyuanVideo
    "AutoencodingEngine": (("encoder",), ("decoder",)),  # SD 3, Flux 1, SVD, HunyuanImage, HunyuanVideo 1.5
    "WanVAE": (("encoder", "conv1"), ("conv2", "decoder")),  # Wan 2.1, Wan 2.2, Qwen Image
    "TAESD": (("taesd_encoder",), ("taesd_decoder",)),
    "TAEHV": (("encoder",), ("decoder",)),
    "VideoVAE": (("encoder",), ("decoder",)),  # LTXV, Mochi
    "CausalContinuousVideoTokenizer": (("encoder", "quant_conv"), ("post_quant_conv", "decoder")),  # Cosmos
    "StageA": (("in_block", "down_blocks"), ("up_blocks", "out_block")),  # Stable Cascade
    "StageC_coder": (("encoder",), ("previewer",)),
    "AudioOobleckVAE": (("encoder",), ("decoder",)),  # Stable Audio
    "ShapeVAE": (("encoder",), ("post_kl", "transformer", "geo_decoder")),  # Hunyuan3D 2
    # its spectrogram multiplies by a filter bank of its own, in the dtype of the sound that it is given
    "MusicDCAE": (
        ("dcae.encoder", "vocoder.mel_transform"),
        ("dcae.decoder", "vocoder.backbone", "vocoder.head"),
    ),  # ACE-Step
    "AudioAutoencoder": (("mel_converter", "vae.encoder"), ("vae.decoder", "vocoder")),  # MMAudio
}
_NEITHER = {"vquantizer"}  # parts with weights that neither encode nor decode use


def find_halves(module: torch.nn.Module) -> Halves | None:
    """Names of the parts that encode and of those that decode; None for a family that is not known."""
    halves = _FAMILIES.get(type(module).__name__)
    if halves is None:
        return None
    known = [*halves[0], *halves[1]]
    if not set(known) <= {name for name, _ in module.named_modules()}:
        return None
    around = {""} | {name.rpartition(".")[0] for name in known}
    for key, _ in module.named_parameters():
        inside = any(key.startswith(f"{name}.") for name in known)
        if not inside and key.rpartition(".")[0] not in around and key.partition(".")[0] not in _NEITHER:
            return None  # a weight whose use nobody has looked at
    return halves


def lacking_half(vae: Any) -> str:
    """ "encoder" or "decoder" where the host's VAE has no such half that works, else ""."""
    module = vae.first_stage_model
    try:
        vae.process_input(torch.zeros(1))
    except NotImplementedError:  # how the host says that a light VAE cannot encode
        return "encoder"
    kind = type(module).__name__
    if kind == "ShapeVAE" and not hasattr(module, "pre_kl"):  # which its `encode` calls
        return "encoder"
    if kind == "StageC_coder":  # made whole from a file of one half; what has been trained has counted its batches
        trained = [key for key, value in module.named_buffers() if key.endswith("num_batches_tracked") and value > 0]
        has = [any(key.startswith(name) for key in trained) for name in ("encoder.", "previewer.")]
        return {(True, False): "decoder", (False, True): "encoder"}.get(tuple(has), "")
    return ""


def refuse_missing_half(vae: Any, lacks: str, encoder: str, decoder: str) -> None:
    """BadInput where a dtype is asked for the half that the VAE `lacks`."""
    what = type(vae.first_stage_model).__name__
    if lacks == "encoder" and encoder != DEFAULT:
        raise BadInput(f"The VAE ({what}) can only decode: it has no encoder whose precision could be selected.")
    if lacks == "decoder" and decoder != DEFAULT:
        raise BadInput(f"The VAE ({what}) can only encode: it has no decoder whose precision could be selected.")


def lacking_in_file(keys: Iterable[str], module: torch.nn.Module) -> str:
    """The same, seen from the keys of the file: the host fills up a half that is not in it with anything at all."""
    keys, halves = list(keys), find_halves(module)
    if halves is None:
        return ""
    has = [any(key.startswith(f"{name}.") for key in keys for name in half) for half in halves]
    if has == [False, False]:  # the host renames the keys of such files: Mochi, Stable Cascade C
        first = {key.partition(".")[0] for key in keys}
        has = [bool(first & {"layers", "backbone"}), "blocks" in first]
    return {(True, False): "decoder", (False, True): "encoder"}.get(tuple(has), "")
