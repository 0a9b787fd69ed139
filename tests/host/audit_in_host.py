"""The audit on the host's own objects; tests/host/test_audit.py reads the results.

See in_host.py for how it is run. REF2V_CHECKPOINT is a checkpoint of tests/host/checkpoints.py; REF2V_PICTURES, where
set, is a folder that the charts and difference pictures are written to, for a person to look at.
"""

import gc
import os
import weakref
from functools import cache
from pathlib import Path

from in_host import comfy, error, pack, refusal, sample, torch, write_results  # boots the host

# isort: split
import comfy.model_management  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
from checkpoints import Windows  # noqa: E402
from trained_vae import template_pictures, trained_vae  # noqa: E402
from vae_families import FAMILIES, make  # noqa: E402

audit = pack("nodes.host.precision.audit").audit_precision
audit_clip = pack("nodes.host.clip.audit").audit_clip
model_part = pack("nodes.host.model.audit")
audit_vae = pack("nodes.host.vae.audit").audit_vae
select = pack("nodes.host.vae.select").select_vae_precision
plans = pack("training.precision.plan")
LOADED_STATE = pack("nodes.host.patching.private_copy").LOADED_STATE
findings = pack("training.precision.assessment").findings
support = pack("training.precision.device").support
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PICTURES = os.environ.get("REF2V_PICTURES")
SMALL_CLIP = {"num_hidden_layers": 2}


def whole(**inputs):
    """The audit with the inputs that a check does not name left empty."""
    empty = dict.fromkeys(("model", "clip", "vae", "image", "positive"))
    wanted = {"prompt": "a red fox", "sigmas": "early, 1.0", "dtypes": "bf16", "seed": 0, "node_id": None}
    return audit(**{**empty, **wanted, **inputs})


def keep(found, name):
    """Write the pictures down where a person asked for them."""
    if PICTURES is None:
        return
    from PIL import Image

    folder = Path(PICTURES)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(found.report)
    for kind, batch in (("chart", found.chart), ("difference", found.differences)):
        for number, picture in enumerate(batch):
            Image.fromarray((picture * 255).round().byte().numpy()).save(folder / f"{name}_{kind}{number}.png")


def picture(side=128):
    """A picture that the trained VAE has not seen, [1, side, side, 3]."""
    return template_pictures(1, side)[0].movedim(0, -1)[None].contiguous()


@cache
def checkpoint(again=0):
    """(MODEL, CLIP): one level of SD 1.5, and its text encoder cut to two layers."""
    options = {"clip_l_model_config": SMALL_CLIP}
    path = os.environ["REF2V_CHECKPOINT"]
    return comfy.sd.load_checkpoint_guess_config(path, output_vae=False, te_model_options=options)[:2]


def snapshot(root, patcher):
    """What an audit must leave alone: weights, dtypes, hooks, attributes of every module, and the patcher; all models
    being unloaded, and without what the host's own loading leaves on a module.
    """
    comfy.model_management.unload_all_models()
    by_loading = {*LOADED_STATE, "comfy_cast_weights", "weight_function", "bias_function"}
    modules = [
        (name, id(layer), sorted(layer.__dict__.keys() - by_loading), len(layer._forward_hooks),
         len(layer._forward_pre_hooks), getattr(layer, "comfy_cast_weights", None))
        for name, layer in root.named_modules()
    ]  # fmt: skip
    weights = [
        (name, id(weight), str(weight.dtype), str(weight.device), weight.double().sum().item(), weight.data_ptr())
        for name, weight in [*root.named_parameters(), *root.named_buffers()]
    ]
    plain = {k: v for k, v in patcher.__dict__.items() if isinstance(v, (int, float, str, dict, list, type(None)))}
    return repr((modules, weights, getattr(root, "manual_cast_dtype", None), sorted(plain.items(), key=str)))


def host_vae(state, dtype=FP32):
    return comfy.sd.VAE(sd={key: value.clone() for key, value in state.items()}, dtype=dtype)


# ----------------------------------------------------------------------------------------------------------- the checks


