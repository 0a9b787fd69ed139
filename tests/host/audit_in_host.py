"""The audit on the host's own objects; tests/host/test_audit.py reads the results.

See in_host.py for how it is run. REF2V_CHECKPOINT is a checkpoint of tests/host/checkpoints.py; REF2V_PICTURES, where
set, is a folder that the charts and difference pictures are written to, for a person to look at.
"""

import gc
import weakref

from audit_probes import (
    BF16,
    audit_clip,
    audit_vae,
    checkpoint,
    host_vae,
    keep,
    model_part,
    picture,
    snapshot,
    support,
    whole,
)
from audit_vae_in_host import an_overflow_is_named, other_vaes, trained_vae_in_every_dtype, vae_of_a_selector
from in_host import comfy, error, refusal, sample, torch, write_results  # boots the host

# isort: split
import comfy.model_management  # noqa: E402
import comfy.utils  # noqa: E402
from checkpoints import Windows  # noqa: E402
from trained_vae import trained_vae  # noqa: E402
from vae_families import make  # noqa: E402


def clip_encoders():
    """SD 1's encoder, computed and stored in BF16."""
    _, clip = checkpoint()
    tokens = clip.tokenize("a red fox")
    straight = clip.encode_from_tokens(tokens)
    before = snapshot(clip.cond_stage_model, clip.patcher)
    seen = audit_clip(clip, "a red fox", ("bf16",), 0, lambda line: None)
    found = whole(clip=clip)
    keep(found, "clip")
    copied = {k: v.bfloat16().float() if v.ndim else v for k, v in clip.cond_stage_model.state_dict().items()}
    by_hand = checkpoint(again=1)[1]
    by_hand.cond_stage_model.load_state_dict(copied)
    stored = error(by_hand.encode_from_tokens(tokens), straight)
    (part,) = seen.parts
    return {
        "said": part.sentences,
        "stored by hand": stored,
        "layers": len(part.layers),
        "computed": part.audit.layers[""].so_far["bf16"].relative,
        "plan": found.plan.to_json(),
        "differences": list(found.differences.shape),
        "unchanged": before == snapshot(clip.cond_stage_model, clip.patcher),
        "again": bool(torch.equal(clip.encode_from_tokens(tokens), straight)),
    }


def model_at_sigmas():
    """SD 1.5's UNet, one level of it: layers run in the dtype, and the sampler gives afterwards what it gave before."""
    model, clip = checkpoint()
    condition = clip.encode_from_tokens_scheduled(clip.tokenize("a red fox"))
    latent = torch.zeros(1, 4, 8, 8)
    straight = sample(model, condition, latent, steps=2)
    before = snapshot(model.model, model)
    dtypes: dict[str, set] = {}

    class Step:
        """Notes which dtype the layers get in each run."""

        line = ""

        def __call__(self, line):
            self.line = line

    step = Step()

    def look(_layer, args, _output):
        dtypes.setdefault(step.line, set()).add(str(args[0].dtype))

    handle = model.model.diffusion_model.input_blocks[1][0].in_layers[2].register_forward_hook(look)
    try:
        seen = model_part.audit_model(model, condition, latent, ["early", "1.0"], ("bf16",), 0, step)
    finally:
        handle.remove()
    found = whole(model=model, clip=clip, vae=host_vae(trained_vae()), image=picture(64))
    keep(found, "model")
    zeros = whole(model=model, image=picture(64), sigmas="50%")
    loaded = [m.model for m in comfy.model_management.current_loaded_models if m.model is not None]
    again = bool(torch.equal(sample(model, condition, latent, steps=2), straight))
    return {
        "dtypes": {line: sorted(kinds) for line, kinds in dtypes.items()},
        "said": {part.name: part.sentences for part in seen.parts},
        "layers": [len(part.layers) for part in seen.parts],
        "kinds": sorted({layer.kind for layer in seen.parts[0].layers}),
        "choice": [seen.choice.dtype, seen.choice.why],
        "native": support(torch.device("cpu"), BF16).native,
        "report": found.report,
        "zeros": zeros.report,
        "differences": list(zeros.differences.shape),
        # after the next load: the host's compute switch leaves its mark on each layer until then
        "unchanged": before == snapshot(model.model, model),
        "clones left": sum(patcher is not model and patcher.model is model.model for patcher in loaded),
        "again": again,
    }


def lora_counts():
    """A patched model is measured with its patch, and the patch is on it afterwards."""
    model, _ = checkpoint()
    condition, latent = model_part.empty_conditioning(model), torch.zeros(1, 4, 8, 8)
    key = "diffusion_model.out.2.weight"
    patched = model.clone()
    patched.add_patches({key: (torch.full_like(comfy.utils.get_attr(model.model, key), 0.01),)})
    given = (condition, latent, ["1.0"], ("bf16",), 0, lambda line: None)
    runs = [model_part.audit_model(which, *given) for which in (model, patched)]
    straight, other = (sample(m, condition, latent, steps=1) for m in (model, patched))
    return {
        "differs": not torch.equal(runs[0].denoised[0][2], runs[1].denoised[0][2]),
        "still patched": error(straight, other) > 1e-3,
    }


