"""What the checks of the dataset builder share: models, parts, pictures. Boots the host (in_host.py)."""

import sys
from pathlib import Path

CHECKPOINTS = Path(sys.argv.pop(3))

from in_host import pack  # noqa: E402

# isort: split
import comfy.latent_formats  # noqa: E402
import comfy.model_management  # noqa: E402
import comfy.patcher_extension  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import folder_paths  # noqa: E402
import torch  # noqa: E402

MIN, BROKEN, BROKEN_UNET = "sd15_min_strided.ckpt", "sd15_min_broken.ckpt", "sd15_min_broken_unet.ckpt"
folder_paths.folder_names_and_paths["checkpoints"][0].insert(0, str(CHECKPOINTS))
host_vae, host_clip = pack("nodes.host.vae.host_vae"), pack("nodes.host.clip.host_clip")
base_model = pack("nodes.host.model.base_model")
keys, weights = pack("nodes.host.model.checkpoint_keys"), pack("nodes.host.patching.fingerprint")
building = "nodes.host.dataset"

with torch.inference_mode():
    MODEL, CLIP, VAE, _ = comfy.sd.load_checkpoint_guess_config(str(CHECKPOINTS / MIN))


def picture(width=96, height=64):
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(1))


def state_of(vae):
    module = vae.first_stage_model
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())
    return {k: v.clone() for k, v in module.state_dict().items()}, hooks, vae.vae_dtype, id(module), id(vae.patcher)


def same_state(a, b):
    equal = all(torch.equal(a[0][k], b[0][k]) and a[0][k].dtype == b[0][k].dtype for k in a[0])
    return equal and a[0].keys() == b[0].keys() and a[1:] == b[1:]


def half_vae(factor):
    """The checkpoint's VAE in float16, its first layer enlarged until activations overflow where `factor` is large."""
    state = {k: v.clone() for k, v in VAE.first_stage_model.state_dict().items()}
    state["taesd_encoder.0.weight"] *= factor
    return state, comfy.sd.VAE(sd=state, dtype=torch.float16)


def building_parts():
    """(build_dataset, BuildRequest, DegradeBase, SampleBase, NodeProgress)"""
    sources = pack(f"{building}.sources")
    return (
        pack(f"{building}.build").build_dataset, pack(f"{building}.request").BuildRequest, sources.DegradeBase,
        sources.SampleBase, pack("nodes.host.progress").NodeProgress,
    )  # fmt: skip


def some_pictures(count, width=64, height=64):
    return [torch.rand(count, height, width, 3, generator=torch.Generator().manual_seed(3))]
