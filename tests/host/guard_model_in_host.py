"""NaN Guard on a MODEL; guard_in_host.py runs it."""

from guard_probes import CHECKPOINT, LARGE, NAN, REPORT, RERUN, STOP, Logged, poison, same, snapshot, spoil
from in_host import refusal, sample, torch  # noqa: E402  (boots the host)
from precision_nodes import FP16, FP32, guard_model, guards

# isort: split
import comfy.sd  # noqa: E402
from comfy_execution.utils import CurrentNodeContext  # noqa: E402

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
