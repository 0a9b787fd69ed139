"""What the checks of the audit share. Boots the host (in_host.py)."""

import os
from functools import cache
from pathlib import Path

from in_host import comfy, pack, torch  # boots the host

# isort: split
import comfy.model_management  # noqa: E402
import comfy.sd  # noqa: E402
from trained_vae import template_pictures  # noqa: E402

audit = pack("nodes.host.precision.audit").audit_precision
audit_clip = pack("nodes.host.clip.audit").audit_clip
model_part = pack("nodes.host.model.audit")
audit_vae = pack("nodes.host.vae.audit").audit_vae
select = pack("nodes.host.vae.select").select_vae_precision
plans = pack("training.precision.plan")
LOADED_STATE = pack("nodes.host.patching.private_copy").LOADED_STATE
findings = pack("training.precision.assessment").findings
support = pack("training.precision.device").support
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PICTURES = os.environ.get("REF2V_PICTURES")
SMALL_CLIP = {"num_hidden_layers": 2}


def whole(**inputs):
    """The audit with the inputs that a check does not name left empty."""
    empty = dict.fromkeys(("model", "clip", "vae", "image", "positive"))
    wanted = {"prompt": "a red fox", "sigmas": "early, 1.0", "dtypes": "bf16", "seed": 0, "node_id": None}
    return audit(**{**empty, **wanted, **inputs})


def keep(found, name):
    """Write the pictures down where a person asked for them."""
    if PICTURES is None:
        return
    from PIL import Image

    folder = Path(PICTURES)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(found.report)
    for kind, batch in (("chart", found.chart), ("difference", found.differences)):
        for number, picture in enumerate(batch):
            Image.fromarray((picture * 255).round().byte().numpy()).save(folder / f"{name}_{kind}{number}.png")


def picture(side=128):
    """A picture that the trained VAE has not seen, [1, side, side, 3]."""
    return template_pictures(1, side)[0].movedim(0, -1)[None].contiguous()


@cache
def checkpoint(again=0):
    """(MODEL, CLIP): one level of SD 1.5, and its text encoder cut to two layers."""
    options = {"clip_l_model_config": SMALL_CLIP}
    path = os.environ["REF2V_CHECKPOINT"]
    return comfy.sd.load_checkpoint_guess_config(path, output_vae=False, te_model_options=options)[:2]


def snapshot(root, patcher):
    """What an audit must leave alone: weights, dtypes, hooks, attributes of every module, and the patcher; all models
    being unloaded, and without what the host's own loading leaves on a module.
    """
    comfy.model_management.unload_all_models()
    by_loading = {*LOADED_STATE, "comfy_cast_weights", "weight_function", "bias_function"}
    modules = [
        (name, id(layer), sorted(layer.__dict__.keys() - by_loading), len(layer._forward_hooks),
         len(layer._forward_pre_hooks), getattr(layer, "comfy_cast_weights", None))
        for name, layer in root.named_modules()
    ]  # fmt: skip
    weights = [
        (name, id(weight), str(weight.dtype), str(weight.device), weight.double().sum().item(), weight.data_ptr())
        for name, weight in [*root.named_parameters(), *root.named_buffers()]
    ]
    plain = {k: v for k, v in patcher.__dict__.items() if isinstance(v, (int, float, str, dict, list, type(None)))}
    return repr((modules, weights, getattr(root, "manual_cast_dtype", None), sorted(plain.items(), key=str)))


def host_vae(state, dtype=FP32):
    return comfy.sd.VAE(sd={key: value.clone() for key, value in state.items()}, dtype=dtype)
