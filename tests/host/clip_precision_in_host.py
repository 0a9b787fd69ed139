"""CLIPs of several families with a dtype for each encoder; tests/host/test_clip_precision.py reads the results.

See in_host.py for how it is run.
"""

import gc
import weakref

from in_host import error, pack, refusal, torch, write_results  # boots the host
from precision_nodes import LOADED_STATE, LayerWatch
from torch.nn import Linear

# isort: split
import comfy.hooks  # noqa: E402
from clip_families import FAMILIES, host_clip, tokens_of  # noqa: E402

select = pack("nodes.host.clip.select").select_clip_precision
fingerprint = pack("nodes.host.clip.host_clip").clip_fingerprint
DTYPES = pack("training.precision.dtypes").DTYPES
STORAGE = [(storage, "default") for storage in DTYPES]
COMPUTE = [(storage, compute) for compute in ("bf16", "fp16") for storage in ("default", "fp8_e4m3fn")]


def conditioning(clip, name):
    """[context, pooled or nothing] as CLIPTextEncode gives them."""
    context, extra = clip.encode_from_tokens_scheduled(tokens_of(name))[0]
    return [tensor for tensor in (context, extra.get("pooled_output")) if tensor is not None]


def equal(ones, others):
    same = all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))
    return bool(same and ones[0].std() > 0)


def snapshot(clip):
    """Everything about a CLIP that a selector must leave alone; what an encode resets is not part of it."""
    root = clip.cond_stage_model
    layers = [
        (name, id(layer), sorted(layer.__dict__), len(layer._forward_hooks), len(layer._forward_pre_hooks))
        for name, layer in root.named_modules()
    ]
    weights = [
        (name, id(weight), weight.dtype, str(weight.device), weight.double().sum().item(), weight.data_ptr())
        for name, weight in [*root.named_parameters(), *root.named_buffers()]
    ]
    booked = [(name, str(root.__dict__[name])) for name in LOADED_STATE if name in root.__dict__]
    patcher = [(name, str(value)) for name, value in sorted(clip.patcher.__dict__.items())]
    return repr((layers, weights, booked, patcher, [(k, id(v)) for k, v in sorted(clip.__dict__.items())]))


class Layers(LayerWatch):
    """Within the block, `seen` gathers, by encoder, the dtypes of the matrices kept and of what the layers are fed."""

    def __init__(self, clip):
        self.seen, self._encoder = {}, {}
        for encoder, part in clip.cond_stage_model.named_children():
            self.seen[encoder] = {"kept": set(), "fed": set()}
            for layer in part.transformer.modules():
                if torch.is_tensor(getattr(layer, "weight", None)):
                    self._encoder[layer] = encoder

    def _look(self, layer, args):
        if layer in self._encoder and args[0].is_floating_point():
            seen = self.seen[self._encoder[layer]]
            seen["fed"].add(str(args[0].dtype))
            if layer.weight.ndim > 1:
                seen["kept"].add(str(layer.weight.dtype))

    def dtypes(self):
        return {encoder: {what: sorted(d) for what, d in seen.items()} for encoder, seen in self.seen.items()}


def family(name):
    source = host_clip(name)
    wanted = conditioning(source, name)
    before = snapshot(source)
    found = {"table": {}, "layers": {}, "finite": {}, "out": set()}
    for storage, compute in STORAGE + COMPUTE:
        clip = select(source, "all", storage, compute).clip
        with Layers(clip) as layers:
            got = conditioning(clip, name)
        key = f"{storage} storage, {compute} compute"
        found["layers"][key] = layers.dtypes()
        found["finite"][key] = bool(all(torch.isfinite(tensor).all() for tensor in got))
        found["table"][key] = error(got[0], wanted[0])
        found["out"].add(str(got[0].dtype))
    found["out"] = sorted(found["out"])
    for dtype in ("bf16", "fp32"):
        host = host_clip(name, dtype=DTYPES[dtype])
        clip = select(source, "all", dtype).clip
        found[f"{dtype} storage is the host's"] = equal(conditioning(clip, name), conditioning(host, name))
    chained = select(select(source, "all", "fp8_e4m3fn", "bf16").clip, "all", "bf16", "fp16").clip
    found["default gives the source"] = select(chained).clip is source
    found["default is bit-equal"] = equal(conditioning(select(chained).clip, name), wanted)
    found["source unchanged"] = snapshot(source) == before
    found["report"] = select(source, "all", "fp32", "fp16").report
    return found


def memory(clip):
    """Where its weights lie."""
    return {weight.untyped_storage().data_ptr() for weight in clip.cond_stage_model.parameters()}


