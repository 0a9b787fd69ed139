"""Refiner files as MODELs in the host's samplers: the numbers and sentences that test_refiner_model.py looks at.

Everything is tiny, in float32, on the CPU. See in_host.py for how it is run.
"""

import gc
import weakref
from pathlib import Path

import refiner_sampling_in_host
from in_host import WORK, comfy, error, pack, refusal, sample, torch, write_results  # boots the host
from refiner_probes import (
    LATENTS,
    SHAPES,
    SIZES,
    LoRAConfig,
    file_module,
    lora_module,
    model_module,
    nodes_perpneg,
    nodes_sag,
    refiner_file,
    start_module,
    trainables,
    unet_module,
)

# isort: split
import comfy.sd  # noqa: E402, F401

# ------------------------------------------------------------------------------------------------------------- checks


def check_unet_equality():
    """The host's network against the core's from the same file; relative error for each shape and size."""
    found = {}
    for shape in SHAPES:
        path, net, meta, empty = refiner_file(shape)
        model, _ = model_module.load_refiner_model(path, 1.0)
        for height, width in SIZES:
            torch.manual_seed(3)
            x, b = torch.randn(2, 2, meta.unet.latent_channels, height, width)
            t, context = torch.tensor([0.3, 0.7]), torch.randn(2, 5, meta.unet.context_dim)
            core, host = {}, {}
            if meta.unet.pooled_dim:
                pooled = torch.randn(2, meta.unet.pooled_dim)
                pixels = [side * meta.latent["downscale"] for side in (height, width)]
                core = {"pooled": pooled, "time_ids": torch.tensor([[*pixels, 0.0, 0.0, *pixels]]).expand(2, -1)}
                host = {"y": model.model.encode_adm(noise=x, pooled_output=pooled, device=x.device)}
            expected = unet_module.call_unet(net, x, b, t, context, **core)
            got = model.model.diffusion_model(torch.cat([x, b], 1), 1000 * t, context=context, **host)
            found[f"{shape} at {height}x{width}"] = error(got, expected)
    return found


def check_two_strengths():
    """MODELs of one file: one network while one of them lives; a new one when the file is new."""
    path, net, meta, empty = refiner_file(name="two.safetensors")
    weak, strong = (model_module.load_refiner_model(path, strength)[0] for strength in (0.25, 1.0))
    found = {"one network": weak.model is strong.model, "two MODELs": weak is not strong}
    base = torch.randn(1, 4, 16, 16)
    cond = [[empty["context"][None], {}]]
    whole = sample(strong, cond, base)
    found["each its own strength"] = error(sample(weak, cond, base), torch.lerp(base, whole, 0.25)) < 1e-5
    patched = strong.clone()
    patched.model_options["mine"] = 1
    again = model_module.load_refiner_model(path, 1.0)[0]
    found["nothing of other nodes"] = again.model is weak.model and "mine" not in again.model_options
    choice = pack("nodes.host.refiner.choice")
    choice.choose_refiner = lambda _name, given: given  # where a file may lie is another matter
    for strength, model in ((0.25, weak), (1.0, strong)):
        choice.note_loaded(path, strength, model, linked=False)
    for strength in (0.25, 1.0):
        choice.fingerprint_refiner("two", strength, path)
    found["nothing is held for two that are in use"] = choice.LOADED._held is None
    choice.fingerprint_refiner("two", 0.5, path)
    found["one is held for a third"] = choice.LOADED._held is not None
    refiner_file(name="two.safetensors", s=0.2)
    found["a new file is another network"] = model_module.load_refiner_model(path, 1.0)[0].model is not weak.model
    gone = weakref.ref(weak.model)
    del weak, strong, patched, again, model
    gc.collect()
    found["freed"] = gone() is None
    return found


def check_cancel_while_it_is_sent():
    """The user presses stop between our look and the host's own in its progress hook (main.py's does this)."""
    progress, management = pack("nodes.host.progress"), comfy.model_management

    def hook(*given, **named):
        management.interrupt_current_processing()
        management.throw_exception_if_processing_interrupted()

    comfy.utils.set_progress_bar_global_hook(hook)
    try:
        bar = progress.NodeProgress(None, 3)
        bar.update(1)
        found = {"goes on until it looks": progress.interrupted()}
        try:
            progress.raise_if_interrupted()
        except management.InterruptProcessingException:
            found["then it ends as the host does"] = not progress.interrupted()
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
        management.interrupt_current_processing(False)
    return found


