"""NaN Guard on VAEs; guard_in_host.py runs it."""

import asyncio
import copy
import gc
import weakref

from guard_probes import KL, LARGE, NAN, REPORT, RERUN, STOP, TAESD, WAN, Counted, Logged, guard_of, same, snapshot
from in_host import pack, refusal, torch  # noqa: E402  (boots the host)
from precision_nodes import BF16, FP16, FP32, guard_vae, guards, select_vae

# isort: split
import comfy.model_management  # noqa: E402
import comfy.sd  # noqa: E402
from checkpoints import build_state_dict  # noqa: E402
from comfy.ldm.models.autoencoder import AutoencoderKL  # noqa: E402
from comfy_execution.utils import CurrentNodeContext  # noqa: E402
from vae_families import FAMILIES, Family, make  # noqa: E402
from vae_probes import WINDOWS, host_vae, inputs  # noqa: E402

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
    split = select_vae(fine, "bf16", "fp16").vae  # made of FP32 weights
    after = select_vae(guarded, "bf16", "fp16").vae
    back = select_vae(after).vae
    other = copy.copy(guarded)  # as other node packs do
    other.note = 1
    pixels = torch.rand(1, 64, 64, 3)
    kept = fine.patcher.model_size() + split.patcher.model_size()
    return {
        "select, guard": same(guard_vae(split, guard).decode(latent), wanted),
        "no copy for it": fine.patcher.model_size() + split.patcher.model_size() == kept,
        "guard, select": same(after.decode(latent), wanted) and guard_of(after.first_stage_model).guard is guard,
        "its encoder": bool(torch.equal(after.encode(pixels), select_vae(coarse, "bf16", "fp16").vae.encode(pixels))),
        "encoder not guarded away": bool(torch.equal(guarded.encode(pixels), coarse.encode(pixels))),
        "default, guarded": guard_of(back.first_stage_model).source is coarse,
        "fp32 selected": same(select_vae(guarded, "default", "fp32").vae.decode(latent), wanted),
        "other packs": guard_of(other.first_stage_model).unwrap(other).note == 1,
        "copied": bool(torch.equal(pack("nodes.host.vae.host_vae").copy_vae(guarded, FP32).decode(latent), wanted)),
        "memory": [
            guarded.memory_used_decode((1, 4, 8, 8), None) == coarse.memory_used_decode((1, 4, 8, 8), FP16),
            after.memory_used_encode((1, 3, 64, 64), None) == coarse.memory_used_encode((1, 3, 64, 64), BF16),
        ],
        "dtype": [pack("nodes.host.vae.host_vae").vae_dtype(v) for v in (coarse, guarded, split, after)],
        "fingerprint": len({pack("nodes.host.vae.host_vae").vae_fingerprint(v) for v in (coarse, guarded)}) == 1,
        "saved": guarded.get_sd().keys() == coarse.get_sd().keys(),
    }


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
