"""Refiner files as MODELs in the host's samplers: the numbers and sentences that test_refiner_model.py looks at.

Everything is tiny, in float32, on the CPU. See in_host.py for how it is run.
"""

import gc
import importlib
import weakref
from pathlib import Path

from in_host import WORK, comfy, error, pack, refusal, sample, torch, write_results  # boots the host
from torch.nn import Linear

# isort: split
import comfy.sd  # noqa: E402, F401

nodes_perpneg, nodes_sag = (importlib.import_module(f"comfy_extras.nodes_{name}") for name in ("perpneg", "sag"))
model_module = pack("nodes.host.refiner.model")
flow = pack("training.objectives.residual.flow")
file_module = pack("training.objectives.residual.file")
lora_module = pack("training.objectives.residual.lora")
start_module = pack("training.objectives.residual.start")
trainables = pack("training.objectives.trainables")
LoRAConfig = pack("training.config.train_config").LoRAConfig
unet_module = pack("training.objectives.residual.unet")

SHAPES = {  # every way in which the host's and the core's descriptions of a network differ
    "text, 3 levels": dict(
        latent_channels=4, block_channels=(32, 64, 64), layers_per_block=2, transformer_depth=(1, 2, 1), middle_depth=1,
        heads=(4, 4, 4), context_dim=24,
    ),
    "pixel-small": dict(unet_module.PRESETS["pixel-small"], latent_channels=3),
    "no attention": dict(
        latent_channels=4, block_channels=(32, 64), layers_per_block=1, transformer_depth=(0, 0), middle_depth=0,
        heads=(1, 1), context_dim=8,
    ),
    "no middle attention": dict(
        latent_channels=4, block_channels=(32, 64, 96), layers_per_block=1, transformer_depth=(1, 1, 0), middle_depth=0,
        heads=(4, 4, 4), context_dim=8,
    ),
    "one level": dict(
        latent_channels=4, block_channels=(32,), layers_per_block=1, transformer_depth=(1,), middle_depth=1,
        heads=(2,), context_dim=8,
    ),
    "pooled, head size": dict(  # SDXL in small: depth 0 first, uneven depths, one head size, linear projections
        latent_channels=4, block_channels=(32, 64, 128), layers_per_block=2, transformer_depth=(0, 2, 3),
        middle_depth=3, heads=(1, 2, 4), context_dim=40, linear_projection=True, pooled_dim=20,
    ),
    "16 channels": dict(
        latent_channels=16, block_channels=(32, 64), layers_per_block=1, transformer_depth=(0, 1), middle_depth=1,
        heads=(4, 4), context_dim=16,
    ),
}  # fmt: skip
SIZES = [(64, 64), (85, 97), (33, 50)]
LATENTS = {
    3: {"name": "ChromaRadiance", "channels": 3, "scale": 1.0, "shift": 0.0, "downscale": 1},
    4: {"name": "SD15", "channels": 4, "scale": 0.18215, "shift": 0.0, "downscale": 8},
    16: {
        "name": "measured", "channels": 16, "scale": [0.5 + 0.1 * i for i in range(16)],
        "shift": [0.1 * i - 0.7 for i in range(16)], "downscale": 8,
    },
}  # fmt: skip
S, RMS = 0.1, 0.1


def random_net(config, seed=0):
    """A core network whose every weight matters: build_unet zeroes the last convolution."""
    torch.manual_seed(seed)
    net = unet_module.build_unet(config).requires_grad_(False).eval()
    net.conv_out.weight.normal_(0, 0.05)
    net.conv_out.bias.normal_(0, 0.05)
    return net


def refiner_file(shape="text, 3 levels", *, s=S, name="refiner.safetensors", weights=None, preview=None, **changes):
    """(path, core network, metadata, empty conditioning) of a refiner with random weights."""
    config = unet_module.UNetConfig(**{**SHAPES[shape], **changes})
    net = random_net(config)
    times = flow.sigmas(8 if s else 1).tolist()
    meta = file_module.RefinerMeta(
        unet=config, latent=LATENTS[config.latent_channels], preview=preview, noise_scale=s, residual_rms=RMS,
        c_v=flow.velocity_scale(RMS, s), sigmas=times, context=None, training={},
    )  # fmt: skip
    empty = {"context": torch.randn(7, config.context_dim)}
    if config.pooled_dim:
        empty["pooled"] = torch.randn(config.pooled_dim)
    path = Path(WORK.name) / name
    file_module.save_refiner(path, net.state_dict() if weights is None else weights, empty, meta)
    return path, net, meta, empty