def check_clones():
    """Two clones of one loaded MODEL side by side, and the loaded one after them."""
    path, net, meta, empty = refiner_file()
    model, conditioning = model_module.load_refiner_model(path, 1.0)
    base = torch.randn(1, 4, 16, 16)
    first, second = model.clone(), model.clone()
    outs = [sample(m, conditioning, base) for m in (first, second, model, first)]
    return {"equal": all(torch.equal(out, outs[0]) for out in outs)}


def check_latent_format():
    """Round trips, previews, dtypes, and what the host is told."""
    model, _ = model_module.load_refiner_model(refiner_file("16 channels")[0], 1.0)
    format_, x = model.model.latent_format, torch.randn(2, 16, 5, 6)
    shift, scale = (torch.tensor(LATENTS[16][key]).reshape(1, -1, 1, 1) for key in ("shift", "scale"))
    fitted = {"weight": [[0.1, 0.2, 0.3]] * 16, "bias": [0.0, 0.1, 0.2]}
    previewed, _ = model_module.load_refiner_model(refiner_file("16 channels", preview=fitted)[0], 1.0)
    sd15, _ = model_module.load_refiner_model(refiner_file(preview=fitted)[0], 1.0)
    pixels, _ = model_module.load_refiner_model(refiner_file("pixel-small")[0], 1.0)
    return {
        "in": error(format_.process_in(x), (x - shift) * scale),
        "out": error(format_.process_out(format_.process_in(x)), x),
        "fitted preview": previewed.model.latent_format.latent_rgb_factors == fitted["weight"],
        "host preview": sd15.model.latent_format.latent_rgb_factors == comfy.latent_formats.SD15().latent_rgb_factors,
        "pixel preview": pixels.model.latent_format.latent_rgb_factors == torch.eye(3).tolist(),
        "pixels unchanged": torch.equal(pixels.model.latent_format.process_in(x[:, :3]), x[:, :3]),
        "dtype": str(model.model.get_dtype()),
        "memory": model.model.memory_usage_factor,
    }


def check_refusals():
    """Each thing that does not fit, and the sentence for it."""
    path, net, meta, empty = refiner_file("pooled, head size")
    model, cond = model_module.load_refiner_model(path, 1.0)
    base, zeros = torch.randn(2, 4, 16, 16), torch.zeros(2, 4, 16, 16)
    with_base = model_module.add_base(cond, {"samples": base})
    other = model_module.add_base(cond, {"samples": base + 1})
    shot_path, *_ = refiner_file(s=0.0, name="shot.safetensors")
    shot, shot_cond = model_module.load_refiner_model(shot_path, 1.0)
    euler = comfy.samplers.sampler_object("euler")

    def custom(sigmas):
        noise = comfy.sample.prepare_noise(base, 1)
        comfy.sample.sample_custom(model, noise, 1.0, euler, torch.tensor(sigmas), cond, cond, base, disable_pbar=True)

    shifted = model.clone()
    shifted.add_object_patch("model_sampling", comfy.model_sampling.ModelSamplingDiscreteFlow())

    # as a LoRA or a narrow precision may make of it; of a file of its own, for MODELs of one file have one network
    nan = model_module.load_refiner_model(refiner_file("pooled, head size", name="nan.safetensors")[0], 1.0)[0]
    nan.model.diffusion_model.input_blocks[1][0].in_layers[2].bias.data[0] = float("nan")

    def with_size(height, width, batch=2):
        return model_module.add_base(cond, {"samples": torch.randn(batch, 4, height, width)})

    tries = {
        "channels": lambda: sample(model, cond, torch.randn(1, 16, 8, 8)),
        "PerpNeg": lambda: sample(nodes_perpneg.PerpNeg.execute(model, cond, 1.0).args[0], cond, base, cfg=2.0),
        "SAG": lambda: sample(nodes_sag.SelfAttentionGuidance.execute(model, 0.5, 2.0).args[0], cond, base, cfg=2.0),
        "video latent": lambda: sample(model, cond, torch.randn(1, 4, 3, 8, 8)),
        "empty latent": lambda: sample(model, cond, zeros),
        "empty base": lambda: sample(model, model_module.add_base(cond, {"samples": zeros}), base),
        "denoise": lambda: sample(model, cond, base, denoise=0.5),
        "denoise with base": lambda: sample(model, with_base, base, denoise=0.5),
        "split without base": lambda: sample(model, cond, base, noise=zeros, start_step=4),
        "split with noise": lambda: sample(model, with_base, base, start_step=4),
        "split with mask": lambda: sample(model, with_base, base, noise=zeros, start_step=4, noise_mask=zeros[:, :1]),
        "base batch": lambda: sample(model, with_size(16, 16, 3), base),
        "base size": lambda: sample(model, with_size(16, 24), base),
        "base channels": lambda: sample(
            model, model_module.add_base(cond, {"samples": torch.randn(2, 3, 16, 16)}), base
        ),
        "two bases": lambda: sample(model, with_base, base, negative=other),
        "text width": lambda: sample(model, [[torch.randn(1, 7, 41), {}]], base),
        "no text": lambda: sample(model, [[None, {}]], base),
        "pooled width": lambda: sample(model, [[torch.randn(1, 7, 40), {"pooled_output": torch.randn(1, 21)}]], base),
        "controlnet": lambda: sample(model, [[cond[0][0], {"gligen": ("position", None, [])}]], base),
        "foreign sigmas": lambda: custom([14.6, 3.0, 0.0]),
        "rising sigmas": lambda: custom([1.0, 0.2, 0.5, 0.0]),
        "model sampling": lambda: sample(shifted, cond, base),
        "one shot": lambda: sample(shot, shot_cond, base, steps=8),
        "nan latent": lambda: sample(model, cond, base.index_fill(3, torch.tensor([3]), float("nan"))),
        "nan network": lambda: sample(nan, cond, base),
        "uni_pc, one step": lambda: sample(model, cond, base, sampler="uni_pc", steps=1),
        "dpm_fast, one step": lambda: sample(model, cond, base, sampler="dpm_fast", steps=1),
        "uni_pc, two steps": lambda: sample(model, cond, base, sampler="uni_pc", steps=2),
        "one shot, one step": lambda: sample(shot, shot_cond, base, steps=1),
        "one base, batch": lambda: sample(model, with_size(16, 16, 1), base),
    }
    return {name: refusal(action) for name, action in tries.items()}


