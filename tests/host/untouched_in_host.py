"""Does importing the pack, or working with its models, change the host? See in_host.py for how it is run.

in_host.py imports the pack as soon as it is imported itself, so the host is looked at before that.
"""

import importlib
import sys
import types
from pathlib import Path

NAMES = (
    "comfy.model_management", "comfy.model_patcher", "comfy.ops", "comfy.sd", "comfy.sample", "comfy.samplers",
    "comfy.model_base", "comfy.model_sampling", "comfy.latent_formats", "comfy.utils", "comfy.k_diffusion.sampling",
    "comfy.supported_models_base", "comfy.model_detection", "comfy.patcher_extension",
    "comfy.ldm.modules.diffusionmodules.openaimodel",
)  # fmt: skip


def snapshot() -> dict[str, int]:
    """id of every attribute of the host's modules and of the classes in them."""
    found = {}
    for name in NAMES:
        for key, value in list(vars(sys.modules[name]).items()):
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{attribute}": id(kept) for attribute, kept in list(vars(value).items())}
    return found


def changes(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


argv, here = list(sys.argv), str(Path(__file__).parent)
sys.path.insert(0, sys.argv[1])
sys.argv = ["main.py", "--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
for module_name in NAMES:
    importlib.import_module(module_name)
sys.argv = argv
BEFORE = snapshot()
from in_host import WORK, comfy, pack, sample, torch, write_results  # noqa: E402 (loads the pack)

for module_name in ("nodes", "nodes.refiner", "nodes.dataset", "nodes.base_source"):
    pack(module_name)
IMPORTED = snapshot()


def check_import():
    return {"looked at": len(BEFORE), "changed": changes(BEFORE, IMPORTED)}


def check_work():
    """The same after a refiner was loaded and sampled with."""
    file, unet, flow = (pack(f"training.objectives.residual.{name}") for name in ("file", "unet", "flow"))
    config = unet.UNetConfig(
        latent_channels=4, block_channels=(32,), layers_per_block=1, transformer_depth=(0,), middle_depth=0, heads=(1,),
        context_dim=8,
    )  # fmt: skip
    meta = file.RefinerMeta(
        unet=config, latent={"name": "x", "channels": 4, "scale": 1.0, "shift": 0.0, "downscale": 8}, noise_scale=0.1,
        residual_rms=0.1, c_v=flow.velocity_scale(0.1, 0.1), sigmas=flow.sigmas(8).tolist(), training={},
    )  # fmt: skip
    path = Path(WORK.name) / "tiny.safetensors"
    file.save_refiner(path, unet.build_unet(config).state_dict(), {"context": torch.zeros(1, 8)}, meta)
    model, conditioning = pack("nodes.host.refiner.model").load_refiner_model(path, 1.0)
    sample(model, conditioning, torch.randn(1, 4, 8, 8), steps=2)
    # what the host counts for itself while it works (its numbers, not its functions and classes) is its own affair
    code = (types.FunctionType, type)
    return {"changed": [name for name in changes(BEFORE, snapshot()) if isinstance(_at(name), code)]}


def check_precision():
    """Every attribute of the four modules that precision goes through, after VAEs in chosen dtypes have worked."""
    import comfy.sd
    from vae_families import make, rounded_windows

    select = pack("nodes.host.vae.select").select_vae_precision
    pixels, latent = torch.rand(1, 64, 64, 3), torch.randn(1, 4, 8, 8)
    vae = comfy.sd.VAE(sd=make("TAESD", rounded_windows()), dtype=torch.float32)
    vae.decode(latent)  # what the host counts for itself from its first model on
    before = snapshot()
    for halves in (("bf16", "fp32"), ("fp16", "auto"), ("bf16", "bf16"), ("default", "default")):
        chosen = select(select(vae, "fp16", "fp16").vae, *halves).vae
        chosen.encode(pixels), chosen.encode_tiled(pixels, tile_x=64, tile_y=64, overlap=16)
        chosen.decode(latent), chosen.decode_tiled(latent, tile_x=8, tile_y=8, overlap=2)
    watched = tuple(f"comfy.{name}." for name in ("model_management", "model_patcher", "ops", "sd"))
    python = ".__slotnames__"  # Python's own note on a class, the first time that anything copies an object of it
    changed = [name for name in changes(before, snapshot()) if name.startswith(watched) and not name.endswith(python)]
    return {"changed": changed}


def _at(name: str):
    """What is now under a dotted name of the snapshot, None where it is gone."""
    module = max((candidate for candidate in NAMES if name.startswith(f"{candidate}.")), key=len)
    value = sys.modules[module]
    for part in name[len(module) + 1 :].split("."):
        value = vars(value).get(part) if value is not None else None
    return value


if __name__ == "__main__":
    write_results({"import": check_import, "work": check_work, "precision": check_precision})
