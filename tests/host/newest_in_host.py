"""The nodes on what the newest host hands them; tests/host/test_newest_host.py reads the results.

See in_host.py for how it is run, and newest_host for what stands in. dynamic_precision_in_host.py has the selectors
over ordinary weights; here are quantized and GGUF-like ones, and the other nodes. What a layer computes in is looked up
in the layer while it runs.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

from in_host import error, pack, refusal, sample, torch, write_results  # boots the host

# isort: split
from newest_host.install import install  # noqa: E402

install()

# isort: split
import comfy.model_management  # noqa: E402
import comfy.sd  # noqa: E402
from clip_families import file_of as clip_file  # noqa: E402
from clip_families import tokens_of  # noqa: E402
from newest_host.loading import load_clip, load_model, load_vae, mapped_digest, write_file  # noqa: E402
from newest_host.packed_weights import Blocks, Scaled, pack_blocks, quantize  # noqa: E402
from precision_nodes import (  # noqa: E402
    BF16,
    FP16,
    FP32,
    Keep,
    guard_model,
    guards,
    model_fingerprint,
    select_clip,
    select_model,
    select_vae,
)
from unets import conditioning, file_of, with_lora  # noqa: E402
from vae_families import FAMILIES, make, rounded_windows  # noqa: E402

plans = pack("nodes.host.precision.plan")
preset_plan = pack("training.precision.presets").preset_plan
FOLDER = Path(tempfile.mkdtemp(prefix="ref2v-"))
NAME = "SD 1.5"


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


class Layers:
    """Within the block, which dtypes the layers of `roots` are given and give, by whether they are norms."""

    def __init__(self, *roots):
        self._layers = [each for root in roots for each in root.modules() if hasattr(each, "comfy_cast_weights")]
        self.fed, self.norms = set(), set()

    def __enter__(self):
        self._hooks = [layer.register_forward_hook(self._look) for layer in self._layers]
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()

    def _look(self, layer, args, output):
        norm = isinstance(layer, (torch.nn.GroupNorm, torch.nn.LayerNorm))
        if torch.is_tensor(args[0]) and args[0].is_floating_point():
            (self.norms if norm else self.fed).update((name_of(args[0].dtype), name_of(output.dtype)))


def file(name, make_state, dtype):
    path = FOLDER / f"{name}_{name_of(dtype)}.safetensors"
    return str(path if path.is_file() else write_file(path, make_state(), dtype))


def unet_file(dtype=FP16):
    strip = lambda state: {key.removeprefix("model.diffusion_model."): value for key, value in state.items()}  # noqa: E731
    return file("unet", lambda: strip(file_of(NAME)), dtype)


def drawn(model, steps=1):
    return sample(model, conditioning(NAME), torch.zeros(1, 4, 8, 8), steps=steps)


def measured(model):
    """(dtypes of norms, of other layers, the latent) of a run."""
    with Layers(model.model.diffusion_model) as layers:
        made = drawn(model)
    return sorted(layers.norms), sorted(layers.fed), made


def quantized_model():
    model = load_model(unet_file(FP32))
    model.cached_patcher_init = None  # the file would be read as it was before `quantize`
    assert quantize(model.model.diffusion_model) > 5
    return model


def blocks_model():
    """As GGUF packs make it: a plain patcher, no way to read the file again."""
    model = load_model(unet_file(FP32), disable_dynamic=True)
    model.cached_patcher_init = None
    assert pack_blocks(model.model.diffusion_model) > 5
    return model


def packed(make_model, kind):
    """compute is always followed; storage is passed over with its reason; nothing of the weights changes."""
    source = make_model()
    straight = drawn(source)
    found = {"fed": {}, "error": {}}
    for compute in ("bf16", "fp16", "fp32"):
        norms, fed, made = measured(select_model(source, compute, "default", Keep(norms=True)).model)
        found["fed"][compute], found["error"][compute] = [norms, fed], error(made, straight)
    stored = select_model(source, "bf16", "fp16")
    found["report"], found["stored computes in"] = stored.report, measured(stored.model)[1]
    found["source's own weights"] = stored.model.model is source.model
    patched = with_lora(source) if kind is Scaled else None
    if patched is not None:
        wanted = drawn(patched)
        found["lora"] = error(drawn(select_model(patched, "bf16").model), wanted) / error(wanted, straight)
    found["still packed"] = sum(isinstance(weight, kind) for weight in source.model.parameters()) > 5
    found["again"] = torch.equal(drawn(source), straight)
    found["default gives the source"] = select_model(stored.model).model is source
    found["fingerprint"] = refusal(lambda: model_fingerprint(source))
    if found["fingerprint"] == "PASSED":
        other = make_model()
        for layer in other.model.diffusion_model.modules():
            if isinstance(getattr(layer, "weight", None), kind):
                _damage(layer.weight)
        same = make_model()
        known = model_fingerprint(source)
        found["fingerprints"] = [model_fingerprint(same) == known, model_fingerprint(other) != known]
    return found


def _damage(weight):
    """Other numbers in every packed weight."""
    (weight.packed if isinstance(weight, Scaled) else weight._bytes()).add_(1)


def quantized():
    return packed(quantized_model, Scaled)


def blocks():
    return packed(blocks_model, Blocks)


def plan_with_a_quantized_model_beside_an_ordinary_vae():
    vae = load_vae(file("taesd", lambda: make("TAESD", rounded_windows()), FP16))
    plan = pack("training.precision.plan").PrecisionPlan(
        model_compute="bf16", model_storage="fp16", vae_encoder="bf16", vae_decoder="fp32"
    )
    planned = plans.apply_plan(plan, model=quantized_model(), vae=vae)
    with Layers(planned.vae.first_stage_model.taesd_encoder) as encoder:
        latent = planned.vae.encode(torch.rand(1, 64, 64, 3))
    with Layers(planned.vae.first_stage_model.taesd_decoder) as decoder:
        planned.vae.decode(latent)
    return {
        "table": planned.table, "encoder": sorted(encoder.fed), "decoder": sorted(decoder.fed),
        "model": measured(planned.model)[1],
    }  # fmt: skip


def clip_in_its_layers():
    """One encoder in another dtype, the other as it was; measured in the layers, source untouched."""
    source = load_clip(file("sdxl_clip", lambda: clip_file("SDXL"), FP16), "SDXL")
    encode = lambda clip: clip.encode_from_tokens(tokens_of("SDXL"))  # noqa: E731
    straight = encode(source)
    found = {"dynamic": source.patcher.is_dynamic()}
    for what, options in {"compute": {"compute": "bf16"}, "storage": {"storage": "bf16"}}.items():
        chosen = select_clip(source, "clip_g", **options).clip
        roots = [getattr(chosen.cond_stage_model, name).transformer for name in ("clip_g", "clip_l")]
        with Layers(roots[0]) as changed, Layers(roots[1]) as other:
            made = encode(chosen)
        kept = {name_of(w.dtype) for w in chosen.patcher.model.clip_g.parameters() if w.ndim > 1}
        found[what] = [sorted(changed.norms), sorted(other.norms), sorted(kept), error(made, straight)]
    further = select_clip(source, "clip_g", storage="bf16").clip.patcher.deepclone_multigpu(torch.device("cpu"))
    found["for another GPU"] = sorted({name_of(w.dtype) for w in further.model.clip_g.parameters() if w.ndim > 1})
    assert quantize(source.cond_stage_model) > 3
    comfy.model_management.unload_all_models()
    source.patcher.cached_patcher_init = None
    straight = encode(source)
    chosen = select_clip(source, "all", storage="bf16", compute="bf16")
    with Layers(chosen.clip.cond_stage_model.clip_g.transformer) as layers:
        made = encode(chosen.clip)
    found["quantized"] = [sorted(layers.norms), error(made, straight), chosen.report]
    return found


def vae_in_its_layers():
    """A VAE with weights that no layer of the host casts (RMS norms), in two dtypes."""
    name = "Wan 2.1 and Qwen Image (WanVAE)"
    family = FAMILIES[name]
    source = load_vae(file("wan", lambda: make(name, rounded_windows()), FP16))
    pixels, latent = torch.rand(family.pixels), torch.randn(family.latent)
    straight = source.decode(latent)
    encoded = source.encode(pixels)
    comfy.model_management.unload_all_models()
    before = mapped_digest(source.first_stage_model)
    chosen = select_vae(source, "bf16", "fp32")
    module = chosen.vae.first_stage_model
    with Layers(module.encoder, module.conv1) as encoder:
        made = chosen.vae.encode(pixels)
    with Layers(module.decoder, module.conv2) as decoder:
        picture = chosen.vae.decode(latent)
    found = {
        "dynamic": [source.patcher.is_dynamic(), chosen.vae.patcher.is_dynamic()],
        "fed": [sorted(encoder.fed), sorted(decoder.fed)],
        "error": [error(made, encoded), error(picture, straight)],
        "report": chosen.report,
    }
    comfy.model_management.unload_all_models()
    found["source untouched"] = mapped_digest(source.first_stage_model) == before
    found["again"] = torch.equal(source.decode(latent), straight)
    return found


def guarded_model():
    """A guard on a dynamic MODEL: the layer is named, FP32 helps where FP16 ran over, and the source is as before."""
    path = unet_file(FP32)
    source = load_model(path)
    straight = drawn(source)
    ran_over = load_model(path)
    layer = ran_over.model.diffusion_model.input_blocks[1][0].in_layers[2]
    layer.bias.data = torch.full_like(layer.bias, 1e5)
    quick = select_model(ran_over, "fp16").model
    mended = drawn(guard_model(quick, guards.Guard(guards.RERUN)))
    stopped = refusal(lambda: drawn(guard_model(quick, guards.Guard(guards.STOP))))
    fine = drawn(guard_model(select_model(source, "bf16").model, guards.Guard(guards.STOP)))
    return {
        "without": bool(torch.isfinite(drawn(quick)).all()), "mended": bool(torch.isfinite(mended).all()),
        "stopped": stopped, "fine": error(fine, straight), "again": torch.equal(drawn(source), straight),
    }  # fmt: skip


def audited_clip():
    """The audit of a dynamic CLIP and MODEL measures both, and leaves them as they were."""
    clip = load_clip(file("sdxl_clip", lambda: clip_file("SDXL"), FP16), "SDXL")
    clip.tokenizer = SimpleNamespace(  # these small ones have none
        tokenize_with_weights=lambda _text, _ids=False, **_more: tokens_of("SDXL")
    )
    before = clip.encode_from_tokens(tokens_of("SDXL"))
    made = pack("nodes.host.precision.audit").audit_precision(
        None, clip, None, None, prompt="a fox", positive=None, sigmas="middle", dtypes="bf16", seed=0, node_id=None
    )
    return {"report": made.report, "again": torch.equal(clip.encode_from_tokens(tokens_of("SDXL")), before)}


def refiner():
    """Load Refiner gives a dynamic MODEL over the file's weights, in two dtypes, and one for another GPU."""
    from refiner_probes import refiner_file

    path = refiner_file()[0]
    module = pack("nodes.host.refiner.model")
    model, positive = module.load_refiner_model(path, 1.0)
    plain = module.build_patcher(path, disable_dynamic=True)
    base = {"samples": torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(4))}
    condition = module.add_base(positive, base)

    def refined(which):
        with Layers(which.model.diffusion_model) as layers:
            latent = sample(which, condition, base["samples"], steps=2, scheduler="simple")
        return sorted(layers.fed), latent

    fed, straight = refined(model)
    quick, rough = refined(select_model(model, "bf16").model)
    stored = select_model(model, "default", "bf16").model
    further = select_model(model, "bf16").model.deepclone_multigpu(torch.device("cpu"))
    return {
        "dynamic": [model.is_dynamic(), plain.is_dynamic(), stored.is_dynamic()],
        "fed": [fed, quick, refined(further)[0]],
        "kept": sorted({name_of(w.dtype) for w in stored.model.diffusion_model.parameters()}),
        "error": [error(rough, straight), error(refined(stored)[1], straight)],
        "again": torch.equal(refined(model)[1], straight),
        "finite": bool(torch.isfinite(straight).all()),
    }


