"""Precision nodes under the newest host's dynamic VRAM; tests/host/test_dynamic_precision.py reads the results.

See in_host.py for how it is run. The patchers are the stand-ins of newest_host (its docstring says what is real), over
real files that lie in memory as the file's own bytes.
"""

import gc
import tempfile
import weakref
from pathlib import Path

from in_host import error, pack, refusal, sample, torch, write_results  # boots the host

# isort: split
from newest_host.install import install  # noqa: E402

install()

# isort: split
import comfy.model_management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import folder_paths  # noqa: E402
from clip_families import FAMILIES, host_clip, tokens_of  # noqa: E402
from newest_host.loading import load_clip, load_model, load_vae, mapped_digest, write_file  # noqa: E402
from precision_nodes import (  # noqa: E402
    BF16,
    FP16,
    FP32,
    Keep,
    guard_vae,
    guards,
    load_vae_precisely,
    model_dtypes,
    select_clip,
    select_model,
    select_vae,
)
from unets import conditioning, file_of, with_lora  # noqa: E402
from vae_families import make  # noqa: E402
from vae_probes import WINDOWS  # noqa: E402

FOLDER = tempfile.TemporaryDirectory(prefix="ref2v-")
NAME = "SD 1.5"


def model(dtype=FP32, chosen=BF16):
    """A MODEL of a file in `dtype`, of which the host's loader has chosen `chosen`."""
    path = Path(FOLDER.name, f"unet_{dtype}.safetensors")
    if not path.is_file():
        state = {key.removeprefix("model.diffusion_model."): value for key, value in file_of(NAME).items()}
        write_file(path, state, dtype)
    return load_model(str(path), {"dtype": chosen})


def drawn(made, steps=2):
    return sample(made, conditioning(NAME), torch.zeros(1, 4, 8, 8), steps=steps)


def fed(made):
    """(dtypes that layers of the host are called with, by whether it is a norm; what comes out)."""
    network, seen, handles = made.model.diffusion_model, {True: set(), False: set()}, []

    def look(is_norm):
        return lambda _layer, args, _output: seen[is_norm].add(str(args[0].dtype)[6:])

    for layer in network.modules():
        if hasattr(layer, "comfy_cast_weights") and getattr(layer, "weight", None) is not None:
            is_norm = isinstance(layer, (torch.nn.GroupNorm, torch.nn.LayerNorm))
            handles.append(layer.register_forward_hook(look(is_norm)))
    try:
        out = drawn(made)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(seen[True]), sorted(seen[False]), out


def model_computes_and_is_kept():
    source = model()
    before = mapped_digest(source.model)
    straight = drawn(source)
    found = {"loaded": [str(dtype)[6:] for dtype in model_dtypes(source)], "fed": {}, "error": {}}
    for compute in ("fp32", "fp16", "bf16"):
        norms, others, made = fed(select_model(source, compute, "default", Keep(norms=True)).model)
        found["fed"][compute], found["error"][compute] = [norms, others], error(made, straight)
    stored = select_model(source, "fp32", "fp8_e4m3fn")
    weight = stored.model.model.diffusion_model.out[2].weight
    found["stored"] = [str(weight.dtype)[6:], type(stored.model).__name__, error(drawn(stored.model), straight)]
    found["report"] = stored.report
    orphan = source.clone()
    orphan.cached_patcher_init = None  # as other packs' loaders leave it
    alone = select_model(orphan, "default", "fp16")
    found["no way to read again"] = [str(alone.model.model.diffusion_model.out[2].weight.dtype)[6:],
                                     error(drawn(alone.model), straight)]  # fmt: skip
    patched = with_lora(source)
    wanted = drawn(patched)
    moved = select_model(patched, "default", "fp32").model
    found["lora moves along"] = error(drawn(moved), wanted) / error(wanted, straight)
    restored = select_model(with_lora(select_model(source, "default", "fp16").model)).model
    found["restored with a LoRA of later"] = [restored.is_dynamic(), torch.equal(drawn(restored), wanted)]
    found["default gives the source"] = select_model(stored.model).model is source
    found["again"] = torch.equal(drawn(source), straight)
    comfy.model_management.unload_all_models()
    found["the file's memory is as it was"] = mapped_digest(source.model) == before
    return found


