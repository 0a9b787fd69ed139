"""The audit of VAEs; audit_in_host.py runs it."""

from audit_probes import BF16, FP16, audit_vae, findings, host_vae, keep, picture, select, snapshot, support, whole
from in_host import torch  # boots the host

# isort: split
from checkpoints import Windows  # noqa: E402
from trained_vae import trained_vae  # noqa: E402
from vae_families import FAMILIES, make  # noqa: E402

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
