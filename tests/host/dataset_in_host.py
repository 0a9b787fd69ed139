"""Checks on the host objects that a dataset is built from; tests/host/test_dataset_parts.py reads the results.

python tests/host/dataset_in_host.py HOST_FOLDER RESULT.json CHECKPOINT_FOLDER
"""

import functools
from pathlib import Path

# isort: off
from dataset_probes import BROKEN, BROKEN_UNET, CHECKPOINTS, CLIP, MIN, MODEL, VAE  # boots the host
from dataset_probes import base_model, building, building_parts, half_vae, host_clip, host_vae, keys
from dataset_probes import picture, same_state, some_pictures, state_of
# isort: on

import in_host
from in_host import pack, refusal, sample, write_results

# isort: split
import comfy.latent_formats  # noqa: E402
import comfy.model_management  # noqa: E402
import comfy.patcher_extension  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402
import vae_families  # noqa: E402


def vae_overflow_is_encoded_in_float32():
    state, vae = half_vae(3e4)
    full = comfy.sd.VAE(sd={k: v.half().float() for k, v in state.items()}, dtype=torch.float32)
    before, encoder = state_of(vae), host_vae.PictureEncoder(vae)
    latent = encoder.encode(picture(), "fox.png")
    wanted = full.encode(picture().movedim(0, -1)[None])[0]
    raw = vae.encode(picture().movedim(0, -1)[None])
    return {
        "host alone is finite": bool(torch.isfinite(raw).all()),
        "error against float32": in_host.error(latent, wanted),
        "retried": encoder.retried,
        "vae unchanged": same_state(before, state_of(vae)),
    }


def vae_that_overflows_nowhere_is_left_alone():
    _, vae = half_vae(1.0)
    encoder = host_vae.PictureEncoder(vae)
    latent = encoder.encode(picture(), "fox.png")
    return {
        "equal": bool(torch.equal(latent, vae.encode(picture().movedim(0, -1)[None])[0])),
        "retried": encoder.retried,
        "copied": encoder._private is not None,
    }


def vae_with_nan_names_file_and_layer():
    vae = comfy.sd.VAE(sd={k: v.clone() for k, v in VAE.first_stage_model.state_dict().items()})
    vae.first_stage_model.taesd_encoder[4].conv[2].bias.data[0] = float("nan")
    before = state_of(vae)
    said = refusal(lambda: host_vae.PictureEncoder(vae).encode(picture(), "fox.png"))
    return {"said": said, "vae unchanged": str(before[1:]) == str(state_of(vae)[1:])}


def vae_fingerprint_sees_weights_and_dtype():
    def fresh(dtype=torch.float32, add=0.0):
        state = {k: v.clone() for k, v in VAE.first_stage_model.state_dict().items()}
        state["taesd_encoder.0.weight"] += add
        return comfy.sd.VAE(sd=state, dtype=dtype)

    prints = [host_vae.vae_fingerprint(v) for v in (fresh(), fresh(), fresh(torch.bfloat16), fresh(add=1e-3))]
    loaded = fresh()
    loaded.encode(picture().movedim(0, -1)[None])
    return {
        "same weights": prints[0] == prints[1],
        "loaded": prints[0] == host_vae.vae_fingerprint(loaded),
        "other dtype": prints[0] != prints[2],
        "other weights": prints[0] != prints[3],
    }


def model_fingerprint_sees_patches_but_not_loading():
    key = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    patch = {key: ("diff", (torch.full((320, 320), 0.01),))}

    def patched(strength):
        model = MODEL.clone()
        model.add_patches(patch, strength)
        return model

    plain, strong, weak = base_model.model_fingerprint(MODEL), patched(1.0), patched(0.5)
    prints = [base_model.model_fingerprint(m) for m in (strong, weak)]
    comfy.model_management.load_models_gpu([strong])
    loaded = base_model.model_fingerprint(strong), base_model.model_fingerprint(MODEL)
    comfy.model_management.unload_all_models()
    return {
        "a patch counts": plain != prints[0],
        "its strength counts": prints[0] != prints[1],
        "the patched one loaded": prints[0] == loaded[0],
        "the plain one while the patched one is loaded": plain == loaded[1],
        "the plain one after": plain == base_model.model_fingerprint(MODEL),
        "parameters": base_model.model_parameters(MODEL),
    }


