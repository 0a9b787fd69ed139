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
_REGULARIZER = "DiagonalGaussianRegularizer"


@dataclass(frozen=True)
class Family:
    """How to build one, and something for it to encode and decode (as the host's VAE object takes them)."""

    module: Callable[[], torch.nn.Module]
    pixels: tuple[int, ...]
    latent: tuple[int, ...]
    tiles: dict[str, int] | None  # of decode_tiled, in latent cells; None: the host itself cannot tile it here
    scale: int = 8  # the encoder's tiles are so many times as large
    encodes: bool = True
    halves: tuple[str, str] = ("encoder", "decoder")  # parts whose layers are watched, several by spaces
    metadata: dict[str, str] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)  # of decode, which the host hands on
    needs: str = ""  # a package without which the host cannot run it
    large: bool = False  # gigabytes, and minutes of a busy core: only where it is asked for by name
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
            regularizer_config={"target": f"comfy.ldm.models.autoencoder.{_REGULARIZER}"},
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


def _wan_2_2():
    import comfy.ldm.wan.vae2_2

    return comfy.ldm.wan.vae2_2.WanVAE(
        dim=160, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
        temperal_downsample=[False, True, True],
    )  # fmt: skip


def _hunyuan(kind: str, regularizer: str = _REGULARIZER, **config: Any):
    def build():
        from comfy.ldm.models.autoencoder import AutoencodingEngine

        whole = {"in_channels": 3, "out_channels": 3, "num_res_blocks": 2, **config}
        whole |= {"downsample_match_channel": True, "upsample_match_channel": True}
        return AutoencodingEngine(
            regularizer_config={"target": f"comfy.ldm.models.autoencoder.{regularizer}"},
            encoder_config={"target": f"comfy.ldm.hunyuan_video.{kind}.Encoder", "params": whole},
            decoder_config={"target": f"comfy.ldm.hunyuan_video.{kind}.Decoder", "params": whole},
        )

    return build


_HUNYUAN_IMAGE = {"block_out_channels": [128, 256, 512, 512, 1024, 1024], "ffactor_spatial": 32, "z_channels": 64}
_HUNYUAN_VIDEO = {"block_out_channels": [128, 256, 512, 1024, 1024], "ffactor_spatial": 16, "ffactor_temporal": 4}
_HUNYUAN_VIDEO |= {"z_channels": 32}


def _mochi():
    import comfy.ldm.genmo.vae.model

    return comfy.ldm.genmo.vae.model.VideoVAE()


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


def _stage_c():
    from comfy.ldm.cascade.stage_c_coder import StageC_coder

    return StageC_coder()


def _shape():
    from comfy.ldm.hunyuan3d.vae import ShapeVAE

    return ShapeVAE()


def _ace():
    from comfy.ldm.ace.vae.music_dcae_pipeline import MusicDCAE

    return MusicDCAE(source_sample_rate=44100)


def _mmaudio():
    from comfy.ldm.mmaudio.vae.autoencoder import AudioAutoencoder

    return AudioAutoencoder(mode="16k")


def _oobleck():
    from comfy.ldm.audio.autoencoder import AudioOobleckVAE

    return AudioOobleckVAE()


_FLAT = {"tile_x": 8, "tile_y": 8, "overlap": 2}
_VIDEO = {"tile_x": 4, "tile_y": 4, "overlap": 2}

_FEW = {"tile_x": 2, "tile_y": 2, "overlap": 0}

