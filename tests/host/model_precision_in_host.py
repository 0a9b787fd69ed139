"""MODELs with a dtype to compute and one to be kept in; tests/host/test_model_precision.py reads the results.

See in_host.py for how it is run. Once with the host's own dtypes, and once more under --bf16-unet, where only the host
works (`host_alone`): the two must agree.
"""

import gc
import hashlib
import weakref

from in_host import comfy, error, pack, refusal, sample, torch, write_results  # boots the host

# isort: split
import comfy.ldm.modules.attention  # noqa: E402
import comfy.model_management  # noqa: E402
from newest_host.packed_weights import pack_blocks  # noqa: E402
from precision_nodes import LOADED_STATE, Keep, LayerWatch, model_fingerprint, select_model  # noqa: E402
from unets import CONFIGS, conditioning, control_net, host_model, scaled_fp8_model, with_lora  # noqa: E402

precision = pack("nodes.host.model.select")
select, fingerprint = select_model, model_fingerprint


def latent(model, name, control=None):
    positive = conditioning(name, control)
    negative = [[-positive[0][0], positive[0][1]]]
    size = torch.zeros(1, 4, 8, 8)
    return sample(model, positive, size, steps=2, cfg=2.0, negative=negative)


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def host_alone(name):
    """What the host gives under the flags of this process without us: plain, with LoRA, with ControlNet."""
    model = host_model(name)
    found = {"plain": digest(latent(model, name)), "lora": digest(latent(with_lora(model), name))}
    if name == "SD 1.5":
        found["control"] = digest(latent(model, name, control_net()))
    network = model.model.diffusion_model
    found["dtypes"] = [str(network.dtype), str(next(network.parameters()).dtype), str(model.model.manual_cast_dtype)]
    return found


# what the host sets on a layer each time it loads one
_EACH_LOAD = {"comfy_cast_weights", "weight_function", "bias_function"}


def snapshot(model):
    """Everything about a MODEL that a selector must leave alone, as it is when the host has loaded it last."""
    root = model.model
    layers = [
        (name, id(layer), sorted(layer.__dict__.keys() - _EACH_LOAD), len(layer._forward_hooks),
         len(layer._forward_pre_hooks), [str(getattr(layer, each, None)) for each in sorted(_EACH_LOAD)])
        for name, layer in root.named_modules()
    ]  # fmt: skip
    weights = [
        (name, weight.dtype, str(weight.device), weight.double().sum().item(), weight.data_ptr())
        for name, weight in [*root.named_parameters(), *root.named_buffers()]
    ]
    booked = [(name, str(root.__dict__[name])) for name in LOADED_STATE if name in root.__dict__]
    more = [str(root.manual_cast_dtype), str(root.diffusion_model.dtype), sorted(root.__dict__)]
    patcher = [(name, str(value)) for name, value in sorted(model.__dict__.items())]
    return repr((layers, weights, booked, more, patcher))


class Layers(LayerWatch):
    """Within the block, `seen` gathers, by layer of the diffusion model, the dtypes of its input and of its weight."""

    def __init__(self, model):
        network = model.model.diffusion_model
        self._names = {m: n for n, m in network.named_modules() if torch.is_tensor(getattr(m, "weight", None))}
        self.seen = {name: set() for name in self._names.values()}

    def _look(self, layer, args):
        # runs before a layer's own hooks: what the layer computes in is seen in what it is called with
        if layer in self._names:
            layer._ref2v_test = layer.register_forward_hook(self._fed)

    def _fed(self, layer, args, _output):
        self.seen[self._names[layer]].add((str(args[0].dtype).removeprefix("torch."), str(layer.weight.dtype)[6:]))
        layer._ref2v_test.remove()
        del layer._ref2v_test


def dtypes(model, name):
    """{layer: [dtype of its input, dtype of its weight]} of a run, and the latent."""
    with Layers(model) as layers:
        made = latent(model, name)
    assert all(len(seen) == 1 for seen in layers.seen.values()), layers.seen
    return {layer: list(*seen) for layer, seen in layers.seen.items()}, made


def summary(seen):
    return sorted({tuple(pair) for pair in seen.values()})