def core_velocity(net, meta, b, context, pooled=None):
    """(x, t) -> v with the core's own network."""
    height, width = (side * meta.latent["downscale"] for side in b.shape[-2:])
    time_ids = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32).expand(b.shape[0], -1)
    context = context.expand(b.shape[0], -1, -1)
    added = {} if pooled is None else {"pooled": pooled.expand(b.shape[0], -1), "time_ids": time_ids}
    return lambda x, t: meta.c_v * unet_module.call_unet(net, x, b, t, context, **added)


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


def check_ksampler():
    """The plain KSampler against the core's own sampler on the same noise, in raw latent space."""
    found = {}
    for shape in SHAPES:
        path, net, meta, empty = refiner_file(shape)
        model, conditioning = model_module.load_refiner_model(path, 1.0)
        format_ = model.model.latent_format
        for batch, steps in ((3, 8), (1, 4)):
            base = 2 * torch.randn(batch, meta.unet.latent_channels, 13, 18) + 0.3
            noise = comfy.sample.prepare_noise(base, 1)
            b = format_.process_in(base)
            v_of = core_velocity(net, meta, b, empty["context"], empty.get("pooled"))
            expected = format_.process_out(flow.sample(v_of, b, noise, meta.noise_scale, flow.sigmas(steps)))
            found[f"{shape}, batch {batch}, {steps} steps"] = error(
                sample(model, conditioning, base, steps=steps), expected
            )
            found[f"{shape}, batch {batch}, {steps} steps, changed"] = error(expected, base)
    return found


def check_text_conditioning():
    """Another text gives another picture; guidance works with a negative, whose missing base is filled in."""
    path, net, meta, empty = refiner_file("pooled, head size")
    model, own = model_module.load_refiner_model(path, 1.0)
    base = torch.randn(2, 4, 16, 16)
    text = [[torch.randn(1, 9, 40), {"pooled_output": torch.randn(1, 20)}]]
    noise = comfy.sample.prepare_noise(base, 1)
    b = model.model.latent_format.process_in(base)
    v_of = core_velocity(net, meta, b, text[0][0], text[0][1]["pooled_output"])
    u_of = core_velocity(net, meta, b, own[0][0], own[0][1]["pooled_output"])
    guided = flow.sample(lambda x, t: u_of(x, t) + 3 * (v_of(x, t) - u_of(x, t)), b, noise, S, flow.sigmas(8))
    expected = model.model.latent_format.process_out(guided)
    zeros = core_velocity(net, meta, b, text[0][0], torch.zeros(1, 20))
    zeros = model.model.latent_format.process_out(flow.sample(zeros, b, noise, S, flow.sigmas(8)))
    return {
        "text changes": error(sample(model, text, base), sample(model, own, base)),
        "cfg 3": error(sample(model, text, base, negative=own, cfg=3.0), expected),
        "no pooled text": error(sample(model, [[text[0][0], {}]], base), zeros),
    }


def check_split():
    """4 + 4 steps as two KSamplerAdvanced, b through the conditioning, against 8 steps."""
    found = {}
    for shape in ("text, 3 levels", "16 channels"):
        path, net, meta, empty = refiner_file(shape)
        model, conditioning = model_module.load_refiner_model(path, 1.0)
        base = torch.randn(2, meta.unet.latent_channels, 11, 16) + 0.2
        whole = sample(model, conditioning, base)
        with_base = model_module.add_base(conditioning, {"samples": base})
        none = torch.zeros_like(base)
        for first in (conditioning, with_base):
            half = sample(model, first, base, start_step=0, last_step=4)
            name = f"{shape}, {'plain first' if first is conditioning else 'with base'}"
            found[name] = error(sample(model, with_base, half, noise=none, start_step=4, last_step=10000), whole)
            found[f"{name}, half changed"] = error(half, whole)
        # `positive` alone carries the base; an empty latent beside it starts from the base
        mixed = sample(model, with_base, half, noise=none, negative=conditioning, cfg=2.0, start_step=4)
        both = sample(model, with_base, half, noise=none, negative=with_base, cfg=2.0, start_step=4)
        found[f"{shape}, base in positive only"] = error(mixed, both)
        empty_latent = torch.zeros(2, 4, 11, 16)  # of 4 channels, whatever the model has: the host repeats them
        found[f"{shape}, empty latent"] = error(sample(model, with_base, empty_latent), whole)
        found[f"{shape}, input untouched"] = float("concat_latent_image" in conditioning[0][1])
        weak, _ = model_module.load_refiner_model(path, 0.5)
        found[f"{shape}, weak half is untouched"] = error(
            sample(weak, with_base, base, start_step=0, last_step=4), half
        )
        blended = sample(weak, with_base, half, noise=none, start_step=4)
        found[f"{shape}, weak split"] = error(blended, torch.lerp(base, whole, 0.5))
    return found