FAMILIES: dict[str, Family] = {
    "SD and SDXL (AutoencoderKL)": Family(_kl(), (1, 64, 64, 3), (1, 4, 8, 8), _FLAT),
    "Flux 2 (AutoencoderKL, bn)": Family(
        _kl(z_channels=32, batch_norm_latent=True), (1, 64, 64, 3), (1, 128, 4, 4), _FEW, scale=16
    ),
    "HunyuanVideo (AutoencoderKL, 3-D)": Family(
        _kl(z_channels=16, conv3d=True, time_compress=4), (5, 32, 32, 3), (1, 16, 2, 4, 4), _VIDEO
    ),
    "Flux 1 and SD 3 (AutoencodingEngine)": Family(_engine(), (1, 64, 64, 3), (1, 16, 8, 8), _FLAT),
    "SVD (VideoDecoder)": Family(
        _engine("comfy.ldm.modules.temporal_ae.VideoDecoder", z_channels=4, video_kernel_size=[3, 1, 1], alpha=0.0),
        (2, 64, 64, 3), (2, 4, 8, 8), _FLAT,
    ),
    "HunyuanImage 2.1": Family(
        _hunyuan("vae", **_HUNYUAN_IMAGE), (1, 64, 64, 3), (1, 64, 2, 2), _FEW, scale=32
    ),
    "HunyuanVideo 1.5 (vae_refiner)": Family(
        _hunyuan("vae_refiner", "EmptyRegularizer", **_HUNYUAN_VIDEO), (5, 32, 64, 3), (1, 32, 2, 2, 4), _FEW, scale=16,
        large=True,
    ),
    "TAESD": Family(
        _taesd, (1, 64, 64, 3), (1, 4, 8, 8), _FLAT, halves=("taesd_encoder", "taesd_decoder")
    ),
    "TAEHV": Family(_taehv(16), (5, 32, 32, 3), (1, 16, 2, 4, 4), _VIDEO),
    "TAEHV of Wan 2.2": Family(_taehv(48), (5, 32, 32, 3), (1, 48, 2, 4, 4), _VIDEO, encodes=False),
    "TAEHV of HunyuanVideo 1.5": Family(_taehv(32), (5, 32, 32, 3), (1, 32, 2, 2, 4), _FEW, encodes=False),
    "Wan 2.1 and Qwen Image (WanVAE)": Family(_wan, (5, 32, 32, 3), (1, 16, 2, 4, 4), _VIDEO),
    "Wan 2.2 (WanVAE)": Family(_wan_2_2, (5, 32, 64, 3), (1, 48, 2, 2, 4), _FEW, scale=16, large=True),
    "LTXV (VideoVAE)": Family(
        _ltxv, (9, 64, 64, 3), (1, 128, 2, 2, 2), {"tile_x": 2, "tile_y": 2, "overlap": 1}, scale=32,
        metadata={"config": json.dumps({"vae": _LTXV})},
    ),
    "Mochi (VideoVAE)": Family(_mochi, (7, 32, 32, 3), (1, 12, 2, 4, 4), _VIDEO),
    "Cosmos": Family(
        _cosmos, (9, 32, 32, 3), (1, 16, 2, 4, 4), _VIDEO, built_on="cpu", rounds_constants=True,
        no_bf16_encoder='"avg_pool3d_out_frame" not implemented for \'BFloat16\'',
    ),
    "Stable Cascade A (StageA)": Family(
        _stage_a, (1, 32, 32, 3), (1, 4, 8, 8), _FLAT, scale=4, halves=("down_blocks", "up_blocks")
    ),
    "Stable Cascade C (StageC_coder)": Family(
        _stage_c, (1, 64, 64, 3), (1, 16, 4, 4), _FEW, scale=32, halves=("encoder", "previewer")
    ),
    "Stable Audio (Oobleck)": Family(
        _oobleck, (1, 8192, 2), (1, 64, 4), {"tile_x": 4, "tile_y": 4, "overlap": 2}, scale=2048
    ),
    # decode_tiled hands no options on, so it would always be 17 million points
    "Hunyuan3D (ShapeVAE)": Family(
        _shape, (8, 7), (1, 64, 8), None, encodes=False, halves=("encoder", "post_kl transformer geo_decoder"),
        options={"octree_resolution": 7, "enable_pbar": False},
    ),
    # the host tiles its sound as if it were a picture, and fails
    "ACE-Step (MusicDCAE)": Family(
        _ace, (1, 16384, 2), (1, 8, 16, 4), None, halves=("dcae.encoder", "dcae.decoder vocoder"), built_on="cpu",
        needs="torchaudio",
    ),
    "MMAudio (AudioAutoencoder)": Family(
        _mmaudio, (1, 16384, 2), (1, 20, 8), None, halves=("vae.encoder", "vae.decoder vocoder"), built_on="cpu",
        needs="torchaudio", rounds_constants=True,
        no_bf16_encoder="MKL FFT doesn't support tensors of type: BFloat16",
    ),
}  # fmt: skip


def rounded_windows() -> Windows:
    """Random weights that a BF16 VAE can hold, so that the same ones can be had in either dtype."""
    windows = Windows(1 << 20)
    windows.noise = {power: noise.bfloat16().float() for power, noise in windows.noise.items()}
    return windows


def make(name: str, windows: Windows) -> dict[str, torch.Tensor]:
    """The state dict of a family, as its file would hold it."""
    family = FAMILIES[name]
    with torch.device(family.built_on):
        module = family.module()
    state = build_state_dict({"": module}, windows)
    for key, buffer in module.named_buffers(remove_duplicate=False):
        # constants of the class, also those that only old files hold (but MMAudio's filters only come with its file)
        if not buffer.is_meta and not key.endswith("mel_basis"):
            state[key] = buffer.bfloat16().float() if buffer.is_floating_point() else buffer
    # statistics and factors that must not be 0
    ones = ("std", "running_var", "num_batches_tracked")
    state |= {key: torch.ones_like(value) for key, value in state.items() if any(one in key for one in ones)}
    return state | {key: torch.full_like(value, 0.5) for key, value in state.items() if key.endswith("gammas")}