def memory():
    """Model Memory of a dynamic MODEL and VAE, loaded or not, before and after a selector."""
    estimate = pack("nodes.host.memory.model_memory").model_memory
    model = load_model(unet_file(FP16), {"dtype": BF16})
    vae = load_vae(file("taesd", lambda: make("TAESD", rounded_windows()), FP16))

    def said(which):
        made = estimate(
            model=which, size="custom", width=128, height=128, batch_size=1, frames=1, backend="auto", cfg=True,
            text_tokens=77, memory_gib=8.0, vae=vae,
        )  # fmt: skip
        return [made.total, made.weights]

    fresh = said(model)
    drawn(model)
    vae.decode(torch.randn(1, 4, 8, 8))
    loaded = said(model)
    chosen = select_model(model, "bf16").model
    return {"fresh": fresh, "loaded": loaded, "bf16": said(chosen), "drawn": bool(torch.isfinite(drawn(chosen)).all())}


CHECKS = {
    check.__name__: check
    for check in (
        quantized, blocks, plan_with_a_quantized_model_beside_an_ordinary_vae, clip_in_its_layers, vae_in_its_layers,
        guarded_model, audited_clip, refiner, memory,
    )
}  # fmt: skip

if __name__ == "__main__":
    write_results(CHECKS)