def a_storage_that_cannot_be_had_is_passed_over():
    """A handle of the host that nobody may copy, and no way to read the file again."""
    source = model()
    drawn(source)
    source.cached_patcher_init = None

    class Uncopyable:
        def __deepcopy__(self, _memo):
            raise RuntimeError("this handle is not to be copied")

    source.model.diffusion_model.out[2].of_a_later_host = Uncopyable()
    made = select_model(source, "fp32", "fp16")
    gone = model()
    load, (path, options) = gone.cached_patcher_init
    gone.cached_patcher_init = (load, (path + ".gone", options))
    return {
        "report": made.report,
        "computes": fed(made.model)[1],
        "source's model": made.model.model is source.model,
        "file gone": select_model(gone, "default", "fp16").report,
    }


def a_copy_is_a_model_of_its_own():
    """What newer hosts know a model by: uuid, the way to read it again, buffers, clones for other GPUs."""
    source = model()
    further = source.deepclone_multigpu(torch.device("cpu"))
    further.is_multigpu_base_clone = True
    source.set_additional_models("multigpu", [further])
    copy = select_model(source, "fp32", "fp16").model
    again = copy.deepclone_multigpu(torch.device("cpu"))
    return {
        "plain": [type(copy).__name__, copy.is_dynamic()],
        "a uuid of its own": copy.clone_base_uuid != source.clone_base_uuid == further.clone_base_uuid,
        "buffers of its own": copy.backup_buffers is not source.backup_buffers,
        "no clones of the other model": copy.get_additional_models_with_key("multigpu") == [],
        "for another GPU": [str(again.model.diffusion_model.out[2].weight.dtype)[6:], again.model is not copy.model,
                            str(again.get_model_object("manual_cast_dtype"))[6:],
                            torch.equal(drawn(again), drawn(copy))],
        "back": [select_model(copy.clone()).model.get_additional_models_with_key("multigpu")[0].model is further.model],
        "compute follows": [str(clone.get_model_object("manual_cast_dtype"))[6:] for clone in _matched(source)],
    }  # fmt: skip


def _matched(source):
    """The clones for other GPUs as the newest host brings them up to date before it samples."""
    made = select_model(source, "fp16").model
    return [made.clone(model_override=clone.get_clone_model_override())
            for clone in made.get_additional_models_with_key("multigpu")]  # fmt: skip


def copies_go_when_nobody_uses_them():
    source = model()
    made = select_model(source, "default", "fp16").model
    assert select_model(source, "default", "fp16").model.model is made.model
    gone, kept = weakref.ref(made.model), weakref.ref(source.model)
    del made
    gc.collect()
    copy_gone = gone() is None
    del source
    gc.collect()
    return {"copy": copy_gone, "source": kept() is None}


def clip_computes_and_is_kept():
    path = Path(FOLDER.name, "clip.safetensors")
    write_file(path, host_clip("SDXL").cond_stage_model.state_dict(), FP32)
    source = load_clip(str(path), "SDXL")
    encode = lambda clip: clip.encode_from_tokens_scheduled(tokens_of("SDXL"))[0][0]  # noqa: E731
    straight = encode(source)
    quick, stored = select_clip(source, "clip_l", "default", "bf16"), select_clip(source, "all", "fp8_e5m2")
    found = {
        "dynamic": source.patcher.is_dynamic(),
        "compute": error(encode(quick.clip), straight),
        "storage": error(encode(stored.clip), straight),
        "kept": sorted({str(w.dtype)[6:] for w in stored.clip.patcher.model.parameters() if w.ndim > 1}),
        "report": stored.report,
    }
    orphan = source.clone()
    orphan.patcher.cached_patcher_init = None
    found["no way to read again"] = error(encode(select_clip(orphan, "all", "bf16").clip), straight)
    found["default gives the source"] = select_clip(stored.clip).clip is source
    found["again"] = torch.equal(encode(source), straight)
    assert FAMILIES["SDXL"].encoders == ("clip_l", "clip_g")
    return found


