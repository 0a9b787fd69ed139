"""A refiner file as a MODEL of the host: the same network under the host's names, in the host's memory management.

The core trains diffusers' UNet2DConditionModel; the host runs its own UNetModel. Both hold the same network: the map
of names is the host's (`comfy.utils.unet_to_diffusers`), and a test holds both to the same output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models_base
import comfy.utils
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import Timestep
from torch import Tensor

from ....training.config.network import TIME_ID_DIM, UNetConfig
from ....training.errors import BadInput
from ....training.objectives.residual.file import RefinerMeta, load_refiner
from ..loaded_files import version_of
from ..patching.private_copy import is_dynamic
from .choice import LOADED
from .sampling import RefinerRun, ResidualFlowSampling

__all__ = ["add_base", "build_patcher", "load_refiner_model", "meta_of", "own_sigmas"]

_WRAPPER = "ref2v_refiner"
_SD15_WIDTH = 320  # the host's memory factor 1.0 was fitted on networks this wide at full latent resolution


class RefinerLatent(comfy.latent_formats.LatentFormat):
    """The latent space that the refiner was trained in: model space = (raw - shift) * scale, per channel or for all.

    Previews: the host's own factors where the file names one of the host's latent formats, else the map that was
    fitted to the training pictures.
    """

    def __init__(self, latent: dict[str, Any], preview: dict[str, Any] | None) -> None:
        self.latent_channels = latent["channels"]
        self.spacial_downscale_ratio = latent["downscale"]  # [sic], read by newer hosts
        self.scale = _per_channel(latent["scale"])
        self.shift = _per_channel(latent["shift"])
        known = getattr(comfy.latent_formats, str(latent["name"]), None)
        if isinstance(known, type) and issubclass(known, comfy.latent_formats.LatentFormat):
            known = known()
            if known.latent_channels == self.latent_channels and known.latent_dimensions == 2:
                self.latent_rgb_factors = known.latent_rgb_factors
                self.latent_rgb_factors_bias = known.latent_rgb_factors_bias
                self.latent_rgb_factors_reshape = getattr(known, "latent_rgb_factors_reshape", None)
                self.taesd_decoder_name = known.taesd_decoder_name
        if self.latent_rgb_factors is None and preview is not None:
            self.latent_rgb_factors = preview["weight"]
            self.latent_rgb_factors_bias = preview["bias"]
        elif self.latent_rgb_factors is None and self.latent_channels == 3 and latent["downscale"] == 1:
            self.latent_rgb_factors = torch.eye(3).tolist()  # pixel space: the latent is the picture

    def process_in(self, latent: Tensor) -> Tensor:
        return (latent - self.shift.to(latent)) * self.scale.to(latent)

    def process_out(self, latent: Tensor) -> Tensor:
        return latent / self.scale.to(latent) + self.shift.to(latent)


def _per_channel(value: float | list[float]) -> Tensor:
    """[1, C or 1, 1, 1]"""
    return torch.tensor(value, dtype=torch.float32).reshape(1, -1, 1, 1)


def host_unet_config(config: UNetConfig) -> dict[str, Any]:
    """The host's keyword arguments for the network that `training/objectives/residual/unet.py` builds of `config`."""
    layers, depths = config.layers_per_block, config.transformer_depth
    attended = [(h, w // h) for w, h, d in zip(config.block_channels, config.heads, depths, strict=True) if d]
    if config.middle_depth:
        attended.append((config.heads[-1], config.block_channels[-1] // config.heads[-1]))
    heads, head_channels = attended[0] if attended else (1, -1)
    same_heads = all(h == heads for h, _ in attended)
    added = {"num_classes": "sequential", "adm_in_channels": config.adm_dim} if config.pooled_dim else {}
    return {
        "image_size": 32,  # not read
        "in_channels": 2 * config.latent_channels,
        "out_channels": config.latent_channels,
        "model_channels": config.block_channels[0],
        "channel_mult": [width // config.block_channels[0] for width in config.block_channels],
        "num_res_blocks": [layers] * len(depths),
        "transformer_depth": [depth for depth in depths for _ in range(layers)],
        # one entry more per level than on the way down; the host takes them from the end, deepest level first
        "transformer_depth_output": [depth for depth in depths for _ in range(layers + 1)],
        # -1: one residual block and no attention, as diffusers' UNetMidBlock2D; 0 would be an attention without blocks
        "transformer_depth_middle": config.middle_depth or -1,
        "context_dim": config.context_dim,
        "use_spatial_transformer": True,
        "use_linear_in_transformer": config.linear_projection,
        "num_heads": heads if same_heads else -1,
        "num_head_channels": -1 if same_heads else head_channels,
        "legacy": False,
        **added,
    }


class RefinerModelConfig(comfy.supported_models_base.BASE):
    """What the host wants to know of a model before it builds it."""

    unet_extra_config: dict[str, Any] = {}  # the base class would force heads 64 wide, with no key missing
    # bfloat16 first: the weights were trained in it or in float32, and float16 may overflow to a black picture
    supported_inference_dtypes = [torch.bfloat16, torch.float16, torch.float32]

    def __init__(self, meta: RefinerMeta) -> None:
        super().__init__(host_unet_config(meta.unet))
        self.latent_format = RefinerLatent(meta.latent, meta.preview)
        self.memory_usage_factor = meta.unet.block_channels[0] / _SD15_WIDTH


class Refiner(comfy.model_base.BaseModel):
    """The host's model around the refiner UNet: concatenates b, embeds size and pooled text, samples residual flow."""

    def __init__(self, config: RefinerModelConfig, meta: RefinerMeta) -> None:
        super().__init__(config, comfy.model_base.ModelType.FLOW)
        self.refiner_meta = meta
        self.empty_conditioning: dict[str, Tensor] = {}  # the file's own: "context", and "pooled" where it has that
        # the host takes concat_latent_image of the conditioning, else latent_image: the base latent
        self.concat_keys = ("concat_image",)
        self.model_sampling = ResidualFlowSampling(config, meta.noise_scale, meta.c_v)
        self.embedder = Timestep(TIME_ID_DIM)

    def encode_adm(self, **kwargs: Any) -> Tensor | None:
        """[1 or B, P + 6*256]: pooled text and (height, width, 0, 0, height, width) in pixels, as in training."""
        pooled_dim = self.refiner_meta.unet.pooled_dim
        if not pooled_dim:
            return None
        pooled = kwargs.get("pooled_output")
        if pooled is None:
            pooled = torch.zeros(1, pooled_dim)
        height, width = (side * self.refiner_meta.latent["downscale"] for side in kwargs["noise"].shape[-2:])
        sizes = torch.tensor([height, width, 0, 0, height, width], dtype=torch.float32)
        sizes = self.embedder(sizes).flatten().to(pooled.device)
        return torch.cat([pooled.float(), sizes.expand(pooled.shape[0], -1)], dim=1)


def build_patcher(path: Path, disable_dynamic: bool = False) -> Any:
    """A refiner file's network under the host's memory management, in the precision that the host chooses for this
    machine. Newer hosts call this again when they need a copy that stays put.
    """
    weights, empty, meta = load_refiner(path)
    config = RefinerModelConfig(meta)
    management = comfy.model_management
    load_device, offload_device = management.get_torch_device(), management.unet_offload_device()
    supported = config.supported_inference_dtypes
    parameters = sum(weight.numel() for weight in weights.values())
    dtype = management.unet_dtype(model_params=parameters, supported_dtypes=supported)
    config.set_inference_dtype(dtype, management.unet_manual_cast(dtype, load_device, supported))

    model = Refiner(config, meta)
    model.empty_conditioning = {name: tensor.clone() for name, tensor in empty.items()}  # read as windows into the file
    patcher_class = comfy.model_patcher.ModelPatcher
    if not disable_dynamic:
        patcher_class = getattr(comfy.model_patcher, "CoreModelPatcher", patcher_class)
    patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
    if not management.is_device_cpu(offload_device):
        model.to(offload_device)
    _load_weights(model, weights, path, assign=is_dynamic(patcher))
    patcher.cached_patcher_init = (build_patcher, (path,))
    return patcher


def _load_weights(model: Refiner, weights: dict[str, Tensor], path: Path, assign: bool) -> None:
    """diffusers names -> host names -> the network; BadInput unless both hold exactly the same."""
    names = comfy.utils.unet_to_diffusers(model.model_config.unet_config)
    unknown = sorted(set(weights) - set(names))
    renamed = {names[name]: weight for name, weight in weights.items() if name in names}
    shapes = {name: weight.shape for name, weight in model.diffusion_model.state_dict().items()}
    other = [name for name, weight in renamed.items() if shapes.get(name, weight.shape) != weight.shape]
    if other:
        raise BadInput(
            f"{path.name}: its weights do not have the shapes that its metadata says ({len(other)} differ; the first, "
            f"{other[0]}, is {list(renamed[other[0]].shape)} instead of {list(shapes[other[0]])})."
        )
    missing, unexpected = model.diffusion_model.load_state_dict(renamed, strict=False, assign=assign)
    if missing or unexpected or unknown:
        example = [*missing, *unexpected, *unknown][0]
        raise BadInput(
            f"{path.name}: its weights are not those of the network that its metadata says ({len(missing)} missing, "
            f"{len(unexpected) + len(unknown)} too many, the first one {example})."
        )


def _patcher_of(path: Path) -> Any:
    """The patcher of a file, without anything of other nodes; read once for all MODELs of it that live at one time."""
    version = version_of(path) if path.is_file() else None
    patcher = None if version is None else LOADED.find(version)
    if patcher is None:
        patcher = build_patcher(path)
        if version is not None and version == version_of(path):  # not written anew while it was read
            LOADED.add(version, patcher)
    return patcher


def load_refiner_model(path: Path, strength: float) -> tuple[Any, list[Any]]:
    """A refiner file as (MODEL, the run's own empty CONDITIONING), ready for the plain KSampler.

    `strength` in 0..1 blends base and refined latent at the end of a run. BadInput names what is wrong with the file.
    """
    if not 0.0 <= strength <= 1.0:
        raise BadInput(f"strength must lie between 0 (the base's picture) and 1 (the refined one), got {strength}.")
    patcher = _patcher_of(path).clone()
    run, empty = RefinerRun(patcher.model.refiner_meta, float(strength)), patcher.model.empty_conditioning
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, _WRAPPER, run)
    extra = {"pooled_output": empty["pooled"].reshape(1, -1)} if "pooled" in empty else {}
    return patcher, [[empty["context"][None], extra]]


def meta_of(model: Any) -> RefinerMeta:
    """What the file of a refiner MODEL says; BadInput for any other MODEL."""
    inner = getattr(model, "model", None)
    if not isinstance(inner, Refiner):
        got = type(model if inner is None else inner).__name__
        raise BadInput(f"This needs the MODEL of Load Refiner, but got another model ({got}).")
    return inner.refiner_meta


def own_sigmas(model: Any) -> Tensor:
    """The sampling times that the refiner was trained with, the final 0 included. [steps + 1], float32"""
    return torch.tensor(meta_of(model).sigmas, dtype=torch.float32)


def add_base(conditioning: list[Any], base: dict[str, Any]) -> list[Any]:
    """The conditioning with the base's LATENT in it, for runs whose latent_image is not the base (split runs)."""
    samples = base["samples"]
    return [[context, {**extra, "concat_latent_image": samples}] for context, extra in conditioning]
