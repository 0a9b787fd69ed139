"""A precision plan on the host's MODEL, CLIP and VAE at once; tests/host/test_precision_plan.py reads the results.

See in_host.py for how it is run.
"""

from in_host import pack, torch, write_results  # boots the host

# isort: split
import comfy.sd  # noqa: E402
from checkpoints import Windows  # noqa: E402
from clip_families import host_clip  # noqa: E402
from torch.nn import Linear  # noqa: E402
from unets import host_model, scaled_fp8_model  # noqa: E402
from vae_families import make  # noqa: E402

plans = pack("nodes.host.precision.plan")
apply_plan = plans.apply_plan
PrecisionPlan = pack("training.precision.plan").PrecisionPlan
preset_plan = pack("training.precision.presets").preset_plan
encoder_dtypes = pack("nodes.host.clip.select").encoder_dtypes
model_dtypes = pack("nodes.host.model.select").model_dtypes
vae_dtypes = pack("nodes.host.vae.select").vae_dtypes
WINDOWS = Windows(1 << 20)


def loaded():
    vae = comfy.sd.VAE(sd=make("TAESD", WINDOWS), dtype=torch.float32)
    return {"model": host_model("SD 1.5"), "clip": host_clip("SD 3"), "vae": vae}


def runs_in(planned):
    """Every part's dtypes, by name."""
    clip = {name: [str(kept), str(computes)] for name, (kept, computes) in encoder_dtypes(planned.clip).items()}
    return {
        "model": [str(dtype) for dtype in model_dtypes(planned.model)],
        "vae": [str(dtype) for dtype in vae_dtypes(planned.vae)],
        **clip,
    }


def presets():
    given = loaded()
    before = runs_in(plans.PlannedModels(**given, table=""))
    found = {}
    for name in ("recommended", "article", "quality", "fast", "low memory", "auto"):
        planned = apply_plan(preset_plan(name, plans.device_of(**given)), **given)
        found[name] = {"runs in": runs_in(planned), "table": planned.table}
    found["sources"] = before == runs_in(plans.PlannedModels(**given, table=""))
    return found


def an_empty_plan_restores_what_was_loaded():
    given = loaded()
    planned = apply_plan(preset_plan("article", plans.device_of(**given)), **given)
    again = apply_plan(
        PrecisionPlan(vae_decoder="bf16"), model=planned.model, clip=planned.clip, vae=planned.vae
    )  # forgets all that article chose
    restored = apply_plan(PrecisionPlan(), model=again.model, clip=again.clip, vae=again.vae)
    return {
        "replaced": runs_in(again),
        "very objects": [getattr(restored, name) is value for name, value in given.items()],
    }


def a_named_encoder_has_the_last_word():
    given = loaded()
    plan = PrecisionPlan(clip={"t5xxl": ("bf16", "default"), "all": ("fp16", "default"), "llama": ("fp16", "fp16")})
    return runs_in(apply_plan(plan, **given))


def what_is_absent_stays_absent():
    given = loaded()
    planned = apply_plan(preset_plan("article", plans.device_of(vae=given["vae"])), vae=given["vae"])
    return {
        "absent": [planned.model, planned.clip],
        "table": planned.table,
        "device": str(plans.device_of()),
    }


def a_part_that_cannot_be_changed_passes_through():
    """A MODEL of quantized weights, a CLIP without known encoders and a patched VAE, each beside ordinary ones."""
    plan = preset_plan("article", torch.device("cpu"))
    odd = {"model": scaled_fp8_model(), "clip": loaded()["clip"], "vae": loaded()["vae"]}
    odd["clip"].cond_stage_model = Linear(2, 2)
    key = next(iter(odd["vae"].first_stage_model.state_dict()))
    odd["vae"].patcher.add_patches({key: (torch.zeros_like(odd["vae"].first_stage_model.state_dict()[key]),)})
    found = {}
    for part, value in odd.items():
        given = {**loaded(), part: value}
        planned = apply_plan(plan, **given)
        rows = planned.table.split("\n\n")[0].splitlines()
        found[part] = {
            "row": next(row for row in rows if row.startswith(f"| {part.upper()}")),
            "table": planned.table,
            "others changed": [name for name in given if name != part and getattr(planned, name) is not given[name]],
            "passes through": getattr(planned, part) is value,
        }
    planned = apply_plan(plan, **{**loaded(), "model": odd["model"]}).model
    found["model"]["computes in"] = str(planned.get_model_object("manual_cast_dtype"))
    return found


CHECKS = {
    check.__name__: check
    for check in (
        presets,
        an_empty_plan_restores_what_was_loaded,
        a_named_encoder_has_the_last_word,
        what_is_absent_stays_absent,
        a_part_that_cannot_be_changed_passes_through,
    )
}

if __name__ == "__main__":
    write_results(CHECKS)
