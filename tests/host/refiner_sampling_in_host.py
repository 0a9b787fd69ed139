"""Whole sampling runs of a refiner; refiner_in_host.py runs it."""

from in_host import comfy, error, refusal, sample, torch  # boots the host
from refiner_probes import SHAPES, S, core_velocity, flow, model_module, refiner_file

# isort: split
from torch.nn import Linear


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


def check_mask():
    """A noise mask keeps the base outside of it."""
    path, *_ = refiner_file()
    model, conditioning = model_module.load_refiner_model(path, 1.0)
    base, mask = torch.randn(1, 4, 16, 16), torch.zeros(1, 1, 16, 16)
    mask[..., :8] = 1
    out = sample(model, conditioning, base, noise_mask=mask)
    return {"outside": error(out[..., 8:], base[..., 8:]), "inside": error(out[..., :8], base[..., :8])}
