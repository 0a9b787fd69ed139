"""NaN Guard on the host's objects; tests/host/test_guard.py reads the results.

python tests/host/guard_in_host.py HOST_FOLDER RESULT.json CHECKPOINT_FOLDER
"""

import asyncio
import copy
import gc
import logging
import sys
import weakref
from pathlib import Path

CHECKPOINT = Path(sys.argv.pop(3)) / "sd15_min_strided.ckpt"

from in_host import pack, refusal, sample, torch, write_results  # noqa: E402  (boots the host)

# isort: split
import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.sdxl_clip  # noqa: E402
import comfy.supported_models_base  # noqa: E402
from checkpoints import build_state_dict  # noqa: E402
from comfy.ldm.models.autoencoder import AutoencoderKL  # noqa: E402
from comfy.patcher_extension import PatcherInjection  # noqa: E402
from comfy_execution.utils import CurrentNodeContext  # noqa: E402
from vae_families import FAMILIES, Family, make  # noqa: E402
from vae_precision_in_host import WINDOWS, host_vae, inputs  # noqa: E402

guards = pack("nodes.host.patching.guard")
guard_model = pack("nodes.host.model.guard").guard_model
guard_vae = pack("nodes.host.vae.guard").guard_vae
guard_clip = pack("nodes.host.clip.guard").guard_clip
guard_of = pack("nodes.host.patching.shell").guard_of
select = pack("nodes.host.vae.select").select_vae_precision
LOADED_STATE = pack("nodes.host.patching.private_copy").LOADED_STATE
STOP, RERUN, REPORT = guards.STOP, guards.RERUN, guards.REPORT
FP32, BF16, FP16, NAN = torch.float32, torch.bfloat16, torch.float16, float("nan")
LARGE = 2.0**16  # a power of two: the weights stay exact in FP16
TAESD, KL, WAN = "TAESD", "AutoencoderKL", "Wan 2.1 and Qwen Image (WanVAE)"


class Logged(logging.Handler):
    """Within the block, the warnings of the pack."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("ref2v").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("ref2v").removeHandler(self)

    def emit(self, record):
        if record.levelno == logging.WARNING:
            self.lines.append(record.getMessage())


class Counted:
    """Within the block, how often layers ran, and how many hooks they then had."""

    def __enter__(self):
        self.calls = self.hooks = 0
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_):
        self._handle.remove()

    def _count(self, layer, _args):
        self.calls += 1
        self.hooks += len(layer._forward_hooks) + len(layer._forward_pre_hooks)


def snapshot(thing, module, patcher):
    """Everything about a MODEL, VAE or CLIP that a guard must leave alone."""
    layers = [
        (name, id(layer), sorted(layer.__dict__), len(layer._forward_hooks), len(layer._forward_pre_hooks))
        for name, layer in module.named_modules()
    ]
    weights = [
        (name, id(weight), weight.dtype, str(weight.device), str(weight.double().sum().item()), weight.data_ptr())
        for name, weight in [*module.named_parameters(), *module.named_buffers()]
    ]
    booked = [(name, str(module.__dict__[name])) for name in LOADED_STATE if name in module.__dict__]
    options = [(name, str(value)) for name, value in sorted(patcher.__dict__.items())]
    return repr((layers, weights, booked, options, [(k, id(v)) for k, v in sorted(vars(thing).items())]))


def same(a, b):
    return bool(torch.equal(a, b) and a.dtype == b.dtype and torch.isfinite(a).all() and a.std() > 0)


# ---------------------------------------------------------------------------------------------------------------- MODEL

OVERFLOWS = "input_blocks.1.0.in_layers.2"
POISONED = "output_blocks.0.1.transformer_blocks.0.attn2.to_v"
CONTEXT = [[torch.randn(1, 77, 768, generator=torch.Generator().manual_seed(3)), {}]]
LATENT = torch.zeros(1, 4, 8, 8)


def unet(dtype=FP32):
    """The MODEL of the small checkpoint, kept and computing in `dtype`; the weights are the same in each."""
    model = comfy.sd.load_checkpoint_guess_config(
        str(CHECKPOINT), output_vae=False, output_clip=False, model_options={"dtype": dtype}
    )[0]
    for weight in model.model.diffusion_model.parameters():
        weight.copy_(weight.half())
    if dtype != FP32:
        model.set_model_compute_dtype(dtype)  # a CPU would compute in FP32
    return model


def spoil(network, key, factor):
    network.get_parameter(key).mul_(factor)


def poison(network, key):
    network.get_parameter(key).view(-1)[3] = NAN


def drawn(model, context=CONTEXT, latent=LATENT, steps=2, **more):
    return sample(model, context, latent, steps=steps, cfg=2.0, negative=CONTEXT, **more)


def model_stops_at_a_poisoned_weight():
    model = unet()
    poison(model.model.diffusion_model, f"{POISONED}.weight")
    return refusal(lambda: drawn(guard_model(model, guards.Guard(STOP))))


def model_overflow():
    """In FP16, and with LoRA before and after the guard; each against the host's own FP32 run."""
    lora = {"diffusion_model.out.2.bias": ("diff", (torch.full((4,), 0.37),))}
    coarse, fine = unet(FP16), unet()
    for model in (coarse, fine):
        spoil(model.model.diffusion_model, f"{OVERFLOWS}.weight", LARGE)
    wanted, raw = drawn(fine), drawn(coarse)
    before = snapshot(coarse, coarse.model, coarse)
    guarded = guard_model(coarse, guards.Guard(RERUN))
    with Logged() as log:
        mended = drawn(guarded)
    found = {
        "raw is finite": bool(torch.isfinite(raw).all()),
        "stop": refusal(lambda: drawn(guard_model(coarse, guards.Guard(STOP)))),
        "log": log.lines,
        "mended": same(mended, wanted),
        "source unchanged": before == snapshot(coarse, coarse.model, coarse),
        "copy freed": guarded.get_wrappers("apply_model", "ref2v_nan_guard")[0]._fine is None,
    }
    after, first, fine_lora = guarded.clone(), coarse.clone(), fine.clone()
    for model in (after, first, fine_lora):
        model.add_patches(lora)
    wanted_lora = drawn(fine_lora)
    return found | {
        "lora after": same(drawn(after), wanted_lora),
        "lora before": same(drawn(guard_model(first, guards.Guard(RERUN))), wanted_lora),
        "lora differs": bool((wanted_lora - wanted).abs().max() > 1e-3),
    }


