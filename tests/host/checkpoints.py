"""Checkpoints shaped like real ones, with random weights, made on the spot in seconds and never committed.

A `.ckpt` keeps the strides of its tensors. So every tensor is a window into one short buffer of random numbers, and the
true SD 1.5 (1067 M parameters) is a few MB on disk; the host's loader copies the windows out like any other tensor.
The names and shapes come from the host's own modules, built on the meta device in a process of their own.

    sd15_min_strided.ckpt       UNet of one level and one block (13.6 M), TAESD as its VAE, CLIP-L; 0.3 s to load
    sd15_min_broken.ckpt        the same without one layer of CLIP: the host only logs it and goes on
    sd15_min_broken_unet.ckpt   the same without one attention layer of the UNet
    sd15_full_strided.ckpt      true SD 1.5: UNet 859.5 M, KL VAE, CLIP-L; 3 s to load, 5 GiB of memory

In a test, the fixture `host` (tests/host/conftest.py) has the first three, and `full_checkpoint` adds the last one.
"""

import hashlib
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

MIN, BROKEN, BROKEN_UNET, FULL = (
    "sd15_min_strided.ckpt",
    "sd15_min_broken.ckpt",
    "sd15_min_broken_unet.ckpt",
    "sd15_full_strided.ckpt",
)
SMALL = (MIN, BROKEN, BROKEN_UNET)

# One layer each: what a truncated merge or a bad pruning script leaves out.
DROPPED = {
    BROKEN: "cond_stage_model.transformer.text_model.encoder.layers.5.",
    BROKEN_UNET: "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_k.",
}


def make_checkpoints(
    host: Path, folder: Path, names: tuple[str, ...] = SMALL, *, cache: Path | None = None
) -> list[Path]:
    """Put the named checkpoints into `folder` and return their paths. `host` is the folder of the host's `main.py`.

    With `cache`, a file that this version of the recipe has already made there is linked instead of made again.
    """
    recipe = hashlib.sha256(Path(__file__).read_bytes() + (host / "comfyui_version.py").read_bytes()).hexdigest()[:12]
    store = (cache / recipe) if cache else folder
    missing = [name for name in names if not (store / name).is_file()]
    if missing:
        store.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(Path(__file__).resolve()), str(host), str(store), *missing]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"The test checkpoints could not be made from the host at {host}:\n{done.stderr[-3000:]}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if store != folder and not (folder / name).exists():
            try:
                os.link(store / name, folder / name)
            except OSError:  # another file system
                shutil.copy2(store / name, folder / name)
    return [folder / name for name in names]


# --------------------------------------------------------------- the part that runs in its own process, beside the host


class Windows:
    """Tensors of any shape as windows into a few short random buffers, one for each power of two of the scale."""

    STEP = 8  # floats between the windows of neighbouring rows: enough for 49,408 token rows in 1.6 MB

    def __init__(self, length: int, seed: int = 0):
        import torch

        self.torch = torch
        noise = torch.randn(length, generator=torch.Generator().manual_seed(seed))
        self.noise = {power: noise * 2.0**-power for power in range(9)}
        self.constant = {value: torch.full((16384,), value) for value in (0.0, 0.5, 1.0)}
        self.offset = 0

    def weight(self, shape, gain: float = 1):
        """Values of standard deviation about gain/sqrt(fan in), so that activations neither die out nor blow up."""
        fan_in = math.prod(shape[1:])
        buffer = self.noise[min(max(round(math.log2(fan_in) / 2 - math.log2(gain)), 0), 8)]
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        strides[0] = self.STEP
        self.offset = (self.offset + 7919) % (len(buffer) - (shape[0] - 1) * self.STEP - fan_in)
        return self.torch.as_strided(buffer, shape, strides, self.offset)

    def fill(self, value: float, shape):
        return self.constant[value][: math.prod(shape)].view(shape)


def build_state_dict(modules: dict, windows: Windows) -> dict:
    """The state dict of `modules` ({key prefix: module on the meta device}): random weights, norms 1, biases 0."""
    state = {}
    for prefix, module in modules.items():
        for name, tensor in module.state_dict().items():
            if tensor.ndim >= 2:
                state[prefix + name] = windows.weight(tuple(tensor.shape))
            else:
                # A matrix has two or more dimensions here, so a `weight` or scale of one or none belongs to a norm.
                is_scale = name.endswith(("weight", "vae_scale"))
                state[prefix + name] = windows.fill(float(is_scale), tuple(tensor.shape))
    # TAESD's last layer gives the picture itself, in 0..1: bring it from almost black to a mid-grey with contrast.
    last = "first_stage_model.taesd_decoder.19."
    if last + "weight" in state:
        state[last + "weight"] = windows.weight(tuple(state[last + "weight"].shape), gain=4)
        state[last + "bias"] = windows.fill(0.5, (3,))
    return state


def host_modules(full: bool) -> dict:
    """UNet, VAE and text encoder of a checkpoint, from the host's own classes on the meta device."""
    import json

    import comfy.cli_args

    comfy.cli_args.args.cpu = True  # before model_management looks for a GPU
    import comfy.clip_model
    import comfy.ops
    import comfy.sd1_clip
    import comfy.taesd.taesd
    import torch
    from comfy.ldm.models.autoencoder import AutoencoderKL
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    shape = (
        {
            "channel_mult": [1, 2, 4, 4],
            "num_res_blocks": [2, 2, 2, 2],
            "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
            "transformer_depth_middle": 1,
            "transformer_depth_output": [1] * 9 + [0] * 3,
        }
        if full
        else {  # -2: no middle block at all, which the host's detection accepts
            "channel_mult": [1],
            "num_res_blocks": [1],
            "transformer_depth": [1],
            "transformer_depth_middle": -2,
            "transformer_depth_output": [1, 1],
        }
    )
    clip_config = json.loads(Path(comfy.sd1_clip.__file__).with_name("sd1_clip_config.json").read_text())
    kl = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128}
    kl |= {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    with torch.device("meta"):
        return {
            "model.diffusion_model.": UNetModel(
                image_size=32,
                in_channels=4,
                out_channels=4,
                model_channels=320,
                context_dim=768,
                num_heads=8,
                use_spatial_transformer=True,
                legacy=False,
                operations=comfy.ops.disable_weight_init,
                **shape,
            ),
            "first_stage_model.": AutoencoderKL(ddconfig=kl, embed_dim=4) if full else comfy.taesd.taesd.TAESD(),
            "cond_stage_model.transformer.": comfy.clip_model.CLIPTextModel(
                clip_config, torch.float32, "meta", comfy.ops.disable_weight_init
            ),
        }


def main(host: str, folder: str, *names: str):
    sys.path.insert(0, host)
    import torch

    for full in (False, True):
        wanted = [name for name in names if (name == FULL) == full]
        if not wanted:
            continue
        # Long enough for the longest tensor: 49,408 token rows, or one row of 2560 x 3 x 3 values.
        state = build_state_dict(host_modules(full), Windows(49408 * Windows.STEP + 65536))
        # Not part of the generated image path, and absent from real SD 1.5 files.
        state.pop("cond_stage_model.transformer.text_projection.weight", None)
        for name in wanted:
            dropped = DROPPED.get(name)
            kept = {key: value for key, value in state.items() if not (dropped and key.startswith(dropped))}
            assert dropped is None or len(kept) < len(state), f"{name}: no key starts with {dropped}"
            partial = Path(folder) / f".{name}.{os.getpid()}.partial"
            torch.save({"state_dict": kept}, partial)
            os.replace(partial, Path(folder) / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