def latent_formats_are_read_and_checked():
    class Named:
        """Only what latent_scaling asks of a ModelPatcher; the formats are the host's own."""

        def __init__(self, latent_format):
            self.get_model_object = {"latent_format": latent_format}.__getitem__

    found = {}
    for name in dir(comfy.latent_formats):
        kind = getattr(comfy.latent_formats, name)
        if isinstance(kind, type) and kind.latent_dimensions in (2, 3):
            said = refusal(lambda kind=kind: found.update({kind.__name__: base_model.latent_scaling(Named(kind()))}))
            if said != "PASSED":
                found[name] = said
    return found


def base_latent_equals_the_ksamplers():
    captions = host_clip.CaptionEncoder(CLIP)
    conditioning, nothing = captions.conditioning("a boat"), captions.conditioning("")
    z = host_vae.PictureEncoder(VAE).encode(picture(), "fox.png")
    settings = {"steps": 4, "cfg": 3.0, "sampler_name": "dpmpp_2m", "scheduler": "karras", "denoise": 0.3}
    b = base_model.low_noise_latent(MODEL, z, conditioning, nothing, seed=7, **settings)
    wanted = sample(
        MODEL, conditioning, z[None], negative=nothing, steps=4, cfg=3.0, sampler="dpmpp_2m", scheduler="karras",
        denoise=0.3, seed=7,
    )[0]  # fmt: skip
    other = base_model.low_noise_latent(MODEL, z, conditioning, nothing, seed=8, **settings)
    return {
        "error": in_host.error(b, wanted),
        "another seed": in_host.error(other, wanted),
        "changed": in_host.error(b, z),
    }


def contexts_have_one_length_and_repeating_changes_nothing():
    captions = host_clip.CaptionEncoder(CLIP)
    long, longer = "word " * 100, "word " * 300
    short_only = vars(captions.measure(["a boat", "a cat"]))
    mixed = vars(captions.measure(["a boat", long, longer]))
    once, twice = captions.conditioning("a boat")[0][0], captions.encode("a boat")[0][None]
    x = torch.randn(1, 4, 8, 8)
    unet = MODEL.model.diffusion_model
    t = torch.tensor([500.0])
    return {
        "short only": short_only,
        "mixed": mixed,
        "cut": [len(text) for text in captions.cut],
        "shapes": [list(once.shape), list(twice.shape)],
        "the UNet's answer": in_host.error(unet(x, t, context=twice), unet(x, t, context=once)),
    }


def missing_keys_are_named():
    said = {}
    for name in (MIN, BROKEN, BROKEN_UNET):
        said[f"{name} model"] = refusal(lambda name=name: keys.check_checkpoint(name, model=MODEL))
        said[f"{name} clip"] = refusal(lambda name=name: keys.check_checkpoint(name, clip=CLIP))
        said[f"{name} text encoder"] = refusal(lambda name=name: keys.check_checkpoint(name, text_encoder=True))
    state = comfy.utils.load_torch_file(str(CHECKPOINTS / BROKEN))
    folder = Path(in_host.WORK.name) / "models" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.half().contiguous() for key, value in state.items()}
    comfy.utils.save_torch_file(state, str(folder / "broken.safetensors"))
    said["safetensors"] = refusal(lambda: keys.check_checkpoint("broken.safetensors", clip=CLIP))
    (folder / "nonsense.safetensors").write_bytes(b"x" * 100)
    said["nonsense"] = refusal(lambda: keys.check_checkpoint("nonsense.safetensors", clip=CLIP))
    return said