def model_reports_only():
    model = unet()
    poison(model.model.diffusion_model, f"{POISONED}.weight")
    with Logged() as log, CurrentNodeContext("prompt", "sampler"):
        guarded = drawn(guard_model(model, guards.Guard(REPORT)))
    return {"lines": log.lines, "as it is": bool(torch.isnan(guarded).all() and torch.isnan(drawn(model)).all())}


def model_input_is_not_blamed_on_a_layer():
    model = guard_model(unet(), guards.Guard(RERUN))
    spoilt = [[CONTEXT[0][0].clone(), {}]]
    spoilt[0][0][0, 0, 0] = NAN
    latent = torch.full_like(LATENT, NAN)
    return {
        "latent": refusal(lambda: drawn(model, latent=latent)),
        "conditioning": refusal(lambda: drawn(model, context=spoilt)),
    }


def model_that_fp32_cannot_help():
    model = unet(FP16)
    spoil(model.model.diffusion_model, f"{OVERFLOWS}.weight", LARGE)
    poison(model.model.diffusion_model, f"{POISONED}.weight")
    whole = unet()
    poison(whole.model.diffusion_model, f"{POISONED}.weight")
    return {
        "both": refusal(lambda: drawn(guard_model(model, guards.Guard(RERUN)))),
        "fp32 already": refusal(lambda: drawn(guard_model(whole, guards.Guard(RERUN)))),
    }


def model_between_two_steps():
    """Heun asks for the network between its steps as well; ControlNet's tensors come to the repeated call too."""
    model = unet(FP16)
    spoil(model.model.diffusion_model, f"{OVERFLOWS}.weight", LARGE)
    with Logged() as log:
        drawn(guard_model(model, guards.Guard(RERUN)), steps=2, sampler="heun")

    watch = guard_model(model, guards.Guard(REPORT)).get_wrappers("apply_model", "ref2v_nan_guard")[0]
    seen = []

    class Executor:
        class_obj = model.model

        def __call__(self, x, t, c_concat, c_crossattn, control, options):
            seen.append(len(control["output"]))
            control["output"].pop()
            return x * NAN

    watch(Executor(), torch.ones(1), torch.ones(1), control={"output": [torch.ones(1), None]}, transformer_options={})
    return {"log": log.lines, "control": seen}


# ------------------------------------------------------------------------------------------------------------------ VAE