def each_encoder_on_its_own():
    """A chain chooses for one encoder after the other."""
    name = "SD 3"
    source = host_clip(name)
    straight = conditioning(source, name)
    light = select(source, "t5xxl", "fp8_e4m3fn")
    both = select(light.clip, "clip_l", "fp32", "bf16")
    with Layers(both.clip) as layers:
        mixed = conditioning(both.clip, name)
    parameters = dict(source.cond_stage_model.named_parameters())
    back = select(both.clip, "t5xxl").clip
    only = select(source, "clip_l", "fp32", "bf16").clip
    compute = select(source, "clip_l", "default", "bf16").clip
    lacks = select(source, "llama", "bf16")
    return {
        "layers": layers.dtypes(),
        "report": both.report,
        "memory of its own": memory(both.clip).isdisjoint(memory(source) | memory(light.clip)),
        "t5xxl back": equal(conditioning(back, name), conditioning(only, name)),
        "differs": error(mixed[0], straight[0]),
        "compute alone copies nothing": all(p is parameters[k]
                                            for k, p in compute.cond_stage_model.named_parameters())
        and compute.patcher.model is source.cond_stage_model,
        "lacks": [lacks.report, lacks.clip is source],
        "source again": equal(conditioning(source, name), straight),
        "fingerprints": len({fingerprint(clip) for clip in (source, light.clip, both.clip, only, compute)}),
    }  # fmt: skip


def with_lora(clip, name="SDXL"):
    """What LoraLoader does, for two weights of each encoder."""
    torch.manual_seed(5)
    state = clip.cond_stage_model.state_dict()
    keys = [key for key in state if key.endswith(("layers.1.mlp.fc1.weight", "layers.0.self_attn.q_proj.weight"))]
    new = clip.clone()
    taken = new.add_patches({key: ("diff", (torch.randn(state[key].shape) * 0.1,)) for key in keys}, 0.7)
    assert len(taken) == len(keys) == 2 * len(FAMILIES[name].encoders), taken
    return new


def lora_before_and_after():
    name = "SDXL"
    source, host = host_clip(name), host_clip(name, dtype=torch.bfloat16)
    straight = conditioning(source, name)
    patched = with_lora(source)
    as_loaded = conditioning(patched, name)  # and it stays loaded: the weights in memory are patched now
    bf16 = conditioning(with_lora(host), name)
    before, after = select(patched, "all", "bf16").clip, with_lora(select(source, "all", "bf16").clip)
    mixed_before = select(patched, "clip_l", "bf16", "bf16").clip
    mixed_after = with_lora(select(source, "clip_l", "bf16", "bf16").clip)
    quick_before, quick_after = (
        select(patched, "all", "default", "bf16").clip,
        with_lora(select(source, "all", "default", "bf16").clip),
    )
    restored = select(after).clip
    found = {
        "source differs": error(as_loaded[0], straight[0]),
        "before": equal(conditioning(before, name), bf16),
        "after": equal(conditioning(after, name), bf16),
        "one encoder": equal(conditioning(mixed_before, name), conditioning(mixed_after, name)),
        "compute": equal(conditioning(quick_before, name), conditioning(quick_after, name)),
        "compute, then a clone": equal(conditioning(quick_after.clone(), name), conditioning(quick_before, name)),
        "default keeps the LoRA": equal(conditioning(restored, name), as_loaded),
        "default gives what came in": select(before).clip is patched and select(quick_before).clip is patched,
        "source again": equal(conditioning(source, name), straight),
        "patched again": equal(conditioning(patched, name), as_loaded),
        "without it again": equal(conditioning(select(source, "all", "bf16").clip, name), conditioning(host, name)),
    }
    skipped = select(source, "all", "bf16").clip.clone()
    skipped.clip_layer(-2)
    again, other = select(skipped, "all", "default", "bf16").clip, source.clone()
    other.clip_layer(-2)
    found["layer is kept"] = [again.layer_idx, select(again).clip.layer_idx]
    found["layer bit-equal"] = equal(conditioning(select(again).clip, name), conditioning(other, name))
    return found


def with_lora_hook(clip, name="SDXL"):
    """What the nodes Create Hook LoRA and Set CLIP Hooks do, for a norm of each encoder."""
    group = comfy.hooks.HookGroup()
    hook = comfy.hooks.WeightHook()
    group.add(hook)
    state = clip.cond_stage_model.state_dict()
    keys = [key for key in state if key.endswith("layers.1.layer_norm1.weight")]
    assert len(keys) == len(FAMILIES[name].encoders)
    hook.weights_clip = {key: ("diff", (torch.full(state[key].shape, 3.0),)) for key in keys}
    hook.need_weight_init = False
    new = clip.clone()
    new.patcher.forced_hooks = group.clone()
    new.patcher.forced_hooks.set_keyframes_on_hooks(None)
    new.patcher.register_all_hook_patches(group, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Clip))
    return new


