"""VAEs of many families with a dtype for each half; tests/host/test_vae_precision.py reads the results.

See in_host.py for how it is run.
"""

import copy
import functools
import gc
import inspect
import re
import weakref

from in_host import WANTED, comfy, error, pack, refusal, torch, write_results  # boots the host
from vae_file_in_host import a_file_is_read_once, damaged_files_are_named, files_of_one_half
from vae_probes import (
    BF16,
    FP16,
    FP32,
    HAS,
    LARGE,
    WINDOWS,
    Layers,
    class_name,
    decoded,
    encoded,
    equal,
    failure,
    host_vae,
    inputs,
    part,
    select,
    snapshot,
    taesd,
)

# isort: split
import comfy.model_management  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.taesd.taesd  # noqa: E402
from vae_families import FAMILIES, make  # noqa: E402


def family(name):
    """One family: FP32 and BF16 by the host alone, and a split of either. One at a time: some take gigabytes."""
    family = FAMILIES[name]
    state = make(name, WINDOWS)
    metadata = family.metadata or None
    fine = host_vae(state, FP32, metadata)
    wanted = decoded(fine, family), encoded(fine, family) if family.encodes else None
    before = snapshot(fine)
    encoder_in_bf16 = family.encodes and not family.no_bf16_encoder
    selected = select(fine, "bf16", "default") if encoder_in_bf16 else select(fine, "default", "bf16")
    found = {"report": selected.report, "tiled": bool(family.tiles), "class": class_name(fine)}
    with Layers(selected.vae, family) as layers:
        split = decoded(selected.vae, family), encoded(selected.vae, family) if family.encodes else None
    found["layers"] = layers.dtypes()
    found["source unchanged"] = before == snapshot(fine)
    del fine, selected, layers
    gc.collect()

    coarse = host_vae(state, BF16, metadata)
    rounded = decoded(coarse, family), encoded(coarse, family) if encoder_in_bf16 else None
    found["host's bf16 encoder"] = failure(lambda: encoded(coarse, family)) if family.no_bf16_encoder else ""
    before = snapshot(coarse)
    pairs = {"decoder": (split[0], (rounded if not encoder_in_bf16 else wanted)[0])}
    if family.encodes:
        pairs["encoder"] = split[1], (rounded if encoder_in_bf16 else wanted)[1]
    found |= {f"{half} is the host's": equal(*pair) for half, pair in pairs.items()}

    clean = select(coarse, "default", "fp32").vae
    if family.rounds_constants:
        widened = host_vae(state, BF16, metadata)
        widened.first_stage_model.float()
        widened.vae_dtype = FP32
        wanted = decoded(widened, family), None
    found["fp32 decoder over bf16 is the host's"] = equal(decoded(clean, family), wanted[0])
    if encoder_in_bf16:
        pixels, _ = inputs(family)
        found["bf16 encoder stays the host's"] = equal([clean.encode(pixels)], rounded[1][:1])
    found["source unchanged"] &= before == snapshot(coarse)

    size, latent = comfy.model_management.module_size, tuple(family.latent)
    pixels = (1, 3, *family.pixels[:-1])[-len(latent) :]  # as the host passes them on
    found["memory"] = [
        clean.memory_used_decode(latent, None) / coarse.memory_used_decode(latent, BF16),
        clean.memory_used_encode(pixels, None) / coarse.memory_used_encode(pixels, BF16),
    ]
    decoder = sum(p.numel() for name in family.halves[1].split() for p in part(coarse, name).parameters())
    found["held"] = size(clean.first_stage_model) / (4 * decoder)
    saved = clean.get_sd()
    found["saved whole"] = saved.keys() == coarse.get_sd().keys()
    found["saved dtypes"] = sorted({str(value.dtype) for value in saved.values()})
    if not family.encodes:
        found["encoder refused"] = refusal(lambda: select(coarse, "bf16", "default"))
    found["default gives the source"] = select(select(clean, "default", "fp16").vae).vae is coarse
    return found


def objects_are_shared_weakly():
    source = taesd()
    first, again, other = (select(source, "bf16", which).vae for which in ("default", "default", "fp16"))
    gone, kept = weakref.ref(first), weakref.ref(source)
    same = [first is again, first is other]
    del first, again
    gc.collect()
    forgotten = gone() is None
    del other, source
    gc.collect()
    return {"same": same, "forgotten": forgotten, "source forgotten": kept() is None}