LAYERS = {
    TAESD: ("taesd_encoder.0", "taesd_decoder.1", LARGE),
    KL: ("encoder.mid.block_1.conv1", "decoder.mid.block_1.conv1", 4 * LARGE),
    WAN: ("encoder.conv1", "decoder.conv1", LARGE),
}


# The VAE of SD and SDXL a quarter as wide: FP16 is slow on a CPU. The host builds such a one when it is told the shape.
_NARROW = {"double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32, "dropout": 0.0}
_NARROW |= {"ch_mult": [1, 2, 2, 2], "num_res_blocks": 1, "attn_resolutions": []}
_TILES = {"tile_x": 4, "tile_y": 4, "overlap": 1}
NARROW = Family(lambda: AutoencoderKL(ddconfig=_NARROW, embed_dim=4), (1, 32, 32, 3), (1, 4, 4, 4), _TILES)


def loaded(name, state, dtype=FP32):
    if name != KL:
        return host_vae(state, dtype)
    state = {key: value.clone() for key, value in state.items()}
    return comfy.sd.VAE(sd=state, dtype=dtype, config={"params": {"ddconfig": _NARROW, "embed_dim": 4}})


def state_of(name):
    if name != KL:
        return make(name, WINDOWS)
    with torch.device("meta"):
        return build_state_dict({"": NARROW.module()}, WINDOWS)


def worked(vae, family, half, tiled):
    pixels, latent = inputs(family)
    if half == "encoder":
        tiles = {key: size * family.scale for key, size in family.tiles.items()}
        return vae.encode_tiled(pixels, **tiles) if tiled else vae.encode(pixels)
    return vae.decode_tiled(latent, **family.tiles) if tiled else vae.decode(latent)


def vae(name):
    """One family: a poisoned weight and an FP16 overflow in each half, whole and tiled."""
    family, found = NARROW if name == KL else FAMILIES[name], {}
    for half, layer in zip(("encoder", "decoder"), LAYERS[name], strict=False):
        state = {k: v.half().float().contiguous() if v.is_floating_point() else v for k, v in state_of(name).items()}
        poisoned, huge = dict(state), dict(state)
        poisoned[f"{layer}.weight"] = state[f"{layer}.weight"].clone()
        poisoned[f"{layer}.weight"].view(-1)[0] = NAN
        huge[f"{layer}.weight"] = state[f"{layer}.weight"] * LAYERS[name][2]
        bad, healthy = loaded(name, poisoned), loaded(name, state)
        coarse, fine = loaded(name, huge, FP16), loaded(name, huge)
        said = found[half] = {"layer": layer}
        said["poisoned"] = refusal(lambda: worked(guard_vae(bad, guards.Guard(STOP)), family, half, False))  # noqa: B023
        said["overflow"] = refusal(lambda: worked(guard_vae(coarse, guards.Guard(STOP)), family, half, False))  # noqa: B023
        raw = worked(coarse, family, half, False)
        before = snapshot(coarse, coarse.first_stage_model, coarse.patcher)
        mended = guard_vae(coarse, guards.Guard(RERUN))
        reported = worked(guard_vae(coarse, guards.Guard(REPORT)), family, half, False)
        said["report is raw"] = bool(torch.equal(torch.isnan(raw), torch.isnan(reported)) and torch.isnan(raw).any())
        for tiled in (False, True):
            said[f"tiled {tiled}"] = same(worked(mended, family, half, tiled), worked(fine, family, half, tiled))
            with Counted() as plain:
                wanted = worked(healthy, family, half, tiled)
            with Counted() as watched:
                got = worked(guard_vae(healthy, guards.Guard(STOP)), family, half, tiled)
            said[f"normal {tiled}"] = same(got, wanted) and plain.calls == watched.calls > 0 == watched.hooks
        said["source unchanged"] = before == snapshot(coarse, coarse.first_stage_model, coarse.patcher)
    return found


TAESD_STATE = {k: v.half().float() for k, v in make(TAESD, WINDOWS).items()}
TAESD_STATE["taesd_decoder.1.weight"] *= LARGE


def overflowing(dtype=FP16):
    return host_vae(TAESD_STATE, dtype)


def vae_composes_with_select():
    coarse, fine = overflowing(), overflowing(FP32)
    latent = torch.randn(1, 4, 8, 8)
    wanted = fine.decode(latent)
    guard = guards.Guard(RERUN)
    guarded = guard_vae(coarse, guard)
    split = select(fine, "bf16", "fp16").vae  # made of FP32 weights
    after = select(guarded, "bf16", "fp16").vae
    back = select(after).vae
    other = copy.copy(guarded)  # as other node packs do
    other.note = 1
    pixels = torch.rand(1, 64, 64, 3)
    kept = fine.patcher.model_size() + split.patcher.model_size()
    return {
        "select, guard": same(guard_vae(split, guard).decode(latent), wanted),
        "no copy for it": fine.patcher.model_size() + split.patcher.model_size() == kept,
        "guard, select": same(after.decode(latent), wanted) and guard_of(after.first_stage_model).guard is guard,
        "its encoder": bool(torch.equal(after.encode(pixels), select(coarse, "bf16", "fp16").vae.encode(pixels))),
        "encoder not guarded away": bool(torch.equal(guarded.encode(pixels), coarse.encode(pixels))),
        "default, guarded": guard_of(back.first_stage_model).source is coarse,
        "fp32 selected": same(select(guarded, "default", "fp32").vae.decode(latent), wanted),
        "other packs": guard_of(other.first_stage_model).without(other).note == 1,
        "copied": bool(torch.equal(pack("nodes.host.vae.host_vae").copy_vae(guarded, FP32).decode(latent), wanted)),
        "memory": [
            guarded.memory_used_decode((1, 4, 8, 8), None) == coarse.memory_used_decode((1, 4, 8, 8), FP16),
            after.memory_used_encode((1, 3, 64, 64), None) == coarse.memory_used_encode((1, 3, 64, 64), BF16),
        ],
        "dtype": [pack("nodes.host.vae.host_vae").vae_dtype(v) for v in (coarse, guarded, split, after)],
        "fingerprint": len({pack("nodes.host.vae.host_vae").vae_fingerprint(v) for v in (coarse, guarded)}) == 1,
        "saved": guarded.get_sd().keys() == coarse.get_sd().keys(),
    }


def two_guards_are_the_last_one():
    vae, model, clip = overflowing(), unet(), text_encoders()
    first, last = guards.Guard(STOP), guards.Guard(RERUN)
    twice = guard_vae(guard_vae(vae, first), last).first_stage_model
    text = guard_clip(guard_clip(clip, first), last).cond_stage_model
    return {
        "vae": guard_of(twice).guard is last and guard_of(twice).source is vae,
        "one shell": type(twice).__bases__ == (type(vae.first_stage_model),),
        "model": [
            w.guard is last
            for w in guard_model(guard_model(model, first), last).get_all_wrappers("apply_model")
        ],
        "clip": guard_of(text).guard is last and type(text).__bases__ == (type(clip.cond_stage_model),),
    }  # fmt: skip


def objects_go_when_nobody_uses_them():
    vae = overflowing()
    guarded = guard_vae(vae, guards.Guard(RERUN))
    latent = torch.randn(1, 4, 8, 8)
    with CurrentNodeContext("prompt", "decode"):
        guarded.decode(latent)
    fine = weakref.ref(guard_of(guarded.first_stage_model)._fine[2]())
    while_used = fine() is not None
    with CurrentNodeContext("prompt", "other"):
        guarded.encode(torch.rand(1, 64, 64, 3))
    gc.collect()
    dropped, kept = fine() is None, weakref.ref(vae)
    del guarded, vae
    gc.collect()
    return {"used": while_used, "dropped by the next node": dropped, "source": kept() is None}


def an_fp32_half_goes_with_its_prompt():
    """The host runs each prompt as a task of its own, whether it ends well, fails or is cancelled."""
    vae, latent = overflowing(), torch.randn(1, 4, 8, 8)
    guarded, seen = guard_vae(vae, guards.Guard(RERUN)), {}

    async def prompt(ends):
        with CurrentNodeContext(ends, "decode"):
            guarded.decode_tiled(latent, tile_x=4, tile_y=4, overlap=1)
            halves = guard_of(guarded.first_stage_model)._fine[2]
            again = guarded.decode(latent)
            seen[ends] = [halves, guard_of(guarded.first_stage_model)._fine[2]() is halves()]
        if ends == "fails":
            raise ValueError
        if ends == "cancelled":
            raise comfy.model_management.InterruptProcessingException
        return again

    for ends in ("well", "fails", "cancelled"):
        try:
            asyncio.run(prompt(ends))
        except (ValueError, comfy.model_management.InterruptProcessingException):
            pass
        gc.collect()
        seen[ends][0] = seen[ends][0]() is None
    return seen


def one_sentence_for_many_tiles():
    """Tiles of one node are alike: the layer is looked for once."""
    family, lines = FAMILIES[TAESD], {}
    for mode in (REPORT, RERUN):
        vae = guard_vae(overflowing(), guards.Guard(mode))
        with Logged() as log, CurrentNodeContext("prompt", "decode"), Counted() as counted:
            worked(vae, family, "decoder", True)
        with Logged() as again, CurrentNodeContext("prompt 2", "decode"):
            worked(vae, family, "decoder", True)
        lines[mode] = [len([line for line in said if "first in" in line]) for said in (log.lines, again.lines)]
        lines[f"{mode} hooked"] = counted.hooks > 0
    return lines


def vae_that_cannot_be_run_again():
    vae = overflowing()
    vae.patcher.patches["taesd_decoder.3.conv.0.weight"] = [object()]
    guarded = guard_vae(vae, guards.Guard(RERUN))
    with Counted():
        return refusal(lambda: guarded.first_stage_model.decode(torch.randn(1, 4, 8, 8)))


def newer_hosts_write_into_a_buffer():
    """A VAE that fills `output_buffer` and returns None, another that gives a list of chunks and None."""
    from comfy.taesd.taesd import TAESD as Family

    class TAESDBuffer(Family):
        def decode(self, x, output_buffer=None):
            output_buffer.copy_(super().decode(x))

    class TAESDChunks(Family):
        def decode(self, x):
            return [super().decode(x), None]

    class Nothing(Family):
        def decode(self, x):
            return None

    latent, found = torch.randn(1, 4, 8, 8), {}
    for kind in (TAESDBuffer, TAESDChunks):
        kind.__name__ = "TAESD"
        coarse, fine = overflowing(), overflowing(FP32)
        coarse.first_stage_model.__class__ = fine.first_stage_model.__class__ = kind
        give = {"output_buffer": torch.zeros(1, 3, 64, 64)} if kind is TAESDBuffer else {}
        want = {"output_buffer": torch.zeros(1, 3, 64, 64)} if kind is TAESDBuffer else {}
        wanted = fine.first_stage_model.decode(latent, **want)
        got = guard_vae(coarse, guards.Guard(RERUN)).first_stage_model.decode(latent, **give)
        stop = guard_vae(coarse, guards.Guard(STOP)).first_stage_model
        found[kind.__qualname__.rsplit(".", 1)[-1]] = [
            same(give["output_buffer"], want["output_buffer"]) and got is None if give else same(got[0], wanted[0]),
            refusal(lambda: stop.decode(latent, **give)),  # noqa: B023
        ]
    empty = overflowing()
    empty.first_stage_model.__class__ = Nothing
    found["none"] = guard_vae(empty, guards.Guard(STOP)).first_stage_model.decode(latent) is None
    return found


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


# ----------------------------------------------------------------------------------------------------------------- cost


def nothing_is_hooked_while_all_is_finite():
    model, clip = unet(), text_encoders()
    found = {}
    for name, plain, watched, work in (
        ("model", model, guard_model(model, guards.Guard(RERUN)), drawn),
        ("clip", clip, guard_clip(clip, guards.Guard(RERUN)), lambda clip: encoded(clip)[0]),
    ):
        with Counted() as alone:
            wanted = work(plain)
        with Counted() as guarded:
            got = work(watched)
        found[name] = [same(got, wanted), alone.calls == guarded.calls > 0, guarded.hooks]
    return found


CHECKS = {name: lambda name=name: vae(name) for name in LAYERS} | {
    check.__name__: check
    for check in (
        model_stops_at_a_poisoned_weight,
        model_overflow,
        model_reports_only,
        model_input_is_not_blamed_on_a_layer,
        model_that_fp32_cannot_help,
        model_between_two_steps,
        vae_composes_with_select,
        two_guards_are_the_last_one,
        objects_go_when_nobody_uses_them,
        an_fp32_half_goes_with_its_prompt,
        one_sentence_for_many_tiles,
        vae_that_cannot_be_run_again,
        newer_hosts_write_into_a_buffer,
        clip_poisoned,
        clip_that_the_file_lacks,
        clip_overflow,
        clip_input_is_not_blamed_on_a_layer,
        nothing_is_hooked_while_all_is_finite,
    )
}

if __name__ == "__main__":
    write_results(CHECKS)
