"""Model Memory behind our own selectors and guards, against real runs of the host, for test_selected_memory.py.

`python tests/host/selected_memory_in_host.py HOST_FOLDER RESULT.json [check ...]`, see in_host.py.
"""

from functools import partial

from in_host import comfy, pack, refusal, sample, torch, write_results  # boots the host
from memory_probes import SD15, StorageMeter, estimates, make_model, make_vae, traced

precision = pack("nodes.host.model.select")
vae_precision = pack("nodes.host.vae.select")
Keep = precision.Keep

SIZE = {"size": "custom", "width": 128, "height": 128, "batch_size": 1, "frames": 1}
LORA_KEY = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"


def estimate(model, backend="sub-quadratic", **more):
    options = {"backend": backend, "cfg": True, "text_tokens": 0, "memory_gib": 0.0}
    return estimates.model_memory(model, **SIZE, **options, **more)


def said(model, **more):
    """What must not depend on which clone is loaded: (dtype, bytes of weights, bytes of a step, the host's figure)."""
    found = estimate(model, **more)
    phase = found.phase("sampling")
    return [found.dtype, found.weights, phase.working, phase.host]


def run_once(model):
    positive, negative = ([[torch.randn(1, 77, 768), {"pooled_output": torch.zeros(1, 1280)}]] for _ in range(2))
    return sample(model, positive, torch.randn(1, 4, 16, 16), steps=1, cfg=7.0, negative=negative)


def measured(model):
    """Bytes beside the weights at the peak of a real step, with the MODEL loaded."""
    comfy.model_management.load_models_gpu([model])
    meter = StorageMeter()
    meter.hold("weights", [*model.model.parameters(), *model.model.buffers()])
    with meter:
        run_once(model)
    return meter.peak - meter.labels["weights"]


SELECTIONS = {
    "compute bf16": {"compute": "bf16"},
    "storage bf16": {"storage": "bf16"},
    "both bf16": {"compute": "bf16", "storage": "bf16"},
    "bf16, norms in fp32": {"compute": "bf16", "keep": Keep(norms=True)},
    "bf16, last and embeddings in fp32": {"compute": "bf16", "keep": Keep(embeddings=True, in_out=True)},
    "bf16, softmax in fp32": {"compute": "bf16", "keep": Keep(attention_softmax=True)},
}
PATCHED = ("compute bf16", "both bf16")


def check_models():
    """{selection: what is said before anything ran, after the source, after the selected one; and a real peak}."""
    found = {}
    for name, chosen in SELECTIONS.items():
        for patched in (False, True) if name in PATCHED else (False,):
            source = make_model("SD15", torch.float32, **SD15)
            if patched:
                source.add_patches({LORA_KEY: ("diff", (torch.zeros(64, 64),))})
            chosen = {"compute": "default", "storage": "default", **chosen}
            selected = precision.select_model_precision(source, **chosen).model
            weights = sum(each.nbytes for each in selected.model.diffusion_model.parameters())
            before, source_before = said(selected), said(source)
            run_once(source)
            after_source = said(selected), said(source)
            peak = measured(selected)
            after_both = said(selected), said(source)
            found[f"{name}{', LoRA' if patched else ''}"] = {
                "computes": str(precision.model_dtypes(selected)[1]),
                "weights": weights + (64 * 64 * 4 if patched else 0),
                "selected": [before, after_source[0], after_both[0]],
                "source": [source_before, after_source[1], after_both[1]],
                "measured": peak,
            }
    return found


def check_softmax():
    """What both memory nodes say to attention whose scores are in FP32, and to one that another node has replaced."""
    source = make_model("SD15", torch.float32, **SD15)
    selected, plain = (
        precision.select_model_precision(source, "bf16", "default", Keep(attention_softmax=kept)).model
        for kept in (True, False)
    )
    foreign = source.clone()
    foreign.model_options["transformer_options"] = {"optimized_attention_override": lambda f, *a, **k: f(*a, **k)}
    both = precision.select_model_precision(foreign, "bf16", "default", Keep(attention_softmax=True)).model
    host = pack("nodes.host.memory.estimate")
    options = {**SIZE, "preset": "SD1.5", "dtype": "auto", "cfg": True, "text_tokens": 0, "memory_gib": 8.0}
    attention = [host.attention_memory(**options, backend="basic", model=model) for model in (selected, plain)]
    return {
        "auto": estimate(selected, "auto").chosen,
        "bytes": [estimate(model, "basic").phase("sampling").trace.terms["attention"] for model in (selected, plain)],
        "attention": [each.attention.total for each in attention],
        "dtype": attention[0].dtype,
        "foreign": [refusal(lambda model=model: estimate(model, "auto")) for model in (foreign, both)],
        "chosen": refusal(lambda: estimate(both, "basic")),
    }


