"""CLIPs of several families with few and narrow layers and random weights, made by the host's own classes.

Only scripts that have booted the host (in_host.py) import this.
"""

from dataclasses import dataclass, field

import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import comfy.text_encoders.flux
import comfy.text_encoders.hunyuan_video
import comfy.text_encoders.lumina2
import comfy.text_encoders.sd3_clip
import torch

_CLIP = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_T5 = {"num_layers": 3, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 512}
_LLM = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
_TOKENS = {"l": 77, "g": 77, "t5xxl": 77, "llama": 24, "gemma2_2b": 24}
# an encoder of CLIP pools at its end token
_LAST = {"l": 49407, "g": 49407, "t5xxl": 1}


@dataclass(frozen=True)
class Family:
    """One of the host's text encoder classes. encoders: the names that the selector must find."""

    model: type
    encoders: tuple[str, ...]
    tokens: tuple[str, ...]
    small: dict = field(default_factory=dict)  # configuration by encoder, in place of the true size


FAMILIES = {
    "SD 1": Family(comfy.sd1_clip.SD1ClipModel, ("clip_l",), ("l",)),
    "SDXL": Family(comfy.sdxl_clip.SDXLClipModel, ("clip_l", "clip_g"), ("l", "g")),
    "SDXL refiner": Family(comfy.sdxl_clip.SDXLRefinerClipModel, ("clip_g",), ("g",)),
    "SD 3": Family(
        comfy.text_encoders.sd3_clip.SD3ClipModel,
        ("clip_l", "clip_g", "t5xxl"),
        ("l", "g", "t5xxl"),
        {"t5xxl": {**_T5, "d_model": 4096}},  # the host joins it with the others at that width
    ),
    "Flux": Family(comfy.text_encoders.flux.FluxClipModel, ("clip_l", "t5xxl"), ("l", "t5xxl")),
    "HunyuanVideo": Family(
        comfy.text_encoders.hunyuan_video.HunyuanVideoClipModel, ("clip_l", "llama"), ("l", "llama")
    ),
    "Lumina 2": Family(comfy.text_encoders.lumina2.LuminaModel, ("gemma2_2b",), ("gemma2_2b",)),
}
_SMALL = {
    "clip_l": _CLIP, "clip_g": _CLIP, "t5xxl": _T5,
    "llama": {**_LLM, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma2_2b": {**_LLM, "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


class _Target:
    params: dict = {}

    def __init__(self, model):
        self.clip = model

    @staticmethod
    def tokenizer(**_more):
        return None


def clip_target(name):
    """What the host's CLIP is made of for this family: its target, and the options for a small one."""
    family = FAMILIES[name]
    small = {**_SMALL, **family.small}
    return _Target(family.model), {f"{encoder}_model_config": small[encoder] for encoder in family.encoders}


def host_clip(name, state=None, dtype=None):
    """What the host's loader makes of a file that holds `state`; `dtype`: as its flag for that dtype would."""
    target, options = clip_target(name)
    if dtype is not None:
        options["dtype"] = dtype
    clip = comfy.sd.CLIP(target, model_options=options)
    clip.load_sd({k: v.clone() for k, v in (state or file_of(name)).items()}, full_model=True)
    return clip


def file_of(name):
    """Random weights that FP32, BF16 and FP16 can all hold, so that the same ones can be had in each."""
    if name not in _FILES:
        _FILES[name] = {}  # while the host's classes are asked for names and shapes
        shapes = host_clip(name).cond_stage_model.state_dict()
        torch.manual_seed(0)
        for key, value in shapes.items():
            if value.ndim >= 2:
                weight = torch.randn(value.shape) / value.shape[-1] ** 0.5
            else:
                weight = torch.full(value.shape, 0.0 if key.endswith("bias") or "gemma" in name else 1.0)
            _FILES[name][key] = weight.half().bfloat16().float()
    return _FILES[name]


_FILES: dict[str, dict] = {}


def tokens_of(name):
    generator = torch.Generator().manual_seed(1)
    made = {}
    for key in FAMILIES[name].tokens:
        drawn = torch.randint(3, 500, (_TOKENS[key] - 1,), generator=generator).tolist()
        made[key] = [[(token, 1.0) for token in [*drawn, _LAST.get(key, 7)]]]
    return made