def check_lora():
    """lora.safetensors through the host's own LoRA loader on its refiner, against the refiner with it merged in."""
    found = {}
    for shape in ("text, 3 levels", "pixel-small", "pooled, head size"):
        path, _, meta, empty = refiner_file(shape, name="start.safetensors")
        start = start_module.Start(path, pack("training.config.start_file").start_file_hash(path), meta)
        net, adapters = unet_module.build_unet(meta.unet), lora_module.choose_adapters(LoRAConfig(rank=3), meta.unet)
        lora_module.add_adapters(net, adapters)
        trained = {name: torch.randn(p.shape) * 0.1 for name, p in trainables.trainables(net).items()}
        lora, merged = Path(WORK.name) / "lora.safetensors", Path(WORK.name) / "merged.safetensors"
        lora_module.save_lora(lora, trained, adapters, start, {})
        file_module.save_refiner(merged, lora_module.merge(start.weights(), trained, adapters), empty, meta)
        model, conditioning = model_module.load_refiner_model(path, 1.0)
        patched, _ = comfy.sd.load_lora_for_models(model, None, comfy.utils.load_torch_file(str(lora)), 1.0, 0.0)
        whole, _ = model_module.load_refiner_model(merged, 1.0)
        base = 2 * torch.randn(1, meta.unet.latent_channels, 16, 16) + 0.3
        expected = sample(whole, conditioning, base)
        found[shape] = error(sample(patched, conditioning, base), expected)
        found[f"{shape}, changed"] = error(sample(model, conditioning, base), expected)
        found[f"{shape}, patched"] = [len(patched.patches), len(adapters.layers)]
    return found


def check_files():
    """Files that are no refiner, or not the one that they say."""
    folder = Path(WORK.name)
    path, net, meta, empty = refiner_file()
    whole = path.read_bytes()
    (folder / "truncated.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "nothing.safetensors").write_bytes(b"")
    torch.save({"a": torch.zeros(1)}, folder / "pickle.safetensors")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, folder / "other.safetensors")
    weights = net.state_dict()
    less = {key: value for key, value in weights.items() if key != "conv_in.weight"}
    refiner_file(weights=less, name="less.safetensors")
    refiner_file(weights={**weights, "more.weight": torch.zeros(1)}, name="more.safetensors")
    refiner_file(weights={**weights, "conv_in.weight": torch.zeros(32, 8, 1, 1)}, name="shape.safetensors")
    names = ("truncated", "nothing", "pickle", "other", "less", "more", "shape", "absent")
    return {
        name: refusal(lambda name=name: model_module.load_refiner_model(folder / f"{name}.safetensors", 1.0))
        for name in names
    }


if __name__ == "__main__":
    checks = {**vars(refiner_sampling_in_host), **globals()}
    write_results({name.removeprefix("check_"): run for name, run in checks.items() if name.startswith("check_")})