def family(name):
    source = host_model(name)
    patched = with_lora(source)
    lora, straight = latent(patched, name), latent(source, name)
    before = snapshot(source)
    found = {"plain": digest(straight), "finite": {}, "error": {}}
    found["lora differs"] = error(lora, straight)

    seen, quick = dtypes(select(source, "bf16").model, name)
    found["compute layers"], found["error"]["bf16 compute"] = summary(seen), error(quick, straight)
    bf16 = select(source, "default", "bf16")
    seen, stored = dtypes(bf16.model, name)
    found["storage layers"], found["storage"] = summary(seen), digest(stored)
    found["report"] = bf16.report
    found["lora before"] = digest(latent(select(patched, "default", "bf16").model, name))
    found["lora after"] = digest(latent(with_lora(bf16.model), name))
    found["lora after, a clone"] = digest(latent(with_lora(bf16.model).clone(), name))
    found["storage again"] = digest(latent(bf16.model, name))
    found["compute, lora before"] = digest(latent(select(patched, "bf16").model, name))
    found["compute, lora after"] = digest(latent(with_lora(select(source, "bf16").model), name))

    for compute, storage in (("fp16", "default"), ("bf16", "fp8_e4m3fn"), ("default", "fp8_e5m2")):
        made = latent(select(source, compute, storage).model, name)
        key = f"{compute} compute, {storage} storage"
        found["finite"][key], found["error"][key] = bool(torch.isfinite(made).all()), error(made, straight)

    chained = select(select(source, "bf16", "fp8_e4m3fn").model, "fp16", "default", Keep(norms=True)).model
    found["default gives the source"] = select(chained).model is source and select(source).model is source
    found["default after a clone"] = digest(latent(select(chained.clone()).model, name))
    found["default keeps the LoRA"] = torch.equal(latent(select(with_lora(chained)).model, name), lora)
    found["default gives the patched one"] = select(select(patched, "bf16", "bf16").model).model is patched
    found["patched again"] = torch.equal(latent(patched, name), lora)
    if name == "SD 1.5":
        control = control_net()
        found["control plain"] = digest(latent(source, name, control))
        found["control storage"] = digest(latent(bf16.model, name, control))
        found["control finite"] = bool(torch.isfinite(latent(select(source, "bf16").model, name, control)).all())
    found["plain again"] = digest(latent(source, name))
    found["source unchanged"] = snapshot(source) == before
    return found


def kept():
    """Which layers see FP32, by what was kept; and that all of it comes off again."""
    name = "SD 1.5"
    source = host_model(name)
    straight = latent(source, name)
    cases = {
        "norms": Keep(norms=True), "embeddings": Keep(embeddings=True), "in_out": Keep(in_out=True),
        "all three": Keep(True, True, True), "layers": Keep(layers="*.attn2, output_blocks.0,\n no_such_layer.*"),
    }  # fmt: skip
    found = {"layers": {}, "report": {}, "finite": {}}
    for what, keep in cases.items():
        selected = select(source, "bf16", "default", keep)
        seen, made = dtypes(selected.model, name)
        found["layers"][what], found["report"][what] = seen, selected.report
        found["finite"][what] = bool(torch.isfinite(made).all()) and made.dtype == torch.float32
    found["layers"]["on a copy"], _ = dtypes(select(source, "bf16", "bf16", Keep(True, True, True)).model, name)
    again = select(source, "bf16", "default", Keep(norms=True)).model
    clone = again.clone().clone()
    found["clone"] = torch.equal(latent(clone, name), latent(again, name))
    hooked = hooks(source)
    # a copy made while hooks are on has none of them
    copy = select(source, "default", "bf16").model
    found["copy is clean"] = hooks(copy) == 0
    latent(again, name)
    del again, clone, copy
    gc.collect()  # dies while it is loaded
    found["hooks"] = [hooked > 0, hooks(source)]
    found["source again"] = torch.equal(latent(source, name), straight)
    found["fp32 already"] = select(source, "fp32", "default", Keep(True, layers="*.attn1")).report
    return found


def kept_of_sdxl():
    name = "SDXL"
    layers, _ = dtypes(select(host_model(name), "bf16", "default", Keep(True, True, True)).model, name)
    return {"layers": {"all three": layers}}


def hooks(model):
    return sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in model.model.modules())


def attention_softmax():
    name = "SD 1.5"
    source = host_model(name)
    seen = []

    def spy(attention, *args, **kwargs):
        seen.append(str(kwargs.get("attn_precision")))
        return attention(*args, **kwargs)

    plain = latent(select(source, "bf16").model, name)
    selected = select(source, "bf16", "default", Keep(attention_softmax=True))
    made = latent(selected.model, name)
    watched = source.clone()
    watched.model_options["transformer_options"]["optimized_attention_override"] = spy
    both = select(watched, "bf16", "default", Keep(attention_softmax=True)).model
    same = torch.equal(latent(both, name), made)
    precisions, seen[:] = sorted(set(seen)), []
    restored = select(both.clone()).model
    latent(restored, name)
    fused, module = {}, comfy.ldm.modules.attention
    chosen = module.optimized_attention
    try:
        module.optimized_attention = module.attention_pytorch
        fused["report"] = select(source, "bf16", "default", Keep(attention_softmax=True)).report
    finally:
        module.optimized_attention = chosen
    return {
        "attention": chosen.__name__, "report": selected.report, "differs": error(made, plain), "same": same,
        "seen": precisions, "seen restored": sorted(set(seen)), "fused": fused["report"],
        "fp32": select(source, "default", "default", Keep(attention_softmax=True)).report,
    }  # fmt: skip


def copies_are_shared_weakly():
    source = host_model("SD 1.5")
    first, again, other = (select(source, "default", dtype).model for dtype in ("bf16", "bf16", "fp8_e5m2"))
    quick = select(source, "bf16", "bf16").model
    models = [model.model for model in (first, again, other, quick)]
    same = [models[0] is model for model in models]
    own = {name for name, child in source.model.named_children() if child is not getattr(models[0], name)}
    gone, kept_source = weakref.ref(models[0]), weakref.ref(source)
    prints = len({fingerprint(model) for model in (source, first, quick, select(source, "bf16").model, other)})
    del first, again, quick, models
    gc.collect()
    forgotten = gone() is None
    del other, source
    gc.collect()
    return {"same": same, "own": sorted(own), "forgotten": forgotten, "source forgotten": kept_source() is None,
            "fingerprints": prints}  # fmt: skip