def any_order_gives_the_same():
    """A chain of selectors is the last one of them, and what others do with the VAE object in between is survived."""
    import copy

    source = taesd(BF16)
    latent = torch.randn(1, 4, 8, 8)
    straight = source.decode(latent)
    once = select(source, "default", "fp32").vae
    between = copy.copy(select(source, "fp16", "bf16").vae)  # as other node packs do
    chained = select(between, "default", "fp32").vae
    before = once.decode(latent)
    return {
        "last one counts": chained is once,
        "default": select(between).vae is source,
        "again": bool(torch.equal(source.decode(latent), straight) and torch.equal(once.decode(latent), before)),
        "differs": error(straight, before),
        "same dtypes give the source": select(source, "bf16", "bf16").vae is source,
        "patcher clone": once.patcher.clone().model is once.first_stage_model,
        "loads both": {id(p) for p in once.patcher.clone().model_patches_models()} == {id(source.patcher)},
    }


def encoder_input_is_rescaled_in_float32():
    """Mean error of [0,1] -> [-1,1] as an encoder that does nothing sees it: after, and before, the cast to BF16."""

    class TAESD(comfy.taesd.taesd.TAESD):
        def encode(self, x):
            return x

    vae = taesd()
    vae.first_stage_model.__class__ = TAESD
    pixels = torch.rand(1, 256, 256, 3)
    seen = select(vae, "bf16", "default").vae.encode(pixels).movedim(1, -1)
    wanted, late = pixels * 2 - 1, pixels.bfloat16() * 2 - 1
    return {"after": (seen - wanted).abs().mean().item(), "before": (late.float() - wanted).abs().mean().item()}


def a_layer_of_another_dtype():
    """Case 5 of the public reports: in a BF16 VAE, a layer that someone has turned to FP32, and one that gives FP32."""
    pixels, latent = torch.rand(1, 64, 64, 3), torch.randn(1, 4, 8, 8)
    state = make("TAESD", WINDOWS)
    plain, straight = host_vae(state, BF16), host_vae(state, BF16)
    fine = select(plain, "fp32", "fp32").vae
    straight.first_stage_model.taesd_encoder[0].float()
    straight.first_stage_model.taesd_decoder[1].float()
    told = failure(lambda: straight.encode(pixels)), failure(lambda: straight.decode(latent))
    before = snapshot(straight)
    one, other = select(straight, "bf16", "fp32").vae, select(straight, "fp32", "bf16").vae
    whole = select(straight, "bf16", "bf16").vae
    found = {
        "the host's": told,
        "bf16 encoder": equal([one.encode(pixels)], [plain.encode(pixels)]),
        "fp32 decoder": equal([one.decode(latent)], [fine.decode(latent)]),
        "fp32 encoder": equal([other.encode(pixels)], [fine.encode(pixels)]),
        "bf16 decoder": equal([other.decode(latent)], [plain.decode(latent)]),
        "all in bf16": equal([whole.decode(latent)], [plain.decode(latent)]),
        "untouched": before == snapshot(straight) and select(straight).vae is straight,
    }
    layer = plain.first_stage_model.taesd_encoder[0]
    layer.__class__ = type("Upcasts", (type(layer),), {"forward": lambda self, x: self._conv_forward(
        x, self.weight, self.bias).float()})  # fmt: skip
    shared, copied = select(plain, "bf16", "fp32").vae, select(plain, "fp16", "bf16").vae
    found["said"] = [refusal(functools.partial(vae.encode, pixels)) for vae in (shared, copied)]
    found["the other half"] = equal([shared.decode(latent)], [fine.decode(latent)])
    return found


def as_the_dataset_builder_meets_it():
    """A split VAE known again by both halves and the encoder's dtype, and copied whole into FP32 for a second try."""
    host = pack("nodes.host.vae.host_vae")
    state = make("TAESD", WINDOWS)
    other = state | {key: value * 2 for key, value in state.items() if key.startswith("taesd_encoder")}
    vae, pixels = host_vae(state, BF16), torch.rand(1, 64, 64, 3)
    split = select(vae, "bf16", "fp32").vae
    known = [host.vae_fingerprint(split)]
    known += [host.vae_fingerprint(select(*chosen).vae) for chosen in (
        (host_vae(other, BF16), "bf16", "fp32"), (vae, "fp32", "default"), (vae, "fp16", "fp32"), (vae, "fp16", "bf16"),
    )]  # fmt: skip
    fine = host_vae(state)
    return {
        "again": host.vae_fingerprint(select(host_vae(state, BF16), "bf16", "fp32").vae) == known[0],
        "told apart": len({*known[:3], known[3]}) == 4 and known[3] == known[4],  # latents depend on the encoder
        "dtype": [host.vae_dtype(split), host.vae_dtype(vae)],
        "fp32 copy": equal([host.copy_vae(split, FP32).encode(pixels)], [fine.encode(pixels)]),
    }