def what_is_refused():
    vae, (model, clip) = host_vae(trained_vae()), checkpoint()
    windows = Windows(1 << 20)
    sound, shape = (host_vae(make(name, windows)) for name in ("Stable Audio (Oobleck)", "Hunyuan3D (ShapeVAE)"))
    effnet = make("Stable Cascade C (StageC_coder)", windows)
    effnet = {key.removeprefix("encoder."): value for key, value in effnet.items() if key.startswith("encoder.")}
    music = host_vae(trained_vae())  # as ACE-Step's looks: pictures by its latents, stereo by what it gives
    music.output_channels, music.extra_1d_channel = 2, 16
    broken = trained_vae()
    broken["taesd_decoder.3.conv.2.bias"] = torch.full_like(broken["taesd_decoder.3.conv.2.bias"], float("nan"))
    small = picture(64)
    unknown = model.clone()
    return {
        "nothing": refusal(whole),
        "sound": refusal(lambda: whole(vae=sound)),
        "music": refusal(lambda: whole(vae=music)),
        "shape": refusal(lambda: whole(vae=shape)),
        "encoder alone": refusal(lambda: whole(vae=host_vae(effnet), image=small)),
        "odd picture": refusal(lambda: whole(vae=_of_four_channels(), image=small)),
        "broken": refusal(lambda: whole(vae=host_vae(broken), image=small)),
        "sigma": refusal(lambda: whole(model=unknown, sigmas="99", image=small)),
        "word": refusal(lambda: whole(model=model, sigmas="soon", image=small)),
        "percent": refusal(lambda: whole(model=model, sigmas="120%", image=small)),
        "empty": refusal(lambda: whole(model=model, sigmas=" ", image=small)),
        "dtype": refusal(lambda: whole(vae=vae, image=small, dtypes="fp5")),
        "clip": refusal(lambda: whole(clip=_without_encoders(clip))),
    }


def _of_four_channels():
    """A VAE that cannot take what it says it takes."""
    vae = host_vae(trained_vae())
    vae.process_input = lambda image: image[:, :2] if image.ndim == 4 else image
    return vae


def reference_is_float32_whatever_another_pack_allows():
    """And what it allows is allowed again afterwards; the runs in BF16 are as it would have them."""
    model, clip = checkpoint()
    vae, seen = host_vae(trained_vae()), {}
    step = Seen()

    def look(part):
        return lambda *_: seen.setdefault(f"{part} {step.line}", set()).add(torch.get_float32_matmul_precision())

    condition = clip.encode_from_tokens_scheduled(clip.tokenize("a red fox"))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    handle = torch.nn.modules.module.register_module_forward_hook(look(""))
    try:
        audit_vae(vae, picture(64), ("bf16",), 0, step)
        audit_clip(clip, "a red fox", ("bf16",), 0, step)
        model_part.audit_model(model, condition, torch.zeros(1, 4, 8, 8), ["1.0"], ("bf16",), 0, step)
        after = torch.get_float32_matmul_precision()
    finally:
        handle.remove()
        torch.set_float32_matmul_precision(before)
    return {"seen": {line.strip(): sorted(found) for line, found in seen.items()}, "after": after}


class Seen:
    """Remembers which run is at work."""

    line = ""

    def __call__(self, line):
        self.line = line


def nothing_is_left_to_collect_when_the_host_unloads():
    """Finalizers of dead models, run by the collector inside the host's own unloading, take one entry off twice."""
    model, _ = checkpoint()
    condition, latent = model_part.empty_conditioning(model), torch.zeros(1, 4, 8, 8)
    free, left = comfy.model_management.free_memory, []

    class Cycle:
        """What only the collector finds."""

        def __init__(self):
            self.itself = self

    def freeing(memory, *args, **kwargs):
        left.append([ref() is not None for ref in dead])
        return free(memory, *args, **kwargs)

    dead = []

    def step(_line):
        dead.append(weakref.ref(Cycle()))

    gc.disable()
    comfy.model_management.free_memory = freeing
    try:
        model_part.audit_model(model, condition, latent, ["1.0"], ("bf16",), 0, step)
    finally:
        comfy.model_management.free_memory = free
        gc.enable()
    return {"unloads": len(left), "collected before": not any(left[-1])}


def _without_encoders(clip):
    other = clip.clone()
    other.cond_stage_model = torch.nn.Sequential()
    return other


def stop_is_heard():
    """The host's own exception comes out, and no hook is left behind."""
    model, _ = checkpoint()
    condition, latent = model_part.empty_conditioning(model), torch.zeros(1, 4, 8, 8)
    lines = []

    def stop_at_the_second(line):
        lines.append(line)
        if len(lines) == 2:
            comfy.model_management.interrupt_current_processing(True)

    raised = ""
    try:
        model_part.audit_model(model, condition, latent, ["1.0"], ("bf16",), 0, stop_at_the_second)
    except comfy.model_management.InterruptProcessingException as stopped:
        raised = type(stopped).__name__
    layers = list(model.model.modules())
    hooks = sum(len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers)
    return {"raised": raised, "lines": lines, "hooks": hooks, "cast": str(model.model.manual_cast_dtype)}


CHECKS = {
    check.__name__: check
    for check in (
        trained_vae_in_every_dtype,
        an_overflow_is_named,
        vae_of_a_selector,
        other_vaes,
        clip_encoders,
        model_at_sigmas,
        lora_counts,
        reference_is_float32_whatever_another_pack_allows,
        nothing_is_left_to_collect_when_the_host_unloads,
        what_is_refused,
        stop_is_heard,
    )
}


if __name__ == "__main__":
    write_results(CHECKS)