def check_sigmas():
    """SamplerCustom with the run's own sigmas against the KSampler."""
    path, net, meta, empty = refiner_file()
    model, conditioning = model_module.load_refiner_model(path, 1.0)
    sigmas = model_module.own_sigmas(model)
    base = torch.randn(2, 4, 16, 16)
    noise = comfy.sample.prepare_noise(base, 1)
    custom = comfy.sample.sample_custom(
        model, noise, 1.0, comfy.samplers.sampler_object("euler"), sigmas, conditioning, conditioning, base, seed=1,
        disable_pbar=True,
    )  # fmt: skip
    simple = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 8)
    return {
        "sigmas": sigmas.tolist(),
        "dtype": str(sigmas.dtype),
        "simple": (sigmas - simple).abs().max().item(),
        "samples": error(custom, sample(model, conditioning, base)),
        "other model": refusal(lambda: model_module.own_sigmas(Linear(1, 1))),
    }


def check_strength():
    path, net, meta, empty = refiner_file()
    base = torch.randn(2, 4, 16, 16)
    whole, distances = None, []
    for strength in (1.0, 0.9, 0.6, 0.3, 0.1, 0.0):
        model, conditioning = model_module.load_refiner_model(path, strength)
        model = model.clone().clone()
        out = sample(model, conditioning, base)
        whole = out if whole is None else whole
        distances.append(float((out - base).norm()))
    bare = model_module.build_patcher(path)
    return {
        "distances": distances,
        "0 is the base": torch.equal(out, base),
        "1 is untouched": torch.equal(whole, sample(bare, conditioning, base)),
        "below 0": refusal(lambda: model_module.load_refiner_model(path, -0.1)),
    }


def check_one_frame():
    """[B, 4, 1, H, W], as the VAEs of video models encode a picture, against the same picture in four dimensions."""
    path, *_ = refiner_file()
    model, cond = model_module.load_refiner_model(path, 0.7)
    base, mask = torch.randn(2, 4, 13, 18), torch.zeros(1, 1, 13, 18)
    mask[..., :8] = 1
    frame, noise = base.unsqueeze(2), comfy.sample.prepare_noise(base, 1)
    whole = sample(model, cond, base, noise=noise)
    got = sample(model, cond, frame, noise=noise.unsqueeze(2))
    with_frame = model_module.add_base(cond, {"samples": frame})
    half = sample(model, with_frame, frame, noise=noise.unsqueeze(2), start_step=0, last_step=4)
    split = sample(model, with_frame, half, noise=torch.zeros_like(frame), start_step=4)
    masked = sample(model, cond, base, noise=noise, noise_mask=mask)
    return {
        "shape": list(got.shape),
        "same": torch.equal(got.squeeze(2), whole),
        "frame beside a picture": torch.equal(sample(model, with_frame, base, noise=noise), whole),
        "split": error(split.squeeze(2), whole),
        "masked": torch.equal(
            sample(model, cond, frame, noise=noise.unsqueeze(2), noise_mask=mask).squeeze(2), masked
        ),
    }


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
    choice, cache = pack("nodes.host.refiner.choice"), pack("nodes.host.refiner.cache")
    choice.choose_refiner = lambda _name, given: given  # where a file may lie is another matter
    for strength, model in ((0.25, weak), (1.0, strong)):
        choice.note_loaded(path, strength, model, linked=False)
    for strength in (0.25, 1.0):
        choice.fingerprint_refiner("two", strength, path)
    found["nothing is held for two that are in use"] = not cache._held
    choice.fingerprint_refiner("two", 0.5, path)
    found["one is held for a third"] = len(cache._held) == 1
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


def check_mask():
    """A noise mask keeps the base outside of it."""
    path, *_ = refiner_file()
    model, conditioning = model_module.load_refiner_model(path, 1.0)
    base, mask = torch.randn(1, 4, 16, 16), torch.zeros(1, 1, 16, 16)
    mask[..., :8] = 1
    out = sample(model, conditioning, base, noise_mask=mask)
    return {"outside": error(out[..., 8:], base[..., 8:]), "inside": error(out[..., :8], base[..., :8])}


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
    write_results(
        {name.removeprefix("check_"): run for name, run in list(globals().items()) if name.startswith("check_")}
    )