def what_other_packs_put_on_a_vae():
    """An attribute set between two selectors, on a copy of the object as well-behaved packs make it."""
    source = taesd()
    source.of_a_pack_before = "before"
    first = copy.copy(select(source, "bf16", "default").vae)
    first.of_a_pack = "between"
    first.process_output = lambda image: image * 0
    latent = torch.randn(1, 4, 8, 8)
    chosen, restored = select(first, "bf16", "fp32").vae, select(first).vae
    other = select(source, "bf16", "fp32").vae
    straight = select(select(source, "bf16", "default").vae).vae
    return {
        "stays": [getattr(vae, name) for vae in (chosen, restored) for name in ("of_a_pack_before", "of_a_pack")],
        "works": [float(vae.decode(latent).abs().max()) for vae in (chosen, restored)],
        "nobody else has it": [hasattr(vae, "of_a_pack") for vae in (source, other, straight)],
        "restored runs on the source's weights": restored.patcher is source.patcher,
        "nothing put, nothing copied": straight is source,
    }


def matrices_are_multiplied_in_float32():
    """Whatever another pack has allowed; and it is allowed again afterwards."""
    source, seen = taesd(BF16), {"encoder": set(), "decoder": set()}
    made = select(source, "bf16", "fp32").vae
    for half in seen:
        part = getattr(made.first_stage_model, f"taesd_{half}")
        part.register_forward_hook(lambda *_, half=half: seen[half].add(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        made.decode(made.encode(torch.rand(1, 64, 64, 3)))
        after = torch.get_float32_matmul_precision()
        made.first_stage_model.taesd_decoder.register_forward_hook(_fail)
        failed = refusal(lambda: made.decode(torch.randn(1, 4, 8, 8)))
        after_failure = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    return {"seen": {half: sorted(found) for half, found in seen.items()}, "after": [after, after_failure],
            "said": failed}  # fmt: skip


def _fail(*_):
    raise ValueError("a layer that fails")


def what_is_refused():
    class Unknown(comfy.taesd.taesd.TAESD):
        pass

    unknown, patched = taesd(), taesd()
    unknown.first_stage_model.__class__ = Unknown
    patched.patcher.patches["taesd_decoder.1.weight"] = [object()]
    light = host_vae(make("TAEHV of Wan 2.2", WINDOWS))
    pixel = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    empty = taesd()
    empty.first_stage_model = None
    quantized = taesd()

    class Packed(torch.nn.Parameter):
        def dequantize(self):
            raise AssertionError

    layer = quantized.first_stage_model.taesd_decoder[1]
    layer.weight = Packed(layer.weight.data, requires_grad=False)
    whole = select(unknown, "bf16", "fp16")
    return {
        "unknown is one": [whole.report, whole.vae.vae_dtype == FP16, equal_to_plain(whole.vae, unknown)],
        "no encoder": refusal(lambda: select(light, "bf16", "default")),
        "its decoder": select(light, "default", "bf16").report.splitlines()[2],
        "pixel space": refusal(lambda: select(pixel, "bf16", "bf16")),
        "patched": refusal(lambda: select(patched, "bf16", "bf16")),
        "empty": refusal(lambda: select(empty, "bf16", "bf16")),
        "quantized": select(quantized, "default", "bf16").report,
        "quantized passes through": select(quantized, "default", "bf16").vae is quantized,
        "lacks": select(taesd(), "fp8_e4m3fn", "fp5").report,
        "auto": select(taesd(), "auto", "auto").report,
        "rounded": select(taesd(BF16), "default", "fp32").report,
    }


def equal_to_plain(vae, source):
    latent = torch.randn(1, 4, 8, 8)
    state = {k: v.clone() for k, v in source.first_stage_model.state_dict().items()}
    return bool(torch.equal(vae.decode(latent), comfy.sd.VAE(sd=state, dtype=FP16).decode(latent)))


def classes():
    """The classes that the host's VAE object can hold, by its own code, and those that the split knows."""
    source = inspect.getsource(comfy.sd.VAE.__init__)
    made = re.findall(r"self\.first_stage_model = (?:\w+\.)*([A-Z]\w*)\(", source)
    return {"host": sorted(set(made)), "known": sorted(pack("nodes.host.vae.halves")._FAMILIES)}


CHECKS = {name: lambda name=name: family(name) for name, kind in FAMILIES.items() if HAS.get(kind.needs, True)} | {
    check.__name__: check
    for check in (
        objects_are_shared_weakly,
        any_order_gives_the_same,
        encoder_input_is_rescaled_in_float32,
        a_layer_of_another_dtype,
        as_the_dataset_builder_meets_it,
        files_of_one_half,
        what_other_packs_put_on_a_vae,
        a_file_is_read_once,
        damaged_files_are_named,
        matrices_are_multiplied_in_float32,
        classes,
        what_is_refused,
    )
}


if __name__ == "__main__":
    write_results({name: check for name, check in CHECKS.items() if WANTED or name not in LARGE})
