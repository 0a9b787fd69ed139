"""Diffusion models of the host, shaped like SD 1.5 and SDXL but with one level or block, and what sampling them needs.

Only scripts that have booted the host (in_host.py) import this.
"""

import comfy.cldm.cldm
import comfy.controlnet
import comfy.ops
import comfy.sd
import torch
from checkpoints import Windows, build_state_dict
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

_SD15 = {
    "channel_mult": [1], "num_res_blocks": [1], "transformer_depth": [1], "transformer_depth_middle": -2,
    "transformer_depth_output": [1, 1], "context_dim": 768, "num_heads": 8,
}  # fmt: skip
_SDXL = {
    "channel_mult": [1, 1, 1], "num_res_blocks": [2, 2, 2], "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_middle": -2, "transformer_depth_output": [0] * 9, "context_dim": 2048, "adm_in_channels": 2816,
    "num_classes": "sequential", "num_head_channels": 64, "use_linear_in_transformer": True,
}  # fmt: skip
CONFIGS = {"SD 1.5": _SD15, "SDXL": _SDXL}
WINDOWS = Windows(1 << 20)


def _config(name):
    return {"image_size": 32, "in_channels": 4, "model_channels": 320, "use_spatial_transformer": True,
            "legacy": False, "operations": comfy.ops.disable_weight_init, **CONFIGS[name]}  # fmt: skip


def file_of(name):
    """A state dict as the host's loader finds it in a file, in FP32."""
    WINDOWS.offset = 0  # the same weights in every process
    with torch.device("meta"):
        network = UNetModel(out_channels=4, **_config(name))
    return build_state_dict({"model.diffusion_model.": network}, WINDOWS)


def host_model(name):
    """What the host's loader makes of it, under the flags that it was started with."""
    return comfy.sd.load_diffusion_model_state_dict(file_of(name))


def scaled_fp8_model():
    """SD 1.5's shape from a file as scaled FP8 ones are: Linear weights of FP8, with a scale beside each."""
    state = file_of("SD 1.5")
    for key in [key for key, weight in state.items() if key.endswith(".weight") and weight.ndim == 2]:
        scale = state[key].abs().amax() / 448
        state[key] = (state[key] / scale).to(torch.float8_e4m3fn)
        state[key.removesuffix("weight") + "scale_weight"] = scale
    state["model.diffusion_model.scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return comfy.sd.load_diffusion_model_state_dict(state)


def with_lora(model):
    """What LoraLoader does, for some weights of attention, of a convolution and of a norm."""
    torch.manual_seed(5)
    state = model.model.state_dict()
    ends = ("attn1.to_q.weight", "attn2.to_v.weight", "in_layers.2.weight", "norm1.bias")
    keys = [next(key for key in state if key.endswith(end)) for end in ends]
    new = model.clone()
    taken = new.add_patches({key: ("diff", (torch.randn(state[key].shape) * 0.05,)) for key in keys}, 0.8)
    assert len(taken) == len(keys), taken
    return new


def control_net():
    """A ControlNet for the SD 1.5 shape, its picture chosen."""
    config = {**_config("SD 1.5"), "hint_channels": 3}
    config.pop("transformer_depth_output")
    with torch.device("meta"):
        shapes = comfy.cldm.cldm.ControlNet(**config)
    network = comfy.cldm.cldm.ControlNet(**config)
    WINDOWS.offset = 0
    network.load_state_dict({key: value.clone() for key, value in build_state_dict({"": shapes}, WINDOWS).items()})
    control = comfy.controlnet.ControlNet(network, load_device=torch.device("cpu"))
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    return control.copy().set_cond_hint(hint, 0.7, (0.0, 1.0))


def conditioning(name, control=None):
    generator = torch.Generator().manual_seed(2)
    extra = {"pooled_output": torch.randn(1, 1280, generator=generator)} if name == "SDXL" else {}
    if control is not None:
        extra |= {"control": control, "control_apply_to_uncond": True}
    return [[torch.randn(1, 77, CONFIGS[name]["context_dim"], generator=generator), extra]]