def trained_vae_in_every_dtype():
    """A decoder that gives pictures: its error in BF16 and FP16, and the same measured beside the audit."""
    state, pixels = trained_vae(), picture(64)
    vae = host_vae(state)
    latent = vae.encode(pixels)
    straight = vae.decode(latent)
    large = picture(256)  # of a small one little but the border is left
    both = (vae.decode(vae.encode(large)), large)
    before = snapshot(vae.first_stage_model, vae.patcher)
    seen = audit_vae(vae, pixels, ("bf16", "fp16"), 0, lambda line: None)
    found = whole(vae=vae, image=pixels, dtypes="bf16 and fp16")
    keep(found, "trained_vae")
    by_hand = {}
    for name, dtype in (("bf16", BF16), ("fp16", FP16)):
        low = host_vae(state, dtype).decode(latent)
        by_hand[name] = -10 * float(torch.log10((low - straight).double().square().mean()))
    decoder = seen.parts[1].audit.layers["taesd_decoder"]
    return {
        "like the picture": float(torch.corrcoef(torch.stack([x[:, 32:-32, 32:-32].flatten() for x in both]))[0, 1]),
        "errors": {half: {name: vars(e) for name, e in by.items()} for half, by in seen.errors.items()},
        "psnr by hand": by_hand,
        "so far": {name: decoder.so_far[name].relative for name in ("bf16", "fp16")},
        "layers": [len(part.layers) for part in seen.parts],
        "own": {name: max(layer.own[name].relative for layer in seen.parts[1].layers if layer.own) for name in by_hand},
        "findings": [clause for part in seen.parts for layer in part.layers for clause in findings(layer, ("bf16",))],
        "report": found.report,
        "plan": found.plan.to_json(),
        "native": {name: support(vae.patcher.load_device, dtype).native
                   for name, dtype in (("bf16", BF16), ("fp16", FP16))},
        "range used": {name: max(layer.range_used(name) for part in seen.parts[1:] for layer in part.layers)
                       for name in ("bf16", "fp16")},
        "differences": list(found.differences.shape),
        "chart": [*found.chart.shape, float(found.chart.std())],
        "unchanged": before == snapshot(vae.first_stage_model, vae.patcher),
        "again": bool(torch.equal(vae.decode(latent), straight)),
    }


def an_overflow_is_named():
    """A decoder whose middle is so loud that FP16 cannot hold it, and whose end makes up for that."""
    state = trained_vae()
    state["taesd_decoder.12.weight"] = state["taesd_decoder.12.weight"] * 3e5
    state["taesd_decoder.17.weight"] = state["taesd_decoder.17.weight"] / 3e5
    vae = host_vae(state)
    found = whole(vae=vae, image=picture(32), dtypes="fp16")
    keep(found, "overflow")
    over = [line for line in found.report.splitlines() if line.startswith("- ") and "overflow in fp16" in line]
    return {"over": over, "report": found.report, "plan": found.plan.vae_decoder}


def vae_of_a_selector():
    """A split VAE is measured by the weights behind it, in either order, and stays what it is."""
    vae = host_vae(trained_vae())
    split = select(vae, "bf16", "default").vae
    pixels = picture(64)
    latent = split.encode(pixels)
    one, other = (audit_vae(which, pixels, ("bf16",), 0, lambda line: None) for which in (vae, split))
    return {
        "same": one.errors["decoder"]["bf16"] == other.errors["decoder"]["bf16"],
        "again": bool(torch.equal(split.encode(pixels), latent)),
        "rounded": whole(vae=host_vae(trained_vae(), BF16), image=pixels).report,
    }


def other_vaes():
    """One of video, and one that only decodes."""
    windows = Windows(1 << 20)
    found = {}
    for name in ("TAEHV", "TAEHV of Wan 2.2"):
        family = FAMILIES[name]
        vae = host_vae(make(name, windows))
        seen = audit_vae(vae, torch.rand(family.pixels), ("bf16",), 0, lambda line: None)
        found[name] = {
            "parts": [part.name for part in seen.parts],
            "error": seen.errors["decoder"]["bf16"].psnr,
            "layers": [len(part.layers) for part in seen.parts],
            "notes": seen.notes,
            "choices": sorted(seen.choices),
        }
    return found


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
