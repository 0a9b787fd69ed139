"""Refiner files of random weights, and the core's network to compare with. Boots the host (in_host.py)."""

import importlib
from pathlib import Path

from in_host import WORK, pack, torch  # boots the host

nodes_perpneg, nodes_sag = (importlib.import_module(f"comfy_extras.nodes_{name}") for name in ("perpneg", "sag"))
model_module = pack("nodes.host.refiner.model")
flow = pack("training.objectives.residual.flow")
file_module = pack("training.objectives.residual.file")
lora_module = pack("training.objectives.residual.lora")
start_module = pack("training.objectives.residual.start")
trainables = pack("training.objectives.trainables")
LoRAConfig = pack("training.config.train_config").LoRAConfig
unet_module, network = pack("training.objectives.residual.unet"), pack("training.config.network")
SHAPES = {  # every way in which the host's and the core's descriptions of a network differ
    "text, 3 levels": dict(
        latent_channels=4, block_channels=(32, 64, 64), layers_per_block=2, transformer_depth=(1, 2, 1), middle_depth=1,
        heads=(4, 4, 4), context_dim=24,
    ),
    "pixel-small": dict(network.PRESETS["pixel-small"], latent_channels=3),
    "no attention": dict(
        latent_channels=4, block_channels=(32, 64), layers_per_block=1, transformer_depth=(0, 0), middle_depth=0,
        heads=(1, 1), context_dim=8,
    ),
    "no middle attention": dict(
        latent_channels=4, block_channels=(32, 64, 96), layers_per_block=1, transformer_depth=(1, 1, 0), middle_depth=0,
        heads=(4, 4, 4), context_dim=8,
    ),
    "one level": dict(
        latent_channels=4, block_channels=(32,), layers_per_block=1, transformer_depth=(1,), middle_depth=1,
        heads=(2,), context_dim=8,
    ),
    "pooled, head size": dict(  # SDXL in small: depth 0 first, uneven depths, one head size, linear projections
        latent_channels=4, block_channels=(32, 64, 128), layers_per_block=2, transformer_depth=(0, 2, 3),
        middle_depth=3, heads=(1, 2, 4), context_dim=40, linear_projection=True, pooled_dim=20,
    ),
    "16 channels": dict(
        latent_channels=16, block_channels=(32, 64), layers_per_block=1, transformer_depth=(0, 1), middle_depth=1,
        heads=(4, 4), context_dim=16,
    ),
}  # fmt: skip
SIZES = [(64, 64), (85, 97), (33, 50)]
LATENTS = {
    3: {"name": "ChromaRadiance", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1},
    4: {"name": "SD15", "channels": 4, "scale": 0.18215, "shift": 0.0, "downscale": 8},
    16: {
        "name": "measured", "channels": 16, "scale": [0.5 + 0.1 * i for i in range(16)],
        "shift": [0.1 * i - 0.7 for i in range(16)], "downscale": 8,
    },
}  # fmt: skip
S, RMS = 0.1, 0.1


def random_net(config, seed=0):
    """A core network whose every weight matters: build_unet zeroes the last convolution."""
    torch.manual_seed(seed)
    net = unet_module.build_unet(config).requires_grad_(False).eval()
    net.conv_out.weight.normal_(0, 0.05)
    net.conv_out.bias.normal_(0, 0.05)
    return net


def refiner_file(shape="text, 3 levels", *, s=S, name="refiner.safetensors", weights=None, preview=None, **changes):
    """(path, core network, metadata, empty conditioning) of a refiner with random weights."""
    config = network.UNetConfig(**{**SHAPES[shape], **changes})
    net = random_net(config)
    times = flow.sigmas(8 if s else 1).tolist()
    meta = file_module.RefinerMeta(
        unet=config, latent=LATENTS[config.latent_channels], preview=preview, noise_scale=s, residual_rms=RMS,
        c_v=flow.velocity_scale(RMS, s), sigmas=times, context=None, training={},
    )  # fmt: skip
    empty = {"context": torch.randn(7, config.context_dim)}
    if config.pooled_dim:
        empty["pooled"] = torch.randn(config.pooled_dim)
    path = Path(WORK.name) / name
    file_module.save_refiner(path, net.state_dict() if weights is None else weights, empty, meta)
    return path, net, meta, empty


def core_velocity(net, meta, b, context, pooled=None):
    """(x, t) -> v with the core's own network."""
    height, width = (side * meta.latent["downscale"] for side in b.shape[-2:])
    time_ids = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32).expand(b.shape[0], -1)
    context = context.expand(b.shape[0], -1, -1)
    added = {} if pooled is None else {"pooled": pooled.expand(b.shape[0], -1), "time_ids": time_ids}
    return lambda x, t: meta.c_v * unet_module.call_unet(net, x, b, t, context, **added)