def vae_bytes(vae):
    """What the host loads for this VAE."""
    models = [vae.patcher, *vae.patcher.model_patches_models()]
    return sum(comfy.model_management.module_size(each.model) for each in models)


def check_vaes():
    """{selection: (weights and decode, encode) said, before and after it has run; the real ones}."""
    model, found = make_model("SD15", torch.float32, **SD15), {}
    guard = pack("nodes.host.patching.guard")
    guards = pack("nodes.host.vae.guard")
    source = make_vae(torch.float32)
    cases = {
        "as loaded": source,
        "decoder bf16": vae_precision.select_vae_precision(source, "default", "bf16").vae,
        "encoder bf16": vae_precision.select_vae_precision(source, "bf16", "default").vae,
        "both bf16": vae_precision.select_vae_precision(source, "bf16", "bf16").vae,
    }
    for name in ("as loaded", "decoder bf16"):
        action = next(iter(guard.ON_NAN))
        cases[f"{name}, guarded"] = guards.guard_vae(cases[name], guard.Guard(action))
    for name, vae in cases.items():

        def said_of(vae=vae):
            answer = estimate(model, vae=vae)
            weights = sum(row.size for row in answer.parts["VAE"])
            return [weights, answer.phase("VAE decode").working, answer.phase("VAE encode").working]

        before, peaks = said_of(), []
        decode = partial(vae.decode, torch.randn(1, 4, 16, 16))
        encode = partial(vae.encode, torch.rand(1, 128, 128, 3))
        for work in (decode, encode):
            work()  # loaded from here on
            meter = StorageMeter()
            meter.hold("weights", [tensor for _, tensor, _ in traced.named_weights(vae.first_stage_model)])
            with meter:
                work()
            peaks.append(meter.peak - meter.labels["weights"])
        found[name] = {"said": [before, said_of()], "measured": [vae_bytes(vae), *peaks]}
    return found


def check_clips():
    """{selection: [bytes said before and after it has encoded, bytes of what the host loads for it]}."""
    import clip_families

    select = pack("nodes.host.clip.select").select_clip_precision
    model, source, found = make_model("SD15", torch.float32, **SD15), clip_families.host_clip("SDXL"), {}
    for name, chosen in {
        "as loaded": None,
        "storage": ("clip_l", "fp32", "default"),
        "compute": ("clip_g", "default", "bf16"),
        "both": ("all", "bf16", "bf16"),
    }.items():
        clip = source if chosen is None else select(source, *chosen).clip
        said_of = [sum(row.size for row in estimate(model, clip=clip).parts["CLIP"])]
        clip.encode_from_tokens(clip_families.tokens_of("SDXL"))
        said_of.append(sum(row.size for row in estimate(model, clip=clip).parts["CLIP"]))
        found[name] = [*said_of, comfy.model_management.module_size(clip.patcher.model)]
    return found


def check_families():
    """{family of VAE: {kind of MODEL: phases, or the sentence}}."""
    import vae_families
    from memory_probes import OTHERS

    models = {"SD15": make_model("SD15", torch.float32, **SD15)}
    models |= {kind: make_model(kind, torch.float32, **OTHERS[kind]) for kind in ("Flux", "WAN21_T2V")}
    models["WAN22_T2V"] = make_model("WAN22_T2V", torch.float32, **{**OTHERS["WAN21_T2V"], "in_dim": 48, "out_dim": 48})
    windows, found = vae_families.rounded_windows(), {}
    for name, family in vae_families.FAMILIES.items():
        if family.large or family.needs:
            continue
        vae = comfy.sd.VAE(sd=vae_families.make(name, windows), dtype=torch.float32, metadata=family.metadata or None)
        found[name] = {}
        for kind, model in models.items():
            answers = []
            said_of = refusal(lambda model=model, vae=vae, answers=answers: answers.append(estimate(model, vae=vae)))
            if answers:
                said_of = [phase.name for phase in answers[0].phases] + list(answers[0].remarks)
            found[name][kind] = said_of
    return found


def check_cancel():
    """How a cancel during an estimate ends, at the host's own look and in the middle of a trace."""
    cancelled = comfy.model_management.InterruptProcessingException
    model, ended = make_model("SD15", torch.float32, **SD15), []
    for _ in range(2):
        comfy.model_management.interrupt_current_processing(True)
        try:
            estimate(model)
        except cancelled:
            ended.append("cancelled")
        except Exception as failure:
            ended.append(f"{type(failure).__name__}: {failure}")
    comfy.model_management.interrupt_current_processing(False)
    return [*ended, refusal(lambda: estimate(model))]


if __name__ == "__main__":
    names = ["models", "softmax", "vaes", "clips", "families", "cancel"]
    write_results({name: globals()[f"check_{name}"] for name in names})
