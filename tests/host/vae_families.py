"""VAEs of every family that the host's own classes build small enough for a test, with random weights.

The host knows a VAE by its keys and shapes, and some of those are hard-coded. So the widths are the host's, and the
weights are windows into one short buffer (tests/host/checkpoints.py). Imported by scripts that run beside the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from checkpoints import Windows, build_state_dict

_KL = {"double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4]}
_KL |= {"num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
_REGULARIZER = {"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"}


@dataclass(frozen=True)
class Family:
    """How to build one, and something for it to encode and decode (as the host's VAE object takes them)."""

    module: Callable[[], torch.nn.Module]
    pixels: tuple[int, ...]
    latent: tuple[int, ...]
    tiles: dict[str, int]  # of decode_tiled, in latent cells; the encoder's are `scale` times as large
    scale: int = 8
    encodes: bool = True
    halves: tuple[str, str] = ("encoder", "decoder")
    metadata: dict[str, str] = field(default_factory=dict)
    built_on: str = "meta"  # some compute constants while they are built
    no_bf16_encoder: str = ""  # what torch says to one on a CPU; the split is then FP32 encoder, BF16 decoder
    rounds_constants: bool = False  # in BF16 the host rounds constants of the class too, not only the file's weights


def _kl(**more: Any) -> Callable[[], torch.nn.Module]:
    def build():
        from comfy.ldm.models.autoencoder import AutoencoderKL

        return AutoencoderKL(ddconfig={**_KL, "z_channels": 4, **more}, embed_dim=more.get("z_channels", 4))

    return build


def _engine(decoder: str = "comfy.ldm.modules.diffusionmodules.model.Decoder", **more: Any):
    def build():
        from comfy.ldm.models.autoencoder import AutoencodingEngine

        config = {**_KL, "z_channels": 16, **more}
        plain = {k: v for k, v in config.items() if k not in ("video_kernel_size", "alpha")}
        return AutoencodingEngine(
            regularizer_config=_REGULARIZER,
            encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": plain},
            decoder_config={"target": decoder, "params": config},
        )

    return build


def _taesd():
    import comfy.taesd.taesd

    return comfy.taesd.taesd.TAESD()


def _taehv(channels: int):
    def build():
        import comfy.taesd.taehv

        return comfy.taesd.taehv.TAEHV(latent_channels=channels)

    return build


def _wan():
    import comfy.ldm.wan.vae

    return comfy.ldm.wan.vae.WanVAE(
        dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True],
    )  # fmt: skip


_LTXV = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
    "blocks": [["res_x", 1], ["compress_all", 1], ["res_x_y", 1], ["compress_all", 1], ["compress_all", 1],
               ["res_x", 1]],
    "scaling_factor": 1.0, "norm_layer": "pixel_norm", "patch_size": 4, "latent_log_var": "uniform",
    "use_quant_conv": False, "causal_decoder": False,
}  # fmt: skip


def _ltxv():
    import comfy.ldm.lightricks.vae.causal_video_autoencoder as ltxv

    return ltxv.VideoVAE(config=_LTXV)


def _cosmos():
    import comfy.ldm.cosmos.vae

    return comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer(
        z_channels=16, latent_channels=16, z_factor=1, resolution=1024, in_channels=3, out_channels=3, channels=128,
        channels_mult=[2, 4, 4], num_res_blocks=2, attn_resolutions=[32], dropout=0.0, patch_size=4, num_groups=1,
        temporal_compression=8, spacial_compression=8,
    )  # fmt: skip


def _stage_a():
    from comfy.ldm.cascade.stage_a import StageA

    return StageA()


def _oobleck():
    from comfy.ldm.audio.autoencoder import AudioOobleckVAE

    return AudioOobleckVAE()


_FLAT = {"tile_x": 8, "tile_y": 8, "overlap": 2}
_VIDEO = {"tile_x": 4, "tile_y": 4, "overlap": 2}

FAMILIES: dict[str, Family] = {
    "SD and SDXL (AutoencoderKL)": Family(_kl(), (1, 64, 64, 3), (1, 4, 8, 8), _FLAT),
    "Flux 1 and SD 3 (AutoencodingEngine)": Family(_engine(), (1, 64, 64, 3), (1, 16, 8, 8), _FLAT),
    "TAESD": Family(
        _taesd, (1, 64, 64, 3), (1, 4, 8, 8), _FLAT, halves=("taesd_encoder", "taesd_decoder")
    ),
    "TAEHV": Family(_taehv(16), (5, 32, 32, 3), (1, 16, 2, 4, 4), _VIDEO),
    "TAEHV of Wan 2.2": Family(_taehv(48), (5, 32, 32, 3), (1, 48, 2, 4, 4), _VIDEO, encodes=False),
    "Wan 2.1 and Qwen Image (WanVAE)": Family(_wan, (5, 32, 32, 3), (1, 16, 2, 4, 4), _VIDEO),
    "LTXV (VideoVAE)": Family(
        _ltxv, (9, 64, 64, 3), (1, 128, 2, 2, 2), {"tile_x": 2, "tile_y": 2, "overlap": 1}, scale=32,
        metadata={"config": json.dumps({"vae": _LTXV})},
    ),
    "Cosmos": Family(
        _cosmos, (9, 32, 32, 3), (1, 16, 2, 4, 4), _VIDEO, built_on="cpu", rounds_constants=True,
        no_bf16_encoder='"avg_pool3d_out_frame" not implemented for \'BFloat16\'',
    ),
    "Stable Cascade A (StageA)": Family(
        _stage_a, (1, 32, 32, 3), (1, 4, 8, 8), _FLAT, scale=4, halves=("down_blocks", "up_blocks")
    ),
    "Stable Audio (Oobleck)": Family(
        _oobleck, (1, 8192, 2), (1, 64, 4), {"tile_x": 4, "tile_y": 4, "overlap": 2}, scale=2048
    ),
}  # fmt: skip


def make(name: str, windows: Windows) -> dict[str, torch.Tensor]:
    """The state dict of a family, as its file would hold it."""
    family = FAMILIES[name]
    with torch.device(family.built_on):
        module = family.module()
    state = build_state_dict({"": module}, windows)
    # buffers: constants of the class (also those that only old files hold), else statistics that must not be 0
    buffers = module.named_buffers(remove_duplicate=False)
    state |= {key: buffer for key, buffer in buffers if not buffer.is_meta}
    state |= {key: torch.ones_like(value) for key, value in state.items() if "std" in key.rsplit(".", 1)[-1]}
    # to what a bf16 VAE can hold, so that the same weights can be had in either dtype
    return {key: value.bfloat16().float() if value.is_floating_point() else value for key, value in state.items()}