def a_lora_hook_reaches_its_own_branch_alone():
    """The host puts a hook's LoRA into the weights where they lie; there it stays until the next clone is loaded."""
    name = "SDXL"
    source = host_clip(name)
    straight = conditioning(source, name)
    found = {}
    made = {
        "storage of clip_l": select(source, "clip_l", "bf16").clip,
        "storage of clip_g": select(source, "clip_g", "fp8_e4m3fn").clip,
        "both, a chain": select(select(source, "clip_l", "bf16").clip, "clip_g", "fp32").clip,
        "compute": select(source, "all", "default", "bf16").clip,
    }
    before = {what: conditioning(clip, name) for what, clip in made.items()}
    hooked = with_lora_hook(source)
    wanted = conditioning(hooked, name)  # and the source's weights in memory hold it now
    found["hook works"] = error(wanted[0], straight[0])
    for what, clip in made.items():
        found[f"{what}, hook on the source"] = equal(conditioning(clip, name), before[what])
        conditioning(hooked, name)
    for what, clip in made.items():  # and the other way round
        conditioning(with_lora_hook(clip), name)
        found[f"source, hook on {what}"] = equal(conditioning(source, name), straight)
        for other in made:
            found[f"{other}, hook on {what}"] = equal(conditioning(made[other], name), before[other])
            conditioning(with_lora_hook(clip), name)
    while_hooked = select(hooked, "clip_l", "bf16").clip  # copied while the hook is in the weights
    again = conditioning(select(source, "clip_l", "bf16").clip, name)
    found["copied while hooked"] = equal(again, before["storage of clip_l"])
    found["hook moves along"] = error(conditioning(while_hooked, name)[0], wanted[0])
    return found


def copies_are_shared_weakly():
    source = host_clip("Flux")
    first, again, other = (select(source, "t5xxl", dtype).clip for dtype in ("bf16", "bf16", "fp8_e5m2"))
    quick = select(source, "t5xxl", "bf16", "bf16").clip
    homes = [clip.patcher.model for clip in (first, again, other, quick)]
    same = [homes[0] is home for home in homes]
    gone, kept = weakref.ref(homes[0]), weakref.ref(source)
    del first, again, quick, homes
    gc.collect()
    forgotten = gone() is None
    del other, source
    gc.collect()
    return {"same": same, "forgotten": forgotten, "source forgotten": kept() is None}


def beyond_the_range():
    """A weight that FP8 cannot hold must not become NaN."""
    source = host_clip("Flux")
    source.cond_stage_model.t5xxl.transformer.shared.weight.data[5, 5] = 60000.0
    source.cond_stage_model.t5xxl.transformer.shared.weight.data[6, 5] = -60000.0
    found = {}
    for dtype in ("fp8_e4m3fn", "fp8_e5m2"):
        weight = select(source, "t5xxl", dtype).clip.cond_stage_model.t5xxl.transformer.shared.weight.float()
        found[dtype] = [weight[5, 5].item(), weight[6, 5].item()]
    return found


def what_is_refused():
    class Empty:
        cond_stage_model = None

    class Packed(torch.nn.Parameter):
        def dequantize(self):
            raise AssertionError

    quantized, scaled, unknown = (host_clip("SD 1") for _ in range(3))
    layer = quantized.cond_stage_model.clip_l.transformer.text_projection
    layer.weight = Packed(layer.weight.data, requires_grad=False)
    scaled.cond_stage_model.clip_l.transformer.scaled_fp8 = torch.nn.Parameter(torch.zeros(0), requires_grad=False)
    unknown.cond_stage_model = Linear(2, 2)
    flux = host_clip("Flux")
    return {
        "empty": refusal(lambda: select(Empty(), "all", "bf16")),
        "quantized": select(quantized, "all", "fp32", "bf16").report,
        "quantized computes": str(error(*(conditioning(select(quantized, "all", "default", compute).clip, "SD 1")[0]
                                          for compute in ("bf16", "default")))),
        "scaled": select(scaled, "all", "bf16").report,
        "scaled gives": select(scaled, "all", "bf16").clip is scaled,
        "unknown": refusal(lambda: select(unknown, "all", "bf16")),
        "unknown default": select(unknown).clip is unknown,
        "lacks": select(host_clip("SD 1"), "all", "fp3", "fp8_e5m2").report,
        "auto": select(host_clip("SD 1"), "clip_l", "default", "auto").report,
        "t5 in fp16": select(flux, "t5xxl", "default", "fp16").report,
        "fp8": select(flux, "t5xxl", "fp8_e4m3fn").report,
    }


CHECKS = {name: lambda name=name: family(name) for name in FAMILIES} | {
    check.__name__: check
    for check in (
        each_encoder_on_its_own,
        lora_before_and_after,
        a_lora_hook_reaches_its_own_branch_alone,
        copies_are_shared_weakly,
        beyond_the_range,
        what_is_refused,
    )
}

if __name__ == "__main__":
    write_results(CHECKS)