def vae_dtype_is_part_of_the_recipe():
    build, request = pack(f"{building}.build").build_dataset, pack(f"{building}.request").BuildRequest
    source, progress = pack(f"{building}.sources").DegradeBase("resize", 2.0), pack("nodes.host.progress").NodeProgress
    images = torch.rand(3, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    folders = []
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        vae = comfy.sd.VAE(sd={k: v.clone() for k, v in VAE.first_stage_model.state_dict().items()}, dtype=dtype)
        result = build(request(source, "dtype", vae=vae, images=[images]), progress(None, 1))
        folders.append([Path(result.folder).name, result.report.split()[0]])
    return folders


def precision_of_an_encoder_is_part_of_the_recipe():
    build, request = pack(f"{building}.build").build_dataset, pack(f"{building}.request").BuildRequest
    source, progress = pack(f"{building}.sources").DegradeBase("resize", 2.0), pack("nodes.host.progress").NodeProgress
    select = pack("nodes.host.vae.select").select_vae_precision
    images = torch.rand(3, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    built = {}
    for encoder, decoder, factor in (
        ("default", "default", 1), ("bf16", "default", 1), ("default", "bf16", 1), ("default", "bf16", 1.5),
        ("bf16", "default", 1),
    ):
        state = {k: v.clone() for k, v in VAE.first_stage_model.state_dict().items()}
        state["taesd_encoder.0.weight"] *= factor
        vae = select(comfy.sd.VAE(sd=state, dtype=torch.float32), encoder, decoder).vae
        result = build(request(source, "halves", vae=vae, images=[images]), progress(None, 1))
        index = pack("training.data.index").read_index(result.folder)[0]
        built[f"{len(built)} {encoder} {decoder} {factor}"] = [
            Path(result.folder).name, result.report.split()[0], index["vae"]["dtype"],
        ]
    return built


def refused_vaes_get_one_sentence():
    build, request, degrade, sample, progress = building_parts()
    windows = vae_families.rounded_windows()
    said = {}
    for name in ("TAEHV of Wan 2.2", "Hunyuan3D (ShapeVAE)", "Stable Audio (Oobleck)"):
        family = vae_families.FAMILIES[name]
        vae = comfy.sd.VAE(sd=vae_families.make(name, windows), metadata=family.metadata)
        wanted = request(degrade("resize", 2.0), "refused", vae=vae, images=some_pictures(2))
        said[name] = refusal(lambda wanted=wanted: build(wanted, progress(None, 1)))
    pixels = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    conditioning = host_clip.CaptionEncoder(CLIP).conditioning("a boat")
    base = sample(MODEL, conditioning, None, 2, 1.0, "euler", "normal", 0.3, 0)
    wanted = request(base, "refused", vae=pixels, images=some_pictures(2))
    said["another family"] = refusal(lambda: build(wanted, progress(None, 1)))
    damaged = comfy.sd.VAE(sd={k: v.clone() for k, v in VAE.first_stage_model.state_dict().items()})
    damaged.first_stage_model.taesd_encoder[0].weight.data = torch.zeros(64, 5, 3, 3)
    wanted = request(degrade("resize", 2.0), "refused", vae=damaged, images=some_pictures(2))
    node = pack("nodes.dataset").Ref2VBuildRefinerDataset
    for name in ("caption", "folder"):  # a link may bring None
        given = {"base": [degrade("resize", 2.0)], "name": ["none"], name: [None]}
        said[f"no {name}"] = refusal(lambda given=given: node.execute(**given))
    said["weights of another shape"] = refusal(lambda: build(wanted, progress(None, 1)))
    return said


def running_out_of_memory_is_said_and_its_latents_are_not_kept():
    """A stand-in for a GPU that is too small: the encoder of a real VAE fails as such a GPU does, above a size."""
    build, request, degrade, _, progress = building_parts()
    vae = comfy.sd.VAE(sd={k: v.clone() for k, v in VAE.first_stage_model.state_dict().items()})
    whole, small = vae.first_stage_model.encode, [True]

    def encode(pixels):
        if small[0] and pixels.shape[-2:].numel() > 64 * 64:
            raise torch.cuda.OutOfMemoryError("stand-in")
        return whole(pixels)

    vae.first_stage_model.encode = encode
    vae.encode_tiled_ = functools.partial(vae.encode_tiled_, tile_x=64, tile_y=64, overlap=16)  # small, so quick
    images = [*some_pictures(1), *some_pictures(1, 128, 128)]
    wanted = request(degrade("resize", 2.0), "tiles", vae=vae, images=images, max_pixels=128 * 128)
    first = build(wanted, progress(None, 1))
    small[0] = False
    text = (Path(first.folder) / "report.txt").read_text()
    pack("nodes.host.paths").move_aside(Path(first.folder))
    again = build(wanted, progress(None, 1))
    return {"tiled": first.report, "report.txt": text, "whole": again.report}


def base_model_and_vae_take_few_turns():
    build, request, _, sample, progress = building_parts()
    turns = []
    vae = comfy.sd.VAE(sd={k: v.clone() for k, v in VAE.first_stage_model.state_dict().items()})
    whole = vae.first_stage_model.encode

    def encode(pixels):
        turns.append("VAE")
        return whole(pixels)

    def watch(executor, *args, **kwargs):
        turns.append("model")
        return executor(*args, **kwargs)

    vae.first_stage_model.encode = encode
    model = MODEL.clone()
    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, "turns", watch)
    conditioning = host_clip.CaptionEncoder(CLIP).conditioning("a boat")
    base = sample(model, conditioning, None, 1, 1.0, "euler", "normal", 0.3, 0)
    result = build(request(base, "turns", vae=vae, images=some_pictures(9)), progress(None, 1))
    return {
        "turns": [kind for i, kind in enumerate(turns) if i == 0 or turns[i - 1] != kind],
        "samples": turns.count("model"),
        "report": result.report,
    }


def what_was_sampled_is_found_again():
    build, request, _, sample, progress = building_parts()
    conditioning = host_clip.CaptionEncoder(CLIP).conditioning("a boat")

    def built(seed=0, images=3, model=MODEL, positive=conditioning):
        base = sample(model, positive, None, 2, 1.0, "euler", "normal", 0.3, seed)
        result = build(request(base, "kept", vae=VAE, images=some_pictures(images)), progress(None, 1))
        folder = Path(result.folder)
        said = {
            "sampled": [line.strip() for line in result.report.splitlines() if line.startswith("Base latents")],
            "files": {path.name: path.read_bytes().hex()[-64:] for path in sorted(folder.glob("*.safetensors"))},
            "hash": result.content_hash,
        }
        pack("nodes.host.paths").move_aside(folder)
        return said

    patched = MODEL.clone()
    patched.set_model_sampler_post_cfg_function(lambda args: args["denoised"])
    select = pack("nodes.host.model.select")
    selected = select.select_model_precision(MODEL, "bf16", keep=select.Keep(norms=True)).model
    switched = selected.clone()
    switched.set_model_compute_dtype(torch.float32)
    guards = pack("nodes.host.patching.guard")
    guarded = [
        pack("nodes.host.model.guard").guard_model(selected, guards.Guard(on_nan))
        for on_nan in (guards.STOP, guards.RERUN)
    ]
    known = [  # (what a recipe has of the model, whether its samples are kept), of a base made twice of each
        [
            (base.describe()["fingerprint"], base.fingerprint([]), base.can_be_kept())
            for base in (sample(model, conditioning, None, 2, 1.0, "euler", "normal", 0.3, 0) for _ in range(2))
        ]
        for model in (MODEL, selected, switched, *guarded, patched)
    ]
    other = [[conditioning[0][0] + 0.1, conditioning[0][1]]]
    return {
        "first": built(), "again": built(), "one more picture": built(images=4), "another seed": built(seed=1000),
        "another text": built(positive=other), "a patched model": built(model=patched),
        "known": known,
    }  # fmt: skip


write_results(
    {
        check.__name__: check
        for check in (
            vae_overflow_is_encoded_in_float32,
            vae_that_overflows_nowhere_is_left_alone,
            vae_with_nan_names_file_and_layer,
            vae_fingerprint_sees_weights_and_dtype,
            model_fingerprint_sees_patches_but_not_loading,
            latent_formats_are_read_and_checked,
            base_latent_equals_the_ksamplers,
            contexts_have_one_length_and_repeating_changes_nothing,
            missing_keys_are_named,
            vae_dtype_is_part_of_the_recipe,
            precision_of_an_encoder_is_part_of_the_recipe,
            refused_vaes_get_one_sentence,
            running_out_of_memory_is_said_and_its_latents_are_not_kept,
            base_model_and_vae_take_few_turns,
            what_was_sampled_is_found_again,
        )
    }
)