def what_other_nodes_put_on_it():
    """An object patch of another node moves along to a copy, and does not stay in the copy's own model."""
    name = "SD 1.5"
    source = host_model(name)
    patched = source.clone()
    patched.add_object_patch("model_sampling", source.get_model_object("model_sampling").__class__())
    patched.get_model_object("model_sampling").set_sigmas(source.get_model_object("model_sampling").sigmas * 0.5)
    latent(patched, name)  # and it is loaded
    plain = digest(latent(select(source, "default", "bf16").model, name))
    latent(patched, name)
    copy = select(patched, "default", "bf16").model
    return {
        "plain": plain,
        "again": digest(latent(select(source, "default", "bf16").model, name)),
        "moved": digest(latent(copy, name)),
        "sigma": copy.get_model_object("model_sampling").sigma_max.item()
        / source.get_model_object("model_sampling").sigma_max.item(),
    }


def quantized_weights_compute_in_any_dtype():
    """A real file of scaled FP8 weights, as the host's loader reads it."""
    name = "SD 1.5"
    source = scaled_fp8_model()
    straight = latent(source, name)
    before = snapshot(source)
    found = {"error": {}, "fed": {}}
    for compute in ("fp32", "bf16", "fp16"):
        seen, made = dtypes(select(source, compute).model, name)
        found["fed"][compute] = sorted({fed for fed, _ in seen.values()})
        found["error"][compute] = error(made, straight)
    seen, made = dtypes(select(source, "bf16", "default", Keep(norms=True)).model, name)
    found["kept"] = sorted({fed for layer, (fed, _) in seen.items() if layer.endswith((".norm1", ".norm2", ".norm3"))})
    stored = select(source, "bf16", "bf16")
    found["storage"] = stored.report
    found["storage computes"] = digest(latent(stored.model, name)) == digest(latent(select(source, "bf16").model, name))
    only = select(source, "default", "bf16")
    found["storage alone gives the source"] = only.model is source
    found["again"] = torch.equal(latent(source, name), straight)
    found["source unchanged"] = snapshot(source) == before
    return found


def packed_model(change=0):
    """SD 1.5's shape with its large matrices in a packed format, as GGUF loaders have them."""
    model = host_model("SD 1.5")
    assert pack_blocks(model.model) > 5
    block = model.model.diffusion_model.input_blocks[1][1].transformer_blocks[0].attn1
    block.to_q.weight._bytes().add_(change)
    return model


def packed_models_are_known_again():
    """What Base from Model asks of a model: its fingerprint, its size, and a picture."""
    base_model = pack("nodes.host.model.base_model")
    one, same, other = packed_model(), packed_model(), packed_model(1)
    source = host_model("SD 1.5")
    meta = host_model("SD 1.5")
    layer = meta.model.diffusion_model.out[2]
    layer.weight = torch.nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    positive = conditioning("SD 1.5")
    picture = base_model.low_noise_latent(
        one, torch.zeros(4, 8, 8), positive, positive, steps=2, cfg=1.0, sampler_name="euler", scheduler="simple",
        denoise=0.5, seed=1,
    )  # fmt: skip
    return {
        "same": fingerprint(one) == fingerprint(same),
        "other numbers": fingerprint(one) != fingerprint(other),
        "as loaded": fingerprint(source) == fingerprint(host_model("SD 1.5")),
        "parameters": [base_model.model_parameters(model) for model in (one, source)],
        "picture": bool(torch.isfinite(picture).all()),
        "meta": refusal(lambda: fingerprint(meta)),
    }


def what_is_passed_over():
    class Packed(torch.nn.Parameter):
        def dequantize(self):
            raise AssertionError

    source = host_model("SD 1.5")
    quantized = host_model("SD 1.5")
    layer = quantized.model.diffusion_model.out[2]
    layer.weight = Packed(layer.weight.data, requires_grad=False)
    return {
        "quantized": select(quantized, "default", "bf16").report,
        "lacks": select(source, "fp8_e4m3fn", "fp5").report,
        "lacks gives": select(source, "fp8_e4m3fn", "fp5").model is source,
        "auto": select(source, "auto").report,
    }


CHECKS = {f"host_alone {name}": lambda name=name: host_alone(name) for name in CONFIGS}
CHECKS |= {name: lambda name=name: family(name) for name in CONFIGS}
CHECKS |= {
    check.__name__: check
    for check in (
        kept,
        kept_of_sdxl,
        attention_softmax,
        copies_are_shared_weakly,
        what_other_nodes_put_on_it,
        quantized_weights_compute_in_any_dtype,
        packed_models_are_known_again,
        what_is_passed_over,
    )
}

if __name__ == "__main__":
    write_results(CHECKS)