def vae_file():
    path = Path(folder_paths.get_folder_paths("vae")[0], "small.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        # not exact in BF16; but the two numbers of the whole the host itself rounds for good as it loads them
        given = make("TAESD", WINDOWS)
        state = {k: v * (1 + 1e-4) if k.startswith("taesd_") else torch.ones(()) for k, v in given.items()}
        write_file(path, state, FP32)
    return path


def vae_halves_come_from_the_file():
    """The loader's BF16 is noted beside the weights; the weights are the file's FP32, and so is what we copy."""
    comfy.model_management.vae_dtype = lambda *_: BF16
    source, pixels, latent = load_vae(str(vae_file())), torch.rand(1, 64, 64, 3), torch.randn(1, 4, 8, 8)
    before = mapped_digest(source.first_stage_model.taesd_decoder)
    straight = source.decode(latent)
    fine = load_vae_precisely("small.safetensors", "fp32", "fp32")
    exact = fine.vae.decode(latent)
    made = select_vae(source, "bf16", "fp32")
    default = load_vae_precisely("small.safetensors", "default", "default").vae
    found = {
        "dynamic": [source.patcher.is_dynamic(), made.vae.patcher.is_dynamic(), fine.vae.patcher.is_dynamic()],
        "loader": error(straight, exact),
        "decoder": torch.equal(made.vae.decode(latent), exact),
        "encoder": error(made.vae.encode(pixels), fine.vae.encode(pixels)),
        "report": made.report,
        "default gives the source": select_vae(made.vae).vae is source,
        "load, default": error(default.decode(latent), exact),
        "one file, one model": default is not fine.vae and select_vae(default, "fp32", "fp32").vae is fine.vae,
        "again": torch.equal(source.decode(latent), straight),
    }
    comfy.model_management.unload_all_models()
    found["the file's memory is as it was"] = mapped_digest(source.first_stage_model.taesd_decoder) == before
    return found


def guard_audit_and_plan():
    source, clip = model(), host_clip("SD 1")
    comfy.model_management.vae_dtype = lambda *_: FP16
    vae = load_vae(str(vae_file()))
    guarded = guard_vae(vae, guards.Guard(guards.RERUN))
    vae.first_stage_model.taesd_decoder[1].bias.data.fill_(1e5)  # past what FP16 holds; the file's FP32 does hold it
    mended = guarded.decode(torch.randn(1, 4, 8, 8))
    vae = load_vae(str(vae_file()))
    audited = pack("nodes.host.precision.audit").audit_precision(
        source, None, vae, torch.rand(1, 64, 64, 3), prompt="", positive=conditioning(NAME), sigmas="middle",
        dtypes="bf16", seed=0, node_id=None,
    )  # fmt: skip
    plan = pack("training.precision.presets").preset_plan("article", torch.device("cpu"))
    planned = pack("nodes.host.precision.plan").apply_plan(plan, model=source, clip=clip, vae=vae)
    return {
        "mended": bool(torch.isfinite(mended).all()),
        "audit": audited.report,
        "planned": [str(dtype)[6:] for dtype in model_dtypes(planned.model)],
        "table": planned.table,
        "sampled": bool(torch.isfinite(drawn(planned.model)).all()),
    }


def a_cancel_is_never_swallowed():
    """Newer hosts' is no Exception; neither a reload nor a copy may turn it into a sentence."""
    cancelled = comfy.model_management.InterruptProcessingException

    def stop(*_args, **_kwargs):
        raise cancelled

    found = {"is an Exception": issubclass(cancelled, Exception)}
    source = model()
    source.cached_patcher_init = (stop, ())
    call = guards.Call(lambda _layer: "UNet", torch.nn.Identity(), FP16, {}, lambda: torch.tensor(float("nan")), stop)
    for what, action in {
        "reload": lambda: select_model(source, "default", "fp16"),
        "guard": lambda: guards.Guard(guards.RERUN).answer(call, torch.tensor(float("nan"))),
    }.items():
        try:
            found[what] = refusal(action)
        except cancelled:
            found[what] = "cancelled"
    return found


CHECKS = {
    check.__name__: check
    for check in (
        model_computes_and_is_kept,
        a_storage_that_cannot_be_had_is_passed_over,
        a_copy_is_a_model_of_its_own,
        copies_go_when_nobody_uses_them,
        clip_computes_and_is_kept,
        vae_halves_come_from_the_file,
        guard_audit_and_plan,
        a_cancel_is_never_swallowed,
    )
}

if __name__ == "__main__":
    write_results(CHECKS)
