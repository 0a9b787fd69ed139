"""NaN Guard on a CLIP; guard_in_host.py runs it."""

from guard_probes import LARGE, NAN, REPORT, RERUN, STOP, Logged, poison, same, snapshot, spoil
from in_host import refusal, torch  # noqa: E402  (boots the host)
from precision_nodes import FP16, FP32, guard_clip, guards

# isort: split
import comfy.sd  # noqa: E402
import comfy.sdxl_clip  # noqa: E402
import comfy.supported_models_base  # noqa: E402
from comfy.patcher_extension import PatcherInjection  # noqa: E402

# ----------------------------------------------------------------------------------------------------------------- CLIP

_SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
_OPTIONS = {"clip_l_model_config": _SMALL, "clip_g_model_config": _SMALL}


def text_encoders(dtype=FP16, without=""):
    """The text encoders of SDXL, made small; `without`: one that the file lacks."""
    target = comfy.supported_models_base.ClipTarget(comfy.sdxl_clip.SDXLTokenizer, comfy.sdxl_clip.SDXLClipModel)
    torch.use_deterministic_algorithms(True)  # memory without a value is NaN then, which it may always be
    clip = comfy.sd.CLIP(target, model_options={**_OPTIONS, "dtype": dtype})
    torch.use_deterministic_algorithms(False)
    generator = torch.Generator().manual_seed(5)
    for name, weight in clip.cond_stage_model.named_parameters():
        if not (without and name.startswith(without)):
            norm = "norm" in name and name.endswith("weight")
            weight.copy_((torch.randn(weight.shape, generator=generator) * 0.2 + norm).half())
    return clip


def encoded(clip):
    tokens = clip.tokenize("a (small:1.3) boat")
    result = clip.encode_from_tokens(tokens, return_pooled=True, return_dict=True)
    return result["cond"], result["pooled_output"]


class InFP16:
    """What a node that selects a compute dtype may hang on the host's text encoder."""

    def __init__(self, name):
        self.name = name

    def inject(self, patcher):
        encoder = getattr(patcher.model, self.name).transformer
        self.handle = encoder.register_forward_pre_hook(self.cast, with_kwargs=True)

    def eject(self, patcher):
        self.handle.remove()

    @staticmethod
    def cast(_encoder, args, kwargs):
        return args, {**kwargs, "dtype": FP16, "embeds": kwargs["embeds"].half()}


def clip_poisoned():
    said = {}
    for name in ("clip_l", "clip_g"):
        clip = text_encoders()
        poison(clip.cond_stage_model, f"{name}.transformer.text_model.encoder.layers.1.mlp.fc1.weight")
        said[name] = refusal(lambda: encoded(guard_clip(clip, guards.Guard(STOP))))  # noqa: B023
    said["in fp32 already"] = refusal(lambda: encoded(guard_clip(clip, guards.Guard(RERUN))))
    with Logged() as log:
        cond, pooled = encoded(guard_clip(clip, guards.Guard(REPORT)))
    said["report"] = [log.lines, bool(torch.isnan(cond).any() and torch.isnan(pooled).any())]
    return said


def clip_that_the_file_lacks():
    return refusal(lambda: encoded(guard_clip(text_encoders(without="clip_g"), guards.Guard(STOP))))


def clip_overflow():
    lora = {"clip_l.transformer.text_model.encoder.layers.0.mlp.fc2.bias": ("diff", (torch.full((32,), 0.5),))}
    coarse, fine = text_encoders(), text_encoders(FP32)
    for clip in (coarse, fine):
        spoil(clip.cond_stage_model, "clip_g.transformer.text_model.encoder.layers.0.mlp.fc1.weight", LARGE)
        clip.clip_layer(-2)
    in_fp16 = InFP16("clip_g")
    coarse.patcher.set_injections("fp16", [PatcherInjection(in_fp16.inject, in_fp16.eject)])
    wanted = encoded(fine)
    raw = encoded(coarse)
    before = snapshot(coarse, coarse.cond_stage_model, coarse.patcher)
    guarded = guard_clip(coarse, guards.Guard(RERUN))
    with Logged() as log:
        mended = encoded(guarded)
    stop = refusal(lambda: encoded(guard_clip(coarse, guards.Guard(STOP))))
    encoded(coarse)
    unchanged = before == snapshot(coarse, coarse.cond_stage_model, coarse.patcher)
    patched, fine_patched = guarded.clone(), fine.clone()
    patched.add_patches(lora)
    fine_patched.add_patches(lora)
    wanted_patched = encoded(fine_patched)
    return {
        "raw is finite": all(bool(torch.isfinite(part).all()) for part in raw),
        "stop": stop,
        "log": log.lines,
        "mended": [same(a, b) for a, b in zip(mended, wanted, strict=True)],
        "lora after": [same(a, b) for a, b in zip(encoded(patched), wanted_patched, strict=True)],
        "lora differs": bool((wanted_patched[0] - wanted[0]).abs().max() > 1e-3),
        "source unchanged": unchanged,
    }


def clip_input_is_not_blamed_on_a_layer():
    clip = guard_clip(text_encoders(), guards.Guard(STOP))
    tokens = clip.tokenize("a boat")
    tokens["l"][0][1] = (torch.full((32,), NAN), 1.0)  # a textual inversion
    weights = clip.tokenize("a (boat:1.1)")
    weights["g"][0] = [(token, NAN if weight != 1.0 else weight) for token, weight, *_ in weights["g"][0]]
    return [refusal(lambda: clip.encode_from_tokens(given)) for given in (tokens, weights)]  # noqa: B023
